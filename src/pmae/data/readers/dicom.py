"""DICOM files through pydicom (extra `data`): the modality's own units, in the depth they were saved in."""

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from pmae.errors import missing_extra

SUFFIXES = (".dcm", ".dicom")


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
