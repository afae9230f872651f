"""One image file as an array, in the depth it was saved in and the way up it was taken.

Pillow reads most of them, pydicom DICOM files, and tifffile TIFF files that Pillow cannot hold (extra `data`).
"""

import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError
from PIL.Image import Transpose

from pmae.config import DataConfig
from pmae.data.memory import unpacking
from pmae.errors import missing_extra

DICOM_SUFFIXES = (".dcm", ".dicom")
TIFF_SUFFIXES = (".tif", ".tiff")
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", *TIFF_SUFFIXES, *DICOM_SUFFIXES)
# Only these decoders may run, whatever a file claims to be.
FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "TIFF")
# Grey of more than 8 bits, which Pillow can hold but hardly convert.
DEEP_MODES = ("I;16", "I;16B", "I;16L", "I;16N", "I", "F")
# Modes that are a way of writing another one.
_PLAIN_MODES = {"1": "L", "P": "RGB", "PA": "RGBA", "CMYK": "RGB", "YCbCr": "RGB", "HSV": "RGB"}
# What turns an image upright, by the orientation in its EXIF data.
ORIENTATION, EXIF = 0x0112, {"exif", "Raw profile type exif"}
_UPRIGHT = {
    2: Transpose.FLIP_LEFT_RIGHT,
    3: Transpose.ROTATE_180,
    4: Transpose.FLIP_TOP_BOTTOM,
    5: Transpose.TRANSPOSE,
    6: Transpose.ROTATE_270,
    7: Transpose.TRANSVERSE,
    8: Transpose.ROTATE_90,
}
# Where the channels lie among the axes that tifffile names: C and S (samples) are channels, Y and X the plane.
_CHANNEL_AXES = {"YX": None, "CYX": 0, "SYX": 0, "YXC": 2, "YXS": 2}
DEFLATE = (8, 32946)
"""TIFF's numbers for zlib's compression."""
DEFLATED = b"1.2.840.10008.1.2.1.99"
"""DICOM's name of files that are compressed whole, header and all."""
# Bytes that a value takes as float64 and float32 while units are computed, beside its own and the file's.
UNITS = 8 + 4


class LossError(ValueError):
    """Pillow cannot hold what is in this file without cutting something off."""


def decode(path: Path, config: DataConfig, content: bytes | None = None) -> np.ndarray:
    """(C, H, W) pixels, converted and resized as the settings ask; raises whatever a broken file makes Pillow raise.

    With the file's `content` at hand, the path is only its name.
    """
    suffix = path.suffix.lower()
    if suffix in DICOM_SUFFIXES:
        return convert(read_dicom(_opened(path, content)), config)
    try:
        return _decode_with_pillow(_opened(path, content), config)
    except (LossError, UnidentifiedImageError):
        if suffix not in TIFF_SUFFIXES:
            raise
    return convert(read_tiff(_opened(path, content)), config)


def _opened(path: Path, content: bytes | None) -> Path | BytesIO:
    return path if content is None else BytesIO(content)


def _decode_with_pillow(file: Path | BytesIO, config: DataConfig) -> np.ndarray:
    # Twice: what Pillow unpacks, of four bytes a pixel, and its conversion or its array.
    with Image.open(file, formats=FORMATS) as image, unpacking(image.width * image.height, 8):
        raw_mode = _raw_mode(image)
        _refuse_losses(image, raw_mode)
        try:
            image.load()
        except ValueError as error:
            # So Pillow says that it has no mode for these channels.
            raise LossError(str(error)) from error
        upright = _upright(image)
        if image.mode in DEEP_MODES:
            pixels = _narrow(np.asarray(upright), signed="16" in raw_mode and raw_mode.endswith("S"))
            return convert(pixels[None], config)
        return _decode_bytes(upright, config)


def _upright(image: Image.Image) -> Image.Image:
    """The image as the camera was held; Pillow itself does so for TIFF alone."""
    if not EXIF & image.info.keys():
        return image
    try:
        orientation = image.getexif().get(ORIENTATION, 1)
    # Damaged EXIF data say nothing, and the pixels beside them are whole.
    except Exception:
        return image
    return image.transpose(_UPRIGHT[orientation]) if orientation in _UPRIGHT else image


def _raw_mode(image: Image.Image) -> str:
    """How the pixels lie in the file; it tells depths that Pillow's own mode hides."""
    tiles = getattr(image, "tile", None)
    arguments = tiles[0][3] if tiles else ""
    first = arguments[0] if isinstance(arguments, tuple) and arguments else arguments
    return first if isinstance(first, str) else ""


def _refuse_losses(image: Image.Image, raw_mode: str) -> None:
    # A BMP of 16 bits a pixel ("BGR;16") has 5 or 6 a channel, which 8 hold.
    if ";16" in raw_mode and image.mode not in DEEP_MODES and not raw_mode.startswith("BGR"):
        raise LossError("16-bit colour, which would be cut to 8 bits; save it in a .npy file")
    # A photo with an embedded preview counts as two frames; that one loses nothing.
    if getattr(image, "n_frames", 1) > 1 and image.format != "MPO":
        raise LossError(f"{getattr(image, 'n_frames', 1)} pages in one file; save each as a file of its own")


def _decode_bytes(image: Image.Image, config: DataConfig) -> np.ndarray:
    mode = {1: "L", 3: "RGB", None: _PLAIN_MODES.get(image.mode, image.mode)}[config.channels]
    plain = image if image.mode == mode else image.convert(mode)
    if config.resize is not None:
        plain = plain.resize((config.resize, config.resize), Image.Resampling.BICUBIC)
    pixels = np.asarray(plain)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def convert(pixels: np.ndarray, config: DataConfig) -> np.ndarray:
    """(C, H, W) pixels of any depth, with the size and the channels that the settings ask for."""
    if config.channels not in (None, len(pixels)):
        if len(pixels) > 1:
            raise ValueError(f"{len(pixels)} channels, which data.channels {config.channels} cannot make of them")
        pixels = np.repeat(pixels, config.channels, axis=0)
    if config.resize is not None:
        pixels = np.stack([_resize_deep(plane, config.resize) for plane in pixels])
    return pixels


def _narrow(pixels: np.ndarray, signed: bool) -> np.ndarray:
    """Pillow's 32-bit integers as the 16 bits they came from."""
    if pixels.dtype.kind == "f":
        return pixels
    kind = np.iinfo(np.int16 if signed else np.uint16)
    if pixels.min() < kind.min or pixels.max() > kind.max:
        raise ValueError(f"values from {pixels.min()} to {pixels.max()} need more than 16 bits; save it in a .npy file")
    return pixels.astype(kind.dtype)


def _resize_deep(pixels: np.ndarray, side: int) -> np.ndarray:
    """Bicubic in floats and back; the cubic kernel overshoots, so whole numbers are clipped to their range."""
    resized = Image.fromarray(pixels.astype(np.float32)).resize((side, side), Image.Resampling.BICUBIC)
    result = np.asarray(resized)
    if pixels.dtype.kind == "f":
        return result
    limits = np.iinfo(pixels.dtype)
    clipped: np.ndarray = np.clip(np.rint(result), limits.min, limits.max).astype(pixels.dtype)
    return clipped


def read_dicom(path: Path | BytesIO) -> np.ndarray:
    """(C, H, W) pixels in the modality's own units; a rescale slope and intercept (Hounsfield units) make float32."""
    try:
        import pydicom
        from pydicom.pixels.utils import pixel_array
    except ImportError as error:
        raise missing_extra("a DICOM file", "data", error) from error
    content = path.read_bytes() if isinstance(path, Path) else path.getvalue()
    with unpacking(_inflated(content), 2 * 8):
        header = pydicom.dcmread(BytesIO(content))
    _refuse(header)
    values = int(header.Rows) * int(header.Columns) * int(header.get("SamplesPerPixel") or 1)
    with unpacking(values, UNITS + 2 * int(header.BitsAllocated) // 8):
        pixels = np.asarray(pixel_array(header))
        pixels = _rescaled(_dark_is_low(pixels, header), header)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def _inflated(content: bytes) -> int:
    """How many values a DICOM file may hold that is compressed whole, counted without keeping them; 0 for any other."""
    if DEFLATED not in content:
        return 0
    # The preamble, "DICM", and one element that tells how long the group with the transfer syntax is.
    start = 144 + int.from_bytes(content[140:144], "little")
    if DEFLATED not in content[144:start]:
        raise ValueError("a deflated file whose first group is not as long as it says")
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
