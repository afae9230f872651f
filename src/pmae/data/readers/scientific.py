"""DICOM files through pydicom, and TIFF files that Pillow cannot hold through tifffile (extra `data`)."""

import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from pmae.data.memory import unpacking
from pmae.errors import missing_extra

DICOM_SUFFIXES = (".dcm", ".dicom")
TIFF_SUFFIXES = (".tif", ".tiff")
# Where the channels lie among the axes that tifffile names: C and S (samples) are channels, Y and X the plane.
_CHANNEL_AXES = {"YX": None, "CYX": 0, "SYX": 0, "YXC": 2, "YXS": 2}
DEFLATE = (8, 32946)
"""TIFF's numbers for zlib's compression."""
DEFLATED = b"1.2.840.10008.1.2.1.99"
"""DICOM's name of files that are compressed whole, header and all."""
# Two copies of the numbers, and one in 8 bytes each while units are computed.
DICOM_COPIES = 2 + 8


def read_dicom(path: Path | BytesIO) -> np.ndarray:
    """(C, H, W) pixels in the modality's own units; a rescale slope and intercept (Hounsfield units) make float32."""
    try:
        import pydicom
        from pydicom.pixels.utils import pixel_array
    except ImportError as error:
        raise missing_extra("a DICOM file", "data", error) from error
    with unpacking(_inflated(path), 2):
        header = pydicom.dcmread(path)
    _refuse(header)
    values = int(header.Rows) * int(header.Columns) * int(header.get("SamplesPerPixel") or 1)
    with unpacking(values, DICOM_COPIES + int(header.BitsAllocated) // 8):
        pixels = np.asarray(pixel_array(header))
        pixels = _rescaled(_dark_is_low(pixels, header), header)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def _inflated(path: Path | BytesIO) -> int:
    """How many bytes a DICOM file has that is compressed whole, counted without keeping them; 0 for any other."""
    content = path.read_bytes() if isinstance(path, Path) else path.getvalue()
    # The preamble, "DICM", and one element that tells how long the group with the transfer syntax is.
    start = 144 + int.from_bytes(content[140:144], "little")
    if DEFLATED not in content[144:start]:
        return 0
    limit = 8 * (Image.MAX_IMAGE_PIXELS or 2**60)
    count, inflate, rest = 0, zlib.decompressobj(-zlib.MAX_WBITS), content[start:]
    while rest and not inflate.eof and count <= limit:
        count += len(inflate.decompress(rest, 2**20))
        rest = inflate.unconsumed_tail
    return count // 8


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
        with unpacking(int(series.size), 3 * series.dtype.itemsize):
            _refuse_long_segments(file, series)
            pixels = series.asarray().reshape([n for _, n in kept])
    pixels, axis = pixels.astype(pixels.dtype.newbyteorder("="), copy=False), _CHANNEL_AXES[axes]
    return pixels[None] if axis is None else np.moveaxis(pixels, axis, 0)


def _refuse_long_segments(file: Any, series: Any) -> None:
    """Refuse strips and tiles that unpack to more than their share of the image, which tifffile would unpack whole."""
    for page in series.pages:
        if page is None or int(page.compression) not in DEFLATE:
            continue
        whole = series.dtype.itemsize * int(np.prod(page.chunks))
        for segment, _ in file.filehandle.read_segments(page.dataoffsets, page.databytecounts):
            if segment is not None and len(zlib.decompressobj().decompress(segment, whole + 1)) > whole:
                raise ValueError("a strip or tile is longer than the header says; it may be a decompression bomb")
