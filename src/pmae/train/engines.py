"""Engines of a training step on a GPU: `Graph`, captured and replayed; `Compiled`, compiled before that; `FastEngine`,
the fastest of them that works, its first loss checked.
"""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from pmae import fast
from pmae.errors import UserError
from pmae.fast.graph import WARM_STEPS, CapturedStep, compiled, failure
from pmae.system import is_out_of_memory
from pmae.train.step import Inputs, Plain, Tally

TOLERANCE = {torch.bfloat16: 0.02, torch.float32: 1e-3}
"""How far the first loss may be from the plain one's, relative to it; rounding alone makes some 5e-4 and 1e-6 of it."""
SETTLED = WARM_STEPS + 2  # after so many steps everything is compiled and captured: what fails then is the step itself


class Graph(Plain):
    """The same step, captured once in a CUDA graph and replayed (`pmae.fast.graph`)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        in_bf16 = self.model.precision == torch.bfloat16
        if in_bf16:
            # Crops and projections stay in float32 but may multiply in TF32: 1e-3 of an image, far below R2's
            # resolution, and three times as fast for 12,288 pixels.
            torch.set_float32_matmul_precision("high")
            self.model.space.allow_bf16()
        self._captured = CapturedStep(self.model, self.optimizer, self._measured(), self._update, in_bf16)
        self._leaves = self._captured.leaves(self._leaves)

    def _measured(self) -> Callable[..., tuple[Tensor, Tensor]]:
        return self.measure

    def _averaging(self) -> nn.Module:
        return self.model  # whose gradients `_update` averages: DDP's hooks are not for a graph

    def _update(self, values: Tensor, take: Callable[[], object]) -> None:
        self.world.average([p.grad for p in self._leaves if p.grad is not None])
        super()._update(values, take)

    def __call__(self, inputs: Inputs) -> None:
        torch.manual_seed(inputs.seed)
        for group in self.optimizer.param_groups:
            group["lr"].fill_(inputs.lr * group["scale"])
        self._captured(inputs.images, inputs.crops, inputs.draw, *inputs.noise)


class Compiled(Graph):
    """The same step, what lies between its kernels fused by torch's compiler."""

    def _measured(self) -> Callable[..., tuple[Tensor, Tensor]]:
        # A dozen kernels for a few numbers, or one.
        self.tally.add = compiled(self.tally.add)  # type: ignore[method-assign]
        # With a random ratio an MAE has a graph for each number of visible patches, and none is compiled: half a minute
        # each, for what lies around the blocks.
        many = self.config.masking.ratio_schedule == "uniform" and self.config.space.name == "pixels"
        return self.measure if many else compiled(self.measure)


SIMPLER: dict[type[Plain], type[Plain]] = {Compiled: Graph, Graph: Plain}
"""What takes over where compiling or capturing fails."""


class FastEngine:
    """Captured steps, the first loss of which is checked; simpler ones where compiling or capturing fails."""

    def __init__(self, build: Callable[[type[Plain]], Plain], kind: type[Graph], asked: bool) -> None:
        self._build, self._asked = build, asked
        self._taken, self.current = 0, build(kind)

    @property
    def tally(self) -> Tally:
        """What was measured since it was last read."""
        return self.current.tally

    def __call__(self, inputs: Inputs) -> None:
        expected = float(self._plain_loss(inputs)) if self._taken == 0 else None
        self._take(inputs)
        self._taken += 1
        if expected is not None:
            self._compare(float(self.tally.sums[0]), expected)

    def rehearse(self, inputs: Inputs) -> None:
        """Take a step without the compiler, which takes half a minute and saves hardly any memory."""
        self.current = self._build(Graph)
        self._take(inputs)

    def _take(self, inputs: Inputs) -> None:
        try:
            self.current(inputs)
        except UserError:
            raise
        except Exception as error:  # a compiler may raise anything
            if self._taken >= SETTLED or type(self.current) not in SIMPLER or is_out_of_memory(error):
                raise
            self._fall_back(error)
            self._take(inputs)

    def _fall_back(self, error: Exception) -> None:
        if self._asked:
            asked = self.current.config.train.engine
            raise UserError(f"train.engine must be plain or auto here, got {asked!r}: {failure(error)}") from error
        simpler = SIMPLER[type(self.current)]
        cost = "a few times as long" if simpler is Plain else "about a tenth longer"
        said = f"training goes on without it, which gives the same numbers and may take {cost}"
        warnings.warn(f"{failure(error)}; {said}", stacklevel=2)
        counted = self.tally._all
        self.current = self._build(simpler)
        self.tally._all.copy_(counted)

    @torch.no_grad()
    def _plain_loss(self, inputs: Inputs) -> Tensor:
        """The loss of a step by timm's own code; nothing is trained, and what a forward pass changes is put back."""
        model = self.current.model
        # Averages of batch norms and of teachers, but not the space, whose basis may be large and does not change.
        frozen = (p for p in model.parameters() if not p.requires_grad)
        kept = (*model.encoder.buffers(), *model.decoder.buffers(), *frozen)
        buffers = [(buffer, buffer.clone()) for buffer in kept]
        hide = getattr(model, "hide_components", None)
        fast.accelerate(model, "none")
        if hide is not None:
            # The same masks: of components without variance the kernel and the sort may hide other ones.
            model.hide_components = hide
        torch.manual_seed(inputs.seed)
        try:
            loss, _ = Plain.measure(self.current, inputs.images, inputs.crops, inputs.draw, *inputs.noise)
        finally:
            fast.accelerate(model, self.current.config.train.kernels)
            for buffer, before in buffers:
                buffer.copy_(before)
        return loss

    def _compare(self, found: float, expected: float) -> None:
        tolerance = TOLERANCE[self.current.model.precision]
        # A loss that is not finite has its own message.
        if abs(found - expected) > tolerance * abs(expected):
            rule = f"give the plain path's loss at the first step within {tolerance:.1%}"
            got = f"{found:.6g} against {expected:.6g}; train.kernels none trains without them"
            raise UserError(f"train.kernels must {rule}, got {got}")
