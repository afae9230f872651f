"""Masking spaces, by name."""

from pmae.config import SpaceConfig
from pmae.errors import UserError
from pmae.plugins import TABLES, find
from pmae.spaces.base import Space
from pmae.spaces.fixed import Cosine, Fourier, Pixels, Wavelet
from pmae.spaces.kernel_pca import DiffusionMaps, KernelPCA
from pmae.spaces.pca import PCA, PatchPCA
from pmae.spaces.recombined import ICA, Learned

__all__ = ["ICA", "PCA", "SPACES", "Cosine", "DiffusionMaps", "Fourier", "KernelPCA", "Learned", "PatchPCA"]
__all__ += ["Pixels", "Space", "Wavelet", "build_space"]

SPACES: dict[str, type[Space]] = TABLES["space"]
SPACES |= {
    "cosine": Cosine,
    "diffusion": DiffusionMaps,
    "fourier": Fourier,
    "ica": ICA,
    "kernel_pca": KernelPCA,
    "learned": Learned,
    "patch_pca": PatchPCA,
    "pca": PCA,
    "pixels": Pixels,
    "wavelet": Wavelet,
}


def build_space(config: SpaceConfig, shape: tuple[int, int, int]) -> Space:
    """The unfitted space that the settings name, for images (C, H, W)."""
    space: Space = find("space", config.name, "space.name")(shape, config)
    if config.grouped and not space.has_bands:
        having = ", ".join(sorted(name for name, kind in SPACES.items() if kind.has_bands))
        rule = f"off for space.name {config.name!r}, whose coefficients form no bands"
        raise UserError(f"space.grouped must be {rule}, got True; spaces with bands: {having}")
    return space
