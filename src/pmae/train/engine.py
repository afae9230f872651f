"""The engine of a run on a GPU: the fastest that works, its first step checked against the plain one."""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from pmae import fast
from pmae.errors import UserError
from pmae.fast.graph import WARM_STEPS
from pmae.train.step import Graph, Inputs, Plain, Tally

TOLERANCE = {torch.bfloat16: 0.02, torch.float32: 1e-3}
"""How far the first loss may be from the plain one's, relative to it; rounding alone makes some 5e-4 and 1e-6 of it."""
SETTLED = WARM_STEPS + 2
"""After so many steps everything is compiled and captured: what fails then is the step itself."""


class FastEngine:
    """Steps compiled and captured in a CUDA graph; where that fails, captured alone; where that fails, eager."""

    def __init__(self, build: Callable[[type[Plain]], Plain], asked: bool, check: bool) -> None:
        self._build, self._asked = build, asked
        self._simpler: list[tuple[str, type[Plain]]] = [("captured without the compiler", Uncompiled), ("eager", Plain)]
        self.current = build(Graph)
        self._check, self._taken = check, 0

    @property
    def tally(self) -> Tally:
        """What was measured since it was last read."""
        return self.current.tally

    def __call__(self, inputs: Inputs) -> None:
        """Take one step."""
        checked = self._check and self._taken == 0
        expected = self._plain_loss(inputs) if checked else None
        self._take(inputs)
        self._taken += 1
        if expected is not None:
            self._compare(float(self.tally.sums[0]), float(expected))

    def _take(self, inputs: Inputs) -> None:
        while True:
            try:
                self.current(inputs)
                return
            except (UserError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # a compiler may raise anything
                if self._taken >= SETTLED or not self._simpler:
                    raise
                self._fall_back(error)

    def _fall_back(self, error: Exception) -> None:
        reason = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')[:200]}"
        if self._asked:
            raise UserError(f"train.engine must be plain or auto here, got 'graph', which failed: {reason}") from error
        name, kind = self._simpler.pop(0)
        warnings.warn(
            f"the fast step failed ({reason}); training goes on with the {name} one, which gives the same numbers "
            "and may take a few times as long",
            stacklevel=2,
        )
        before = self.tally
        self.current = self._build(kind)
        self.tally.take_over(before)

    @torch.no_grad()
    def _plain_loss(self, inputs: Inputs) -> Tensor:
        """The loss of a step by timm's own code; nothing is trained, and what a forward pass changes is put back."""
        model = self.current.model
        buffers = [(buffer, buffer.clone()) for buffer in model.encoder.buffers()]
        hide = getattr(model, "hide_components", None)
        fast.accelerate(model, "none")
        if hide is not None:
            # The same masks: of components without variance the kernel and the sort may hide other ones.
            model.hide_components = hide
        try:
            loss, _ = Plain.measure(self.current, inputs.images, inputs.crops, inputs.draw)
        finally:
            fast.accelerate(model, self.current.config.train.kernels)
            for buffer, before in buffers:
                buffer.copy_(before)
        return loss

    def _compare(self, found: float, expected: float) -> None:
        tolerance = TOLERANCE[self.current.model.precision]
        # A loss that is not finite has its own message.
        if abs(found - expected) > tolerance * abs(expected):
            raise UserError(
                f"train.kernels must give the plain path's loss at the first step within {tolerance:.1%}, got "
                f"{found:.6g} against {expected:.6g}; --train.kernels none trains without them"
            )


class Uncompiled(Graph):
    """The captured step without the compiler."""

    compiles = False
