"""Stochastic depth for a while: residual branches that are left out at random while an encoder trains."""

from collections.abc import Iterator
from contextlib import contextmanager

from timm.layers.drop import DropPath
from torch import nn

PLACES = ("drop_path", "drop_path1", "drop_path2")
"""What timm calls the places at the end of a residual branch."""


@contextmanager
def stochastic_depth(encoder: nn.Module, rate: float) -> Iterator[None]:
    """Inside, branches are dropped at rates that rise from 0 to `rate` at the last block; after it, as before.

    A rate of 0 changes nothing, nor does any rate where the network has no such places.
    """
    blocks = [block for block in encoder.modules() if rate and _places(block)]
    before = [(block, name, module) for block in blocks for name, module in _places(block).items()]
    for position, block in enumerate(blocks):
        for name in _places(block):
            setattr(block, name, DropPath(rate * position / max(1, len(blocks) - 1)))
    try:
        yield
    finally:
        for block, name, module in before:
            setattr(block, name, module)


def _places(block: nn.Module) -> dict[str, nn.Module]:
    return {name: child for name, child in block.named_children() if name in PLACES}
