"""What an estimator is given, as images (N, C, H, W): arrays of images, or flat rows that are images or a table."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from pmae.data.images import DTYPES
from pmae.data.readers.arrays import Layout, channels_first
from pmae.errors import UserError, require

MOST_COLUMNS = 256
"""A table of more is taken for images that were flattened: as many tokens would cost much and mean little."""


def is_flat(X: Any) -> bool:
    """Whether X has rows of numbers, not of images; anything that NumPy can make an array of will do."""
    return int(X.ndim if hasattr(X, "ndim") else np.asarray(X).ndim) <= 2


def as_images(X: np.ndarray, image_shape: Sequence[int] | None, layout: Layout) -> np.ndarray:
    """Images in any layout, or flat rows of `image_shape`."""
    if X.ndim == 2 and image_shape is not None:
        X = X.reshape(len(X), *_checked(image_shape, X.shape[1]))
    fits = image_shape is None or tuple(image_shape) == X.shape[1:]
    require(fits, "image_shape", f"None, or that of the images in X, {X.shape[1:]}", image_shape)
    return supported(channels_first(X, layout))


def as_table(X: np.ndarray) -> np.ndarray:
    """Flat rows as images of one line, a column a pixel."""
    if X.shape[1] > MOST_COLUMNS:
        raise UserError(
            f"image_shape must be given for a flat X of more than {MOST_COLUMNS} columns, such as (28, 28) "
            f"or (32, 32, 3), got {X.shape[1]} columns and None"
        )
    return supported(np.ascontiguousarray(X[:, None, None]))


def as_fitted(X: np.ndarray, shape: tuple[int, int, int]) -> np.ndarray:
    """Flat rows as images of a known shape, where that can be done in one way only."""
    channels, height, width = shape
    if channels > 1:
        raise UserError(
            f"image_shape must be given for a flat X of {channels} channels, whose order it tells, got None"
        )
    return supported(np.ascontiguousarray(X.reshape(-1, 1, height, width)))


def supported(images: np.ndarray) -> np.ndarray:
    """The same numbers in a dtype that images may have: booleans and wide integers become floats."""
    return images if images.dtype.name in DTYPES else images.astype(np.float64)


def _checked(image_shape: Sequence[int], columns: int) -> tuple[int, ...]:
    shape = tuple(image_shape)
    whole = len(shape) in (2, 3) and all(isinstance(side, int | np.integer) and side > 0 for side in shape)
    require(whole, "image_shape", "(H, W), (H, W, C) or (C, H, W)", image_shape)
    require(math.prod(shape) == columns, "image_shape", f"of as many numbers as X has columns, {columns}", image_shape)
    return shape
