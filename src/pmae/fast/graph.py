"""Captured steps: an optimization step that runs a few times, is captured in a CUDA graph, and then replayed.

Importing this needs no Triton; a captured step does.
"""

import functools
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from pmae.errors import Interrupted, UserError, first_line
from pmae.system import is_out_of_memory

try:
    from pmae.fast.adamw import FusedAdamW, WeightCopies
except ImportError:  # no Triton: a machine without a GPU, or not Linux, where no step is captured
    FusedAdamW = WeightCopies = None  # type: ignore[assignment, misc]

P = ParamSpec("P")
R = TypeVar("R")

COMPILE_FROM = 5e10
"""Pixels of a whole run from which on compiling its step pays: it takes half a minute first, and then, on an H200, 8%
off a step at 32x32 and 12% at 224x224, which is 52 and 17 s of a run over so many pixels."""
WARM_STEPS = 3  # how often a step runs outside the graph first: capture needs kernels that are compiled and loaded
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
        self._buffers = self._buffers or tuple(torch.empty_like(tensor) for tensor in inputs)
        for buffer, tensor in zip(self._buffers, inputs, strict=True):
            buffer.copy_(tensor)
        if self._graph is None and self._warm < WARM_STEPS:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream), _other_stream():
                self._step(*self._buffers)
            torch.cuda.current_stream().wait_stream(self._stream)
            self._warm += 1
            return
        if self._graph is None:
            graph = torch.cuda.CUDAGraph()
            # Other threads go on: the one that reads images pins memory, which no capture elsewhere is to forbid.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                self._step(*self._buffers)
            self._captured()
            self._graph = graph
        self._graph.replay()


@contextmanager
def _other_stream() -> Iterator[None]:
    """Without torch's warning that gradients first came on another stream: the two wait for each other."""
    warn = getattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", lambda on: None)  # torch 2.10
    warn(False)
    try:
        yield
    finally:
        warn(True)


def compiled(measure: Callable[P, R]) -> Callable[P, R]:
    """A step's measure, compiled for the shapes that come; what was compiled is kept for later runs and processes."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(home / "pmae" / "compiled"))
    torch._dynamo.config.recompile_limit = VERSIONS
    # Random numbers are eager torch's: what a network drops is the same compiled or not.
    return torch.compile(measure, dynamic=False, options={"fallback_random": True})


def falls_back(function: Callable[P, R]) -> Callable[P, R]:
    """Call a function that compiles or captures; where that fails, in whatever way, again with `plain=True`."""

    @functools.wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> R:
        try:
            return function(*arguments, **options)
        except (UserError, Interrupted):
            raise
        except Exception as error:  # a compiler may raise anything
            if not torch.cuda.is_initialized() or options.get("plain") or is_out_of_memory(error):
                raise
            warnings.warn(f"{failure(error)}; going on without it, which may take a few times as long", stacklevel=2)
            options["plain"] = True
            return function(*arguments, **options)

    return call


def failure(error: Exception) -> str:
    """What the compiler said, in one line."""
    return f"compiling or capturing a step failed ({type(error).__name__}: {first_line(error)})"


class CapturedStep:
    """An optimization step captured in a CUDA graph and replayed: the same numbers, and no launches to wait for.

    `measure` gives a loss and numbers to keep; `update` gets these and a function that lets AdamW take its step. There
    is one graph for every combination of inputs that are no tensors, such as a number of visible patches.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        measure: Callable[..., tuple[Tensor, Tensor]],
        update: Callable[[Tensor, Callable[[], None]], None],
        bf16: bool,
    ) -> None:
        self.optimizer, self.measure, self.update = optimizer, measure, update
        self._copies = WeightCopies(model) if bf16 else None
        self._replays: dict[tuple[Any, ...], Replay] = {}
        # Fifty graphs of an MAE at 64x64 would not fit on a card side by side.
        self._pool = torch.cuda.graph_pool_handle()

    def leaves(self, parameters: list[nn.Parameter]) -> list[nn.Parameter]:
        """Where the gradients of these parameters are: on their bf16 copies, if they have any."""
        return [self._copies.of.get(p, p) for p in parameters] if self._copies else parameters

    def __call__(self, *inputs: Any) -> None:
        """Take one step; tensors must have the shapes of the first call with the same other inputs."""
        leaves, spec = tree_flatten(inputs)
        key = tuple(Tensor if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        if key not in self._replays:
            self._replays[key] = self._replay(key, spec)
        self._replays[key](*(leaf for leaf in leaves if isinstance(leaf, Tensor)))

    def _replay(self, key: tuple[Any, ...], spec: TreeSpec) -> Replay:
        adamw = FusedAdamW(self.optimizer, self._copies.of if self._copies else {})

        def step(*tensors: Tensor) -> None:
            rest = iter(tensors)
            inputs = tree_unflatten([next(rest) if leaf is Tensor else leaf for leaf in key], spec)
            self.optimizer.zero_grad(set_to_none=True)
            with self._copies.in_use() if self._copies else nullcontext():
                loss, values = self.measure(*inputs)
                loss.backward()
            adamw.note()
            self.update(values, adamw)

        return Replay(step, adamw.fill, self._pool)
