"""A step that is run a few times, then captured in a CUDA graph and replayed from fixed buffers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

P = ParamSpec("P")
R = TypeVar("R")

WARM_STEPS = 3
"""How often a step runs outside the graph first: capture needs kernels that are compiled and loaded."""
VERSIONS = 256
"""How many versions of a step the compiler may keep: one for each space, shape and number of visible patches that one
process trains with. After eight, torch's own limit, it runs further ones uncompiled and says so in a log alone."""


class Replay:
    """Calls a function of tensors that returns nothing; all it makes lives on between calls in the graph's memory.

    `captured` is called once the graph is known and has not run yet: the place to note where its tensors lie. Steps
    that take turns and leave nothing in that memory for each other may have a `pool` of it together.
    """

    def __init__(self, step: Callable[..., None], captured: Callable[[], None], pool: Any = None) -> None:
        self._step, self._captured, self._pool = step, captured, pool
        self._buffers: tuple[Tensor, ...] = ()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._stream, self._warm = torch.cuda.Stream(), 0

    def __call__(self, *inputs: Tensor) -> None:
        """Take one step with these inputs, always of the same shapes."""
        self._fill(inputs)
        if self._graph:
            self._graph.replay()
        elif self._warm < WARM_STEPS:
            self._run_once()
        else:
            self._capture().replay()

    def _fill(self, inputs: tuple[Tensor, ...]) -> None:
        if not self._buffers:
            self._buffers = tuple(torch.empty_like(tensor) for tensor in inputs)
        for buffer, tensor in zip(self._buffers, inputs, strict=True):
            buffer.copy_(tensor)

    def _run_once(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._step(*self._buffers)
        torch.cuda.current_stream().wait_stream(self._stream)
        self._warm += 1

    def _capture(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self._step(*self._buffers)
        self._captured()
        self._graph = graph
        return graph


def compiled(measure: Callable[P, R]) -> Callable[P, R]:
    """A step's measure, compiled for the shapes that come."""
    torch._dynamo.config.recompile_limit = VERSIONS
    return torch.compile(measure, dynamic=False)


# Rounded weights beside the whole ones.


class Halves:
    """The weights that autocast would round to bfloat16 layer by layer, rounded by the update of the step before.

    The numbers are autocast's own; what is saved are three hundred small kernels a step.
    """

    def __init__(self, model: nn.Module) -> None:
        layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
        slots = [(layer, key, p) for layer in layers for key, p in layer.named_parameters(recurse=False)]
        self._slots = [slot for slot in slots if slot[2].requires_grad]
        self.of = {p: nn.Parameter(p.detach().bfloat16()) for _, _, p in self._slots}

    @contextmanager
    def lent(self) -> Iterator[None]:
        """The model's layers hold their rounded weights, and these get the gradients."""
        for layer, key, whole in self._slots:
            layer._parameters[key], self.of[whole].grad = self.of[whole], None
        try:
            yield
        finally:
            for layer, key, whole in self._slots:
                layer._parameters[key] = whole
