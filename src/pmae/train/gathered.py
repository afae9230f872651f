"""Features of all processes in each of them, with gradients: what a task over the whole batch needs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pmae.train.distributed import World


class Gathered(torch.autograd.Function):
    """(2b, W) here to (2B, W) everywhere: first all first views by rank, then all second ones."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, world: World) -> Tensor:
        """Zeros where the others' rows are, and one sum: it works over every backend and in a CUDA graph."""
        ctx.world = world
        pairs = features.unflatten(0, (2, -1))
        ctx.each = pairs.shape[1]
        whole = pairs.new_zeros(2, world.size * ctx.each, pairs.shape[2], dtype=torch.float32)
        whole[:, _mine(ctx)] = pairs.float()
        return world.add_up(whole).flatten(0, 1).to(features.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Every process computed the whole task: its sum over processes, which their mean gradient then divides."""
        whole = ctx.world.add_up(gradient.float().unflatten(0, (2, -1)).contiguous())
        return whole[:, _mine(ctx)].flatten(0, 1).to(gradient.dtype), None


def _mine(ctx: Any) -> slice:
    return slice(ctx.world.rank * ctx.each, (ctx.world.rank + 1) * ctx.each)


def gathering(world: World) -> Callable[[Tensor], Tensor]:
    """The features of all processes, as a function of this one's."""
    return lambda features: Gathered.apply(features, world)
