"""Muon (Jordan et al. 2024): steps of orthogonal matrices in the blocks of a transformer, AdamW for all other weights.

Momentum of a matrix has a few large singular values; with all of them near 1, rare directions are learned as fast as
frequent ones. All of one shape, turned or not, are orthogonalized together: a transformer has two such shapes.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the polynomial a s + b s^3 + c s^5 of singular values, which takes small ones towards 1 in few iterations."""
ITERATIONS = 5
AS_ADAMW = 0.2
"""Root mean square of a step's entries at a rate of 1, about that of AdamW (Liu et al. 2025): one rate serves both."""


def is_block_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether it is the matrix of a linear layer in a block of an encoder or decoder."""
    # Tables of relative positions (Swin, BEiT) have two dimensions too, but are no maps with singular vectors.
    return parameter.ndim == 2 and "blocks." in name and name.endswith(".weight")


def orthogonalized(matrices: Tensor) -> Tensor:
    """A stack of wide matrices, singular vectors kept; all but tiny singular values come to lie from 0.7 to 1.2."""
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x


def pieces(matrix: Tensor) -> tuple[Tensor, ...]:
    """The matrices in one: queries, keys and values are three."""
    rows, columns = matrix.shape
    return matrix.chunk(3 if rows == 3 * columns else 1)


def orthogonalize_(matrices: list[Tensor]) -> None:
    """Replace each by its step at a rate of 1."""
    by_shape: dict[tuple[int, int], tuple[list[Tensor], list[Tensor]]] = {}
    for each in (piece for matrix in matrices for piece in pieces(matrix)):
        rows, columns = each.shape
        by_shape.setdefault((min(rows, columns), max(rows, columns)), ([], []))[rows > columns].append(each)
    for wide, tall in by_shape.values():
        found = orthogonalized(torch.stack([*wide, *(each.mT for each in tall)]))
        straight, turned = found.split([len(wide), len(tall)])
        torch._foreach_copy_([*wide, *tall], [*straight.unbind(), *turned.mT.contiguous().unbind()])
    torch._foreach_mul_(matrices, [AS_ADAMW * max(pieces(matrix)[0].shape) ** 0.5 for matrix in matrices])


class Muon(torch.optim.AdamW):
    """AdamW, but for groups of matrices that are marked `orthogonal`."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update matrices, then, as if these had no gradients, the rest."""
        with torch.enable_grad():
            loss = closure() if closure else None
        self.update_matrices()
        for group in self.orthogonal_groups:
            for p in group["params"]:
                p.grad = None
        super().step()
        return loss

    @property
    def orthogonal_groups(self) -> list[dict[str, Any]]:
        """Those that AdamW leaves alone."""
        return [group for group in self.param_groups if group.get("orthogonal")]

    @torch.no_grad()
    def update_matrices(self, leaf: Callable[[Any], Tensor] = lambda p: p) -> None:
        """Take a step with every matrix; `leaf` is where its gradient is, which becomes its copy if it is another."""
        parameters = [p for group in self.orthogonal_groups for p in group["params"] if leaf(p).grad is not None]
        if not parameters:
            return
        steps = self._directions(parameters, [leaf(p) for p in parameters])
        orthogonalize_(steps)
        step_of = dict(zip(parameters, steps, strict=True))
        for group in self.orthogonal_groups:
            if used := [p for p in group["params"] if p in step_of]:
                _move(used, [step_of[p] for p in used], group["lr"], group["weight_decay"])
        if copied := [p for p in parameters if leaf(p) is not p]:
            torch._foreach_copy_([leaf(p) for p in copied], copied)

    def _directions(self, parameters: list[Tensor], leaves: list[Tensor]) -> list[Tensor]:
        """The means of past gradients brought up to date, and a look ahead from them (Nesterov)."""
        for p in parameters:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        momentum = [self.state[p]["momentum_buffer"] for p in parameters]
        directions = [torch.empty_like(p) for p in parameters]
        torch._foreach_copy_(directions, [leaf.grad for leaf in leaves if leaf.grad is not None])
        torch._foreach_lerp_(momentum, directions, 1 - MOMENTUM)
        torch._foreach_lerp_(directions, momentum, MOMENTUM)
        return directions


def _move(parameters: list[Tensor], steps: list[Tensor], lr: Tensor | float, decay: float) -> None:
    torch._foreach_add_(steps, parameters, alpha=decay)
    torch._foreach_mul_(steps, lr)
    torch._foreach_sub_(parameters, steps)
