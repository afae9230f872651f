"""Pixels of one file in the size and the channels that the settings ask for: whole, or a square from the centre."""

import math
import warnings

import numpy as np
import torch
from PIL import Image
from torch.nn import functional

from pmae.config import DataConfig

LUMA = (0.299, 0.587, 0.114)  # what red, green and blue add to grey: ITU-R 601-2, as in Pillow
RESAMPLING = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}
LONGEST = 16  # times its short side: what lies beyond in a thread of pixels is left out before it is resized


def convert(pixels: np.ndarray, config: DataConfig, short: int | None = None) -> np.ndarray:
    """(C, H, W) pixels of any depth, with the size and the channels that the settings ask for, and no NaN."""
    pixels = _filled(pixels) if pixels.dtype.kind == "f" else pixels
    if config.channels not in (None, len(pixels)):
        pixels = _with_channels(pixels, config.channels)
    if short is not None:
        return capped(pixels, short)
    if config.resize is not None and not (pixels.shape[1:] == (config.resize,) * 2 == (resized_to(config),) * 2):
        planes = (Image.fromarray(plane) for plane in pixels.astype(np.float32))
        pixels = _rounded(np.stack([np.asarray(as_square(plane, config)) for plane in planes]), pixels.dtype)
    return pixels


def _filled(pixels: np.ndarray) -> np.ndarray:
    """NaN replaced by the mean of its channel, before resizing spreads it; a channel of nothing else keeps it."""
    missing = np.isnan(pixels)
    if not missing.any():
        return pixels
    warnings.warn(
        "NaN in files is taken for missing: the mean of its channel in that file takes its place", stacklevel=2
    )
    with np.errstate(invalid="ignore"):
        means = pixels.sum((1, 2), np.float64, where=~missing) / (~missing).sum((1, 2))
    return np.where(missing, means.astype(pixels.dtype)[:, None, None], pixels)


def _with_channels(pixels: np.ndarray, channels: int) -> np.ndarray:
    """Grey as three channels, or colour as grey, weighted as Pillow weights 8 bits; nothing else is one of the two."""
    if len(pixels) == 1:
        return np.repeat(pixels, channels, axis=0)
    if (len(pixels), channels) != (3, 1):
        raise ValueError(f"{len(pixels)} channels, which data.channels {channels} cannot make of them")
    grey = np.tensordot(np.array(LUMA, np.float32), pixels.astype(np.float32), 1)
    return _rounded(grey, pixels.dtype)[None]


def capped(pixels: np.ndarray, short: int) -> np.ndarray:
    """Whole (C, H, W) pixels, their short side no longer than this; by torch, in 8 bits thrice as fast as Pillow."""
    height, width = pixels.shape[1:]
    scale = short / min(height, width)
    if scale >= 1:
        return pixels
    size = [max(1, round(scale * n)) for n in (height, width)]
    given = torch.from_numpy(np.array(pixels, np.uint8 if pixels.dtype == np.uint8 else np.float32))[None]
    made = functional.interpolate(given, size, mode="bicubic", antialias=True)[0].numpy()
    return made if made.dtype == pixels.dtype else _rounded(made, pixels.dtype)


def as_square(image: Image.Image, config: DataConfig, how: Image.Resampling | None = None) -> Image.Image:
    """Of the side that the settings ask for, from the centre or from all of it: pixels as of timm and torchvision."""
    side, whole = config.resize, resized_to(config)
    if side is None:
        return image
    size, how = (whole, whole), RESAMPLING[config.interpolation] if how is None else how  # NEAREST is 0
    if config.crop_mode == "center":
        short = min(image.size)
        image = _centre(image, (min(image.width, LONGEST * short), min(image.height, LONGEST * short)))
        size = int(whole * image.width / short), int(whole * image.height / short)
    return _centre(image.resize(size, how), (side, side))


def _centre(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    left, top = (round((n - kept) / 2) for n, kept in zip(image.size, size, strict=True))
    return image if image.size == size else image.crop((left, top, left + size[0], top + size[1]))


def resized_to(config: DataConfig) -> int:
    """What the short side of files, or both, is resized to before the centre is kept; 0 where they stay as they are."""
    return math.floor((config.resize or 0) / config.crop_pct)


def _rounded(pixels: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Floats in a depth of files; the cubic kernel overshoots, so whole numbers are clipped to their range."""
    if dtype.kind == "f":
        return pixels.astype(dtype, copy=False)
    limits = np.iinfo(dtype)
    return np.clip(np.rint(pixels), limits.min, limits.max).astype(dtype)
