"""When a step runs, is captured and is replayed, with stand-ins for what only a GPU has."""

from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from pmae.fast.graph import WARM_STEPS, Replay


class Stream:
    """A stream that has nothing to wait for."""

    def wait_stream(self, other: object) -> None: ...


class Graph:
    """Remembers what ran while it was being captured, and does that again."""

    def __init__(self) -> None:
        self.captured: list[Any] = []

    def replay(self) -> None:
        for work in self.captured:
            work()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """Graphs under capture, the innermost last."""
    capturing: list[Graph] = []

    @contextmanager
    def capture(graph: Graph, pool: object) -> Any:
        capturing.append(graph)
        yield
        capturing.pop()

    @contextmanager
    def stream(_: Stream) -> Any:
        yield

    for name, stand_in in (("Stream", Stream), ("CUDAGraph", Graph), ("graph", capture), ("stream", stream)):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    return capturing


def test_every_call_takes_one_step_with_its_own_inputs(gpu: list[Graph]) -> None:
    total, order = torch.zeros(3), []

    def step(x: Tensor, weight: Tensor) -> None:
        def work() -> None:
            total.add_(weight * x)

        order.append("captured" if gpu else "run")
        # Under capture nothing is computed yet, as on a GPU.
        gpu[-1].captured.append(work) if gpu else work()

    replay = Replay(step, lambda: order.append("noted"))
    inputs = [(torch.full((3,), float(n)), torch.tensor(n + 1.0)) for n in range(WARM_STEPS + 4)]
    for x, weight in inputs:
        replay(x, weight)
    assert order == ["run"] * WARM_STEPS + ["captured", "noted"]
    assert torch.equal(total, torch.stack([weight * x for x, weight in inputs]).sum(0))


def test_inputs_are_copied_and_may_change_after_the_call(gpu: list[Graph]) -> None:
    seen: list[Tensor] = []
    replay = Replay(lambda x: seen.append(x), lambda: None)
    x = torch.zeros(2)
    replay(x)
    x.fill_(5)
    assert torch.equal(seen[0], torch.zeros(2))
    with pytest.raises(ValueError, match="argument"):
        replay(x, x)
