"""DICOM files through pydicom (extra `data`): the modality's own units, in the depth they were saved in."""

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from pmae.errors import missing_extra

DICOM_SUFFIXES = (".dcm", ".dicom")


def read_dicom(path: Path | BytesIO) -> np.ndarray:
    """(C, H, W) pixels; a rescale slope and intercept (Hounsfield units) make float32 of them."""
    try:
        import pydicom
        from pydicom.pixels.utils import pixel_array
    except ImportError as error:
        raise missing_extra("a DICOM file", "data", error) from error
    header = pydicom.dcmread(path)
    _refuse(header)
    pixels = np.asarray(pixel_array(header))
    pixels = _rescaled(_dark_is_low(pixels, header), header)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def _refuse(header: Any) -> None:
    frames = int(header.get("NumberOfFrames") or 1)
    if frames > 1:
        raise ValueError(f"{frames} frames in one file; save each as a file of its own")
    if header.get("PhotometricInterpretation") == "PALETTE COLOR":
        raise ValueError("palette colour, whose numbers are names of colours; save it as RGB")


def _dark_is_low(pixels: np.ndarray, header: Any) -> np.ndarray:
    """MONOCHROME1 counts from white to black; turned round, so that it means what every other image means."""
    if header.get("PhotometricInterpretation") != "MONOCHROME1":
        return pixels
    signed, bits = bool(header.PixelRepresentation), int(header.BitsStored)
    # Lowest plus highest value that so many bits hold.
    ends = -1 if signed else 2**bits - 1
    turned: np.ndarray = (ends - pixels.astype(np.int32)).astype(pixels.dtype)
    return turned


def _rescaled(pixels: np.ndarray, header: Any) -> np.ndarray:
    slope, intercept = float(header.get("RescaleSlope") or 1), float(header.get("RescaleIntercept") or 0)
    if (slope, intercept) == (1.0, 0.0):
        return pixels
    return (pixels * slope + intercept).astype(np.float32)


# TIFF files of more channels or more depth than Pillow holds, through tifffile (extra `data`).

TIFF_SUFFIXES = (".tif", ".tiff")
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
