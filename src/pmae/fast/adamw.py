"""AdamW over all weights in one pass over memory; importing this needs Triton.

Gradients are read in the precision they came in, and the rounded weights, with which the next step computes, are
written beside the whole ones. Where everything lies is a table on the device, so that one launch serves hundreds of
tensors, also inside a CUDA graph: its gradients' addresses are known once it is captured, and filled in then.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# (the functions under triton.jit are Triton's language, not Python's: their arguments have no Python types)

from typing import Any, NamedTuple

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor, nn

BLOCK, WARPS = 1024, 8
"""How many weights a program updates, and its warps: 212 us for 30 million on an H200, the fastest of six."""
FIELDS = tl.constexpr(9)
"""A program's row of the table: addresses of weight, moments, gradient and rounded weight, first, end, decayed, and the
address of the rate."""


@triton.jit
def _pointer(row, field, kind: tl.constexpr):
    return tl.multiple_of(tl.load(row + field), 16).to(tl.pointer_type(kind))


@triton.jit
def _adamw_kernel(
    table,
    step,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    EPS: tl.constexpr,
    DECAY: tl.constexpr,
    HALF: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = table + tl.program_id(0) * FIELDS
    end = tl.load(row + 6)
    if EVEN:  # told so, the compiler moves 16 bytes at a time
        end = tl.multiple_of(end, 16)
    at = tl.multiple_of(tl.load(row + 5), BLOCK) + tl.arange(0, BLOCK)
    real, count = at < end, tl.load(step)
    lr = tl.load(tl.load(row + 8).to(tl.pointer_type(tl.float32)))
    weight, mean, square = _pointer(row, 0, tl.float32), _pointer(row, 1, tl.float32), _pointer(row, 2, tl.float32)
    grad = _pointer(row, 3, tl.bfloat16 if HALF else tl.float32)
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
    if HALF:
        tl.store(_pointer(row, 4, tl.bfloat16) + at, w.to(tl.bfloat16), mask=real)


class Kind(NamedTuple):
    """What one launch has in common: rounded weights and gradients, and sizes that 16 divides."""

    half: bool
    even: bool


class Update:
    """A step of an AdamW whose rates are tensors; a weight in `halves` has a rounded copy, which gets its gradient."""

    def __init__(self, optimizer: torch.optim.Optimizer, halves: dict[nn.Parameter, nn.Parameter]) -> None:
        self.optimizer, self.halves = optimizer, halves
        self._tables: dict[Kind, Tensor] = {}
        for group in optimizer.param_groups:
            for p in group["params"]:
                if not optimizer.state[p]:
                    count = torch.zeros((), device=p.device)
                    moments = {key: torch.zeros_like(p) for key in ("exp_avg", "exp_avg_sq")}
                    optimizer.state[p] = {"step": count, **moments}

    def fill(self) -> None:
        """Note where everything lies; gradients lie somewhere else after each step that is no replay."""
        rows: dict[Kind, list[tuple[int, ...]]] = {}
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                if self.leaf(p).grad is not None:
                    rows.setdefault(self._kind(p), []).extend(self._rows(p, group))
        for kind, found in rows.items():
            table = torch.tensor(found, dtype=torch.int64)
            self._tables.setdefault(kind, torch.empty_like(table, device=self._device)).copy_(table)

    def note(self) -> None:
        """Do so now, unless these gradients are a graph's that is being captured and will be known after it."""
        if not torch.cuda.is_current_stream_capturing():
            self.fill()

    def __call__(self) -> None:
        """Update every weight that has a gradient."""
        used = [p for group in self.optimizer.param_groups for p in group["params"] if self.leaf(p).grad is not None]
        steps = [self.optimizer.state[p]["step"] for p in used]
        torch._foreach_add_(steps, 1.0)
        group = self.optimizer.param_groups[0]
        sizes = (*group["betas"], group["eps"], max(group["weight_decay"] for group in self.optimizer.param_groups))
        for kind, table in self._tables.items():
            _adamw_kernel[(len(table),)](table, steps[0], *sizes, *kind, BLOCK, num_warps=WARPS)

    def leaf(self, p: nn.Parameter) -> nn.Parameter:
        """The parameter that the gradient comes to."""
        return self.halves.get(p, p)

    @property
    def _device(self) -> torch.device:
        rate: Tensor = self.optimizer.param_groups[0]["lr"]
        return rate.device

    def _kind(self, p: nn.Parameter) -> Kind:
        return Kind(p in self.halves, p.numel() % 16 == 0)

    def _rows(self, p: nn.Parameter, group: dict[str, Any]) -> list[tuple[int, ...]]:
        state, leaf = self.optimizer.state[p], self.leaf(p)
        if leaf.grad is None or not leaf.grad.is_contiguous():
            raise RuntimeError(f"a gradient of shape {tuple(p.shape)} must be contiguous")
        tensors = (p, state["exp_avg"], state["exp_avg_sq"], leaf.grad, leaf)
        addresses = tuple(tensor.data_ptr() for tensor in tensors)
        end, decayed, rate = p.numel(), int(bool(group["weight_decay"])), group["lr"].data_ptr()
        return [(*addresses, first, end, decayed, rate) for first in range(0, end, BLOCK)]
