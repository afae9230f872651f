"""Masking spaces, by name."""

from pmae.errors import unknown_name
from pmae.spaces.base import Space
from pmae.spaces.pca import PCA
from pmae.spaces.pixels import Pixels

SPACES: dict[str, type[Space]] = {"pca": PCA, "pixels": Pixels}


def build_space(name: str, shape: tuple[int, int, int]) -> Space:
    """An unfitted space of this name for images (C, H, W)."""
    if name not in SPACES:
        raise unknown_name("space.name", name, SPACES)
    return SPACES[name](shape)


__all__ = ["PCA", "SPACES", "Pixels", "Space", "build_space"]
