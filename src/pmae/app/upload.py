"""A file that somebody uploads, as an image like those of the data; whatever is wrong with it in one sentence."""

import warnings
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError
from torch.nn import functional as F

from pmae.config import DataConfig
from pmae.data.images import as_tensor
from pmae.data.readers.decode import FORMATS, decode
from pmae.errors import UserError, require

LARGEST_FILE = 20 * 2**20
LARGEST_PICTURE = 50_000_000
"""Pixels: a larger picture is refused by its header, before it is unpacked."""


def read_upload(path: Path, shape: tuple[int, int, int], dtype: np.dtype, low: float, high: float) -> np.ndarray:
    """(C, H, W) of a file of any size and depth, resized, in the data's dtype; black and white become low and high."""
    channels = shape[0]
    if channels not in (1, 3):
        raise UserError(f"upload must have the data's {channels} channels, which no picture file has: pick one of them")
    size = path.stat().st_size
    require(size <= LARGEST_FILE, "upload", f"a file of at most {LARGEST_FILE:,} bytes", f"{size:,} bytes")
    _refuse_large(path)
    pixels = _decoded(path, channels)
    resized = F.interpolate(as_tensor(pixels)[None].float(), shape[1:], mode="bicubic", antialias=True)[0].numpy()
    # Deep files keep their units where the data has the same; bytes have none, and the data's may end at 16.
    if pixels.dtype != dtype or dtype == np.uint8:
        black, white = _range(pixels)
        resized = low + (high - low) * (resized - black) / (white - black)
    return _as_dtype(resized, dtype)


def _refuse_large(path: Path) -> None:
    try:
        with warnings.catch_warnings():
            # Pillow warns of large pictures; here they are refused.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(path, formats=FORMATS) as image:
                width, height = image.size
    except UnidentifiedImageError as error:
        raise UserError(f"upload must be an image ({', '.join(FORMATS)}), got {path.name!r}") from error
    except Image.DecompressionBombError:
        width, height = LARGEST_PICTURE, LARGEST_PICTURE
    except Exception as error:
        raise _unreadable(path, error) from error
    rule = f"a picture of at most {LARGEST_PICTURE:,} pixels"
    require(width * height <= LARGEST_PICTURE, "upload", rule, path.name)


def _decoded(path: Path, channels: int) -> np.ndarray:
    try:
        return decode(path, DataConfig(channels=1 if channels == 1 else 3))
    # Pillow's decoders raise whatever a broken file trips over.
    except Exception as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> UserError:
    told = " ".join(str(error).replace(str(path), path.name).split())
    return UserError(f"upload must be an image that can be read, got {path.name!r}: {told}")


def _range(pixels: np.ndarray) -> tuple[float, float]:
    """Black and white of a file: the range of whole numbers, or that of the picture itself."""
    if pixels.dtype.kind != "f":
        return 0.0, float(np.iinfo(pixels.dtype).max)
    low, high = float(pixels.min()), float(pixels.max())
    return low, high if high > low else low + 1


def _as_dtype(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    if dtype.kind == "f":
        return values.astype(dtype)
    limits = np.iinfo(dtype)
    made: np.ndarray = np.clip(np.rint(values), limits.min, limits.max).astype(dtype)
    return made
