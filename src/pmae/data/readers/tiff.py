"""TIFF files of more channels or more depth than Pillow holds, through tifffile (extra `data`)."""

from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image

from pmae.errors import missing_extra

SUFFIXES = (".tif", ".tiff")
# Where the channels lie among the axes that tifffile names: C and S (samples) are channels, Y and X the plane.
_CHANNEL_AXES = {"YX": None, "CYX": 0, "SYX": 0, "YXC": 2, "YXS": 2}


def read_tiff(path: Path | BytesIO) -> np.ndarray:
    """(C, H, W) pixels in their own depth; a stack of planes that are not channels is refused."""
    try:
        import tifffile
    except ImportError as error:
        raise missing_extra("a TIFF of this kind", "data", error) from error
    with tifffile.TiffFile(path) as file:
        series, pages = file.series[0], len(file.pages)
        # Axes of length one say nothing, except that an image may be one row or column.
        kept = [(name, n) for name, n in zip(series.axes, series.shape, strict=True) if n > 1 or name in "YX"]
        axes = "".join(name for name, _ in kept)
        if len(file.series) > 1 or axes not in _CHANNEL_AXES:
            raise ValueError(f"{pages} pages in one file; save each as a file of its own, or all in a .npy file")
        _refuse_bomb(series.size)
        pixels = series.asarray().reshape([n for _, n in kept])
    pixels, axis = pixels.astype(pixels.dtype.newbyteorder("=")), _CHANNEL_AXES[axes]
    return pixels[None] if axis is None else np.moveaxis(pixels, axis, 0)


def _refuse_bomb(size: int) -> None:
    """Pillow's own limit against files that unpack to more than a machine holds."""
    if Image.MAX_IMAGE_PIXELS is not None and size > 2 * Image.MAX_IMAGE_PIXELS:
        raise ValueError(f"{size:,} values, more than the limit of {2 * Image.MAX_IMAGE_PIXELS:,}")
