"""Several processes that fit one space: each passes over its share of the images, and their sums are added up."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch import Tensor

AddUp = Callable[[Tensor], Tensor]
"""A tensor to its sum over all processes, which call it in the same order."""


def unchanged(tensor: Tensor) -> Tensor:
    """The sum over one process."""
    return tensor


class Together(NamedTuple):
    """The part of the batches that is this process's, at least one, and the sum of a tensor over all processes."""

    share: Callable[[Iterable[Tensor]], Iterable[Tensor]]
    add_up: AddUp


ALONE = Together(lambda batches: batches, unchanged)
