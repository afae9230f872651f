"""Muon (Jordan et al. 2024): steps of orthogonal matrices in the blocks of a transformer, AdamW for all other weights.

Momentum of a matrix has a few large singular values; with all of them near 1, rare directions are learned as fast as
frequent ones. Matrices of one shape are orthogonalized together, in some thirty kernels for all of them.
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
    return parameter.ndim == 2 and "blocks." in name


def orthogonalized(matrices: Tensor) -> Tensor:
    """A stack of matrices, singular vectors kept; all but tiny singular values come to lie between 0.7 and 1.2."""
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


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
        for group in self.orthogonal_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for p in group["params"]:
                if leaf(p).grad is not None:
                    by_shape.setdefault(p.shape, []).append(p)
            for parameters in by_shape.values():
                self._update(group, parameters, [leaf(p) for p in parameters])

    def _update(self, group: dict[str, Any], parameters: list[Tensor], leaves: list[Tensor]) -> None:
        direction = self._momentum(parameters, leaves)
        count, rows, columns = direction.shape
        parts = 3 if rows == 3 * columns else 1  # queries, keys and values are three matrices in one
        found = orthogonalized(direction.reshape(parts * count, rows // parts, columns))
        size = AS_ADAMW * max(rows // parts, columns) ** 0.5
        steps = (found.float() * (group["lr"] * size)).reshape(direction.shape).contiguous()
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_sub_(parameters, list(steps.unbind()))
        if leaves[0] is not parameters[0]:
            torch._foreach_copy_(leaves, parameters)

    def _momentum(self, parameters: list[Tensor], leaves: list[Tensor]) -> Tensor:
        """The mean of past gradients brought up to date, and a look ahead from it (Nesterov), stacked."""
        for p in parameters:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        kept = [self.state[p]["momentum_buffer"] for p in parameters]
        gradients = torch.stack([leaf.grad for leaf in leaves if leaf.grad is not None]).float()
        momentum = torch.stack(kept).lerp_(gradients, 1 - MOMENTUM)
        torch._foreach_copy_(kept, list(momentum.unbind()))
        return gradients.lerp_(momentum, MOMENTUM)
