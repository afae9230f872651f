"""X of the scikit-learn estimators as images: checked, laid out with channels first, and told from tables."""

import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sklearn.utils import check_array
from sklearn.utils.validation import validate_data

from pmae.config import Layout
from pmae.data.arrays import as_numpy, channels_first
from pmae.data.images import DTYPES
from pmae.errors import UserError, require

MOST_COLUMNS = 256
"""A table of more is taken for images that were flattened: as many tokens would cost much and mean little."""


def read_images(estimator: Any, X: Any, fitting: bool, layout: Layout = "auto") -> np.ndarray:
    """X as images (N, C, H, W), checked as scikit-learn does, and against `image_shape` and `image_shape_`."""
    _require_arrays(X)
    X, shape = as_numpy(X) if isinstance(X, torch.Tensor) else X, estimator.image_shape
    least = {"ensure_min_samples": 2 if fitting else 1}
    if not is_flat(X):
        images = as_images(check_array(X, allow_nd=True, estimator=estimator, **least), shape, layout)
    else:
        X = validate_data(estimator, X, reset=fitting, ensure_min_features=2 if fitting else 1, **least)
        if shape is not None:
            images = as_images(X, shape, layout)
        else:
            images = as_rows(X, None if fitting else estimator.image_shape_)
    if not fitting and images.shape[1:] != estimator.image_shape_:
        raise UserError(f"X must have images of shape {estimator.image_shape_}, as in fit, got {images.shape[1:]}")
    return images


def _require_arrays(X: Any) -> None:
    """Refuse names of files or of a folder, and images of several shapes."""
    if isinstance(X, str | os.PathLike):
        raise UserError(f"X must be images, got the path {str(X)!r}; `pmae.pretrain` is what reads files")
    first = next(iter(X), None) if getattr(X, "ndim", 1) == 1 and hasattr(X, "__iter__") else None
    if isinstance(first, str | os.PathLike):
        raise UserError(f"X must be images, got names such as {str(first)!r}; read the files into arrays of one shape")
    if isinstance(X, list | tuple):
        shapes = sorted({each.shape for each in X if isinstance(each, np.ndarray | torch.Tensor)})
        require(len(shapes) < 2, "X", "images of one shape", [tuple(shape) for shape in shapes[:3]])


def is_flat(X: Any) -> bool:
    """Whether X has rows of numbers, not of images; anything that NumPy can make an array of will do."""
    return int(X.ndim if hasattr(X, "ndim") else np.asarray(X).ndim) <= 2


def as_images(X: np.ndarray, image_shape: Sequence[int] | None, layout: Layout) -> np.ndarray:
    """Images in any layout, or flat rows of `image_shape`."""
    if X.ndim == 2 and image_shape is not None:
        shape, columns = tuple(image_shape), X.shape[1]
        whole = len(shape) in (2, 3) and all(isinstance(side, int | np.integer) and side > 0 for side in shape)
        require(whole, "image_shape", "(H, W), (H, W, C) or (C, H, W)", image_shape)
        require(math.prod(shape) == columns, "image_shape", f"of as many numbers as X has columns, {columns}", shape)
        X = X.reshape(len(X), *shape)
    if X.ndim == 3 and image_shape is not None and layout == "auto":
        layout = "NCHW"  # whoever gives two sides means grey images, however narrow
    fits = image_shape is None or tuple(image_shape) == X.shape[1:]
    require(fits, "image_shape", f"None, or that of the images in X, {X.shape[1:]}", image_shape)
    return supported(channels_first(X, layout))


def as_rows(X: np.ndarray, shape: tuple[int, int, int] | None) -> np.ndarray:
    """Flat rows as images of the fitted shape, where that can be done in one way only; of one line for a table."""
    if shape is None:
        rule = f"given for a flat X of more than {MOST_COLUMNS} columns ({X.shape[1]}), such as (28, 28) or (32, 32, 3)"
        require(X.shape[1] <= MOST_COLUMNS, "image_shape", rule, None)
        shape = (1, 1, X.shape[1])
    require(shape[0] == 1, "image_shape", f"given for a flat X of {shape[0]} channels, whose order it tells", None)
    return supported(np.ascontiguousarray(X.reshape(-1, *shape)))


def supported(images: np.ndarray) -> np.ndarray:
    """The same numbers in a dtype that images may have: booleans and wide integers become floats."""
    return images if images.dtype.name in DTYPES else images.astype(np.float64)
