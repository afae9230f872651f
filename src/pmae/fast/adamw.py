"""AdamW in one pass over memory, on fp32 master weights with bf16 copies; importing this needs Triton.

Gradients are read in the precision they came in, and the bf16 copies, with which the next step computes, are written
with the master weights. Where everything lies is a table on the device, so that one launch serves hundreds of tensors,
also inside a CUDA graph: its gradients' addresses are known once it is captured, and filled in then.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from pmae.muon import Muon

BLOCK, WARPS = 1024, 8
"""How many weights a program updates, and its warps: 212 us for 30 million on an H200, the fastest of six."""
FIELDS = tl.constexpr(9)
"""A program's row of the table: addresses of weight, moments, gradient and bf16 copy, first, end, decayed, and the
address of the rate."""


@triton.jit
def _pointer(row, field, kind: tl.constexpr):
    return tl.multiple_of(tl.load(row + field), 16).to(tl.pointer_type(kind))


@triton.jit
def _adamw_kernel(
    table, step, BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr, DECAY: tl.constexpr,
    BF16: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = table + tl.program_id(0) * FIELDS
    end = tl.load(row + 6)
    if EVEN:  # told so, the compiler moves 16 bytes at a time
        end = tl.multiple_of(end, 16)
    at = tl.multiple_of(tl.load(row + 5), BLOCK) + tl.arange(0, BLOCK)
    real, count = at < end, tl.load(step)
    lr = tl.load(tl.load(row + 8).to(tl.pointer_type(tl.float32)))
    weight, mean, square = _pointer(row, 0, tl.float32), _pointer(row, 1, tl.float32), _pointer(row, 2, tl.float32)
    grad = _pointer(row, 3, tl.bfloat16 if BF16 else tl.float32)
    g = tl.load(grad + at, mask=real, other=0.0).to(tl.float32)
    w = tl.load(weight + at, mask=real, other=0.0)
    w -= w * (lr * DECAY * tl.load(row + 7).to(tl.float32))
    m = BETA1 * tl.load(mean + at, mask=real, other=0.0) + (1 - BETA1) * g
    v = BETA2 * tl.load(square + at, mask=real, other=0.0) + (1 - BETA2) * g * g
    # 1 - beta^count, by powers of two: the hardware has no other.
    seen1, seen2 = 1 - tl.exp2(count * tl.log2(BETA1 + 0.0 * lr)), 1 - tl.exp2(count * tl.log2(BETA2 + 0.0 * lr))
    w -= lr * (m / seen1) / (tl.sqrt(v / seen2) + EPS)
    tl.store(weight + at, w, mask=real)
    tl.store(mean + at, m, mask=real)
    tl.store(square + at, v, mask=real)
    if BF16:
        tl.store(_pointer(row, 4, tl.bfloat16) + at, w.to(tl.bfloat16), mask=real)


class WeightCopies:
    """bf16 copies of the fp32 master weights that autocast would round layer by layer, in every step anew.

    The numbers are autocast's own; what is saved are three hundred small kernels a step.
    """

    def __init__(self, model: nn.Module) -> None:
        layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
        self._slots = [(layer, key, p) for layer in layers for key, p in layer.named_parameters(recurse=False)]
        self.of = {p: nn.Parameter(p.detach().bfloat16(), p.requires_grad) for _, _, p in self._slots}
        self._frozen: list[Tensor] = [p for p in self.of if not p.requires_grad]
        self._frozen_copies: list[Tensor] = [self.of[p] for p in self.of if not p.requires_grad]

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """The model's layers hold their copies, and these get the gradients.

        Frozen weights, which no optimizer updates, may have been moved since the last step: a teacher's are.
        """
        if self._frozen:
            torch._foreach_copy_(self._frozen_copies, self._frozen)
        for layer, key, master in self._slots:
            layer._parameters[key], self.of[master].grad = self.of[master], None
        try:
            yield
        finally:
            for layer, key, master in self._slots:
                layer._parameters[key] = master


class FusedAdamW:
    """A step of a torch AdamW whose rates are tensors; gradients come to the bf16 copies of weights that have one.

    The matrices of a `Muon` take their own step after it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, copies: dict[nn.Parameter, nn.Parameter]) -> None:
        self.optimizer, self.copies = optimizer, copies
        self._groups = [group for group in optimizer.param_groups if not group.get("orthogonal")]
        self._tables: dict[tuple[bool, bool], Tensor] = {}
        """Of the weights that one launch updates: whether they have bf16 copies, and whether 16 divides their sizes."""
        for group in self._groups:
            for p in group["params"]:
                if not optimizer.state[p]:
                    count = torch.zeros((), device=p.device)
                    moments = {key: torch.zeros_like(p) for key in ("exp_avg", "exp_avg_sq")}
                    optimizer.state[p] = {"step": count, **moments}

    def fill(self) -> None:
        """Note where everything lies; gradients lie somewhere else after each step that is no replay."""
        rows: dict[tuple[bool, bool], list[tuple[int, ...]]] = {}
        for group in self._groups:
            for p in group["params"]:
                if self.leaf(p).grad is not None:
                    rows.setdefault((p in self.copies, p.numel() % 16 == 0), []).extend(self._rows(p, group))
        device = self._groups[0]["lr"].device
        for kind, found in rows.items():
            table = torch.tensor(found, dtype=torch.int64)
            self._tables.setdefault(kind, torch.empty_like(table, device=device)).copy_(table)

    def note(self) -> None:
        """Do so now, unless these gradients are a graph's that is being captured and will be known after it."""
        if not torch.cuda.is_current_stream_capturing():
            self.fill()

    def __call__(self) -> None:
        """Update every weight that has a gradient."""
        used = [p for group in self._groups for p in group["params"] if self.leaf(p).grad is not None]
        steps = [self.optimizer.state[p]["step"] for p in used]
        torch._foreach_add_(steps, 1.0)
        group = self._groups[0]
        sizes = (*group["betas"], group["eps"], max(group["weight_decay"] for group in self._groups))
        for kind, table in self._tables.items():
            _adamw_kernel[(len(table),)](table, steps[0], *sizes, *kind, BLOCK, num_warps=WARPS)
        if isinstance(self.optimizer, Muon):
            self.optimizer.update_matrices(self.leaf)

    def leaf(self, p: nn.Parameter) -> nn.Parameter:
        """The parameter that the gradient comes to."""
        return self.copies.get(p, p)

    def _rows(self, p: nn.Parameter, group: dict[str, Any]) -> list[tuple[int, ...]]:
        state, leaf = self.optimizer.state[p], self.leaf(p)
        if leaf.grad is None or not leaf.grad.is_contiguous():
            raise RuntimeError(f"a gradient of shape {tuple(p.shape)} must be contiguous")
        tensors = (p, state["exp_avg"], state["exp_avg_sq"], leaf.grad, leaf)
        addresses = tuple(tensor.data_ptr() for tensor in tensors)
        end, decayed, rate = p.numel(), int(bool(group["weight_decay"])), group["lr"].data_ptr()
        return [(*addresses, first, end, decayed, rate) for first in range(0, end, BLOCK)]
