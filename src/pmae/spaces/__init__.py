"""Masking spaces, by name."""

from pmae.config import SpaceConfig
from pmae.errors import unknown_name
from pmae.spaces.base import Space
from pmae.spaces.pca import PCA
from pmae.spaces.pixels import Pixels

SPACES: dict[str, type[Space]] = {"pca": PCA, "pixels": Pixels}


def build_space(config: SpaceConfig, shape: tuple[int, int, int]) -> Space:
    """The unfitted space that the settings name, for images (C, H, W)."""
    if config.name not in SPACES:
        raise unknown_name("space.name", config.name, SPACES)
    return SPACES[config.name](shape, config)


__all__ = ["PCA", "SPACES", "Pixels", "Space", "build_space"]
