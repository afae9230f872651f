"""When a step runs, is captured and is replayed, with stand-ins for what only a GPU has."""

from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from pmae.fast import graph
from pmae.fast.graph import WARM_STEPS, CapturedStep, Replay


class Stream:
    """A stream that has nothing to wait for."""

    def wait_stream(self, other: object) -> None: ...


class Recording:
    """Remembers what ran while it was being captured, and does that again."""

    def __init__(self) -> None:
        self.captured: list[Any] = []

    def replay(self) -> None:
        for work in self.captured:
            work()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[Recording]:
    """Graphs under capture, the innermost last."""
    capturing: list[Recording] = []

    @contextmanager
    def capture(graph: Recording, pool: object, capture_error_mode: str) -> Any:
        assert capture_error_mode == "thread_local"  # others may read images meanwhile
        capturing.append(graph)
        yield
        capturing.pop()

    @contextmanager
    def stream(_: Stream) -> Any:
        yield

    for name, stand_in in (("Stream", Stream), ("CUDAGraph", Recording), ("graph", capture), ("stream", stream)):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    return capturing


def test_every_call_takes_one_step_with_its_own_inputs(gpu: list[Recording]) -> None:
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


def test_inputs_are_copied_and_may_change_after_the_call(gpu: list[Recording]) -> None:
    seen: list[Tensor] = []
    replay = Replay(lambda x: seen.append(x), lambda: None)
    x = torch.zeros(2)
    replay(x)
    x.fill_(5)
    assert torch.equal(seen[0], torch.zeros(2))
    with pytest.raises(ValueError, match="argument"):
        replay(x, x)


class Copies:
    """No weight has a copy."""

    def __init__(self, model: nn.Module) -> None:
        self.of: dict[Any, Any] = {}

    def in_use(self) -> Any:
        return nullcontext()


class TorchAdamW:
    """torch's own update."""

    def __init__(self, optimizer: torch.optim.Optimizer, copies: dict[Any, Any]) -> None:
        self.optimizer = optimizer

    def fill(self) -> None: ...

    def note(self) -> None: ...

    def __call__(self) -> None:
        self.optimizer.step()


class Pair(NamedTuple):
    """Inputs of a step: a tensor, or none, and a number that shapes follow from."""

    scale: Tensor | None
    rows: int


@pytest.mark.parametrize("scaled", [True, False])
def test_a_captured_step_is_the_step(scaled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nested inputs arrive whole, with a replay for every number among them; the update is the optimizer's."""
    made: list[Callable[..., None]] = []

    def direct(step: Callable[..., None], captured: object, pool: object) -> Callable[..., None]:
        made.append(step)
        return step

    for name, stand_in in (("Replay", direct), ("WeightCopies", Copies), ("FusedAdamW", TorchAdamW)):
        monkeypatch.setattr(graph, name, stand_in)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    kept: list[Tensor] = []

    def measure(x: Tensor, pair: Pair) -> tuple[Tensor, Tensor]:
        loss = model(x[: pair.rows] * (1 if pair.scale is None else pair.scale)).square().sum()
        return loss, loss.detach()

    def update(values: Tensor, take: Callable[[], None]) -> None:
        kept.append(values)
        take()

    found = []
    inputs = [(torch.randn(4, 3), Pair(torch.rand(()) if scaled else None, rows)) for rows in (2, 3, 2, 4)]
    for captured in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        step = CapturedStep(model, optimizer, measure, update, bf16=True)
        for x, pair in inputs:
            if captured:
                step(x, pair)
                continue
            optimizer.zero_grad()
            loss, values = measure(x, pair)
            loss.backward()
            update(values, optimizer.step)
        found.append([*model.parameters(), *kept[-4:]])
    assert len(made) == 3
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
