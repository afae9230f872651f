"""One image file as an array in its own depth: by Pillow, or by pydicom and tifffile (extra `data`)."""

import logging
import threading
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from pmae.config import DataConfig
from pmae.data.resize import as_square, capped, convert, resized_to
from pmae.errors import UserError, failing_as, optional
from pmae.system import available_bytes

DICOM_SUFFIXES = (".dcm", ".dicom")
TIFF_SUFFIXES = (".tif", ".tiff")
JPEG_SUFFIXES = (".jpg", ".jpeg", ".jfif")
SUFFIXES = (".png", *JPEG_SUFFIXES, ".bmp", ".gif", ".webp", *TIFF_SUFFIXES, *DICOM_SUFFIXES)
# Only these decoders may run, whatever a file claims to be.
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF")
# Grey of more than 8 bits, which Pillow can hold but hardly convert.
DEEP_MODES = ("I;16", "I;16B", "I;16L", "I;16N", "I", "F")
# Modes that are a way of writing another one.
PLAIN_MODES = {"1": "L", "P": "RGB", "PA": "RGBA", "CMYK": "RGB", "YCbCr": "RGB", "HSV": "RGB", "LAB": "RGB"}
TRANSPARENT_MODES = ("LA", "RGBA")
# Where the channels lie among the axes that tifffile names: C and S (samples) are channels, Y and X the plane.
CHANNEL_AXES = {"YX": None, "CYX": 0, "SYX": 0, "YXC": 2, "YXS": 2}
TIFF_DEFLATE = (8, 32946)  # TIFF's numbers for zlib's compression
DICOM_DEFLATED = b"1.2.840.10008.1.2.1.99"  # DICOM's name of files that are compressed whole, header and all
ORIENTATION = 0x0112  # EXIF's and TIFF's tag; from 5 on, width and height change places
BITS, COMPRESSION, PHOTOMETRIC, SAMPLE_FORMAT = 258, 259, 262, 339  # TIFF's tags, and four of their values
UNCOMPRESSED, MINISWHITE, YCBCR, SIGNED = 1, 0, 6, 2
COLORS_IN_TIFF = (MINISWHITE, 1, 2)  # grey either way round, and RGB; in others numbers are inks or places of a palette
BUDGET_BYTES = 2**30  # what all images that are being unpacked may take together; a larger one waits until it is alone
SPARE = 2  # how many times as large as asked a JPEG is unpacked at least, so that resizing has enough to average
SMALL_BYTES = 2**20  # what is not counted: as many of these as there are threads are nothing

# Pillow logs two lines for every TIFF of more channels than it decodes; tifffile reads those.
logging.getLogger("PIL.TiffImagePlugin").addFilter(lambda record: not record.msg.startswith("More samples per pixel"))

_freed = threading.Condition()
_taken = 0


class LossError(ValueError):
    """Pillow cannot hold what is in this file without cutting something off."""


def require_room(need: int, what: str) -> None:
    """Refuse what would not fit in memory, with the bytes."""
    free = available_bytes()
    if need > free:
        instead = "make the images smaller (data.resize, for a folder) or save them as one .npy file, read from disk"
        raise UserError(
            f"data.source: {what} would take {need:,} bytes in memory, and {free:,} are available; {instead}"
        )


def reading(path: Path, kind: str = "") -> AbstractContextManager[None]:
    """Inside, whatever a library says of a broken file is one sentence with the file's name."""
    return failing_as(f"data.source: {path} cannot be read{kind}")


@contextmanager
def unpacking(values: int, bytes_each: int) -> Iterator[None]:
    """Inside, an image of so many values is unpacked; it waits for the other threads where all would take too much.

    A small file can unpack to more than a machine holds: Pillow's limit guards every format, from the header, before
    anything is unpacked. (Pillow itself only warns up to twice its limit, and many threads would unpack those at once.)
    """
    global _taken
    limit, need = Image.MAX_IMAGE_PIXELS, values * bytes_each
    if limit is not None and values > limit:
        raise ValueError(f"{values:,} values, more than {limit:,}; it may be a decompression bomb")
    if need <= SMALL_BYTES:
        yield
        return
    with _freed:
        _freed.wait_for(lambda: _taken == 0 or _taken + need <= BUDGET_BYTES)
        _taken += need
    try:
        if need > BUDGET_BYTES // 4 and need > available_bytes():
            raise ValueError(f"{need:,} bytes when unpacked, more than are available")
        yield
    finally:
        with _freed:
            _taken -= need
            _freed.notify_all()


class Header(NamedTuple):
    """What an image file says of itself before it is decoded."""

    size: tuple[int, int]
    """Width and height, as the camera was held."""
    channels: int
    orientation: int = 1
    """EXIF's number for how the pixels in the file are to be turned or mirrored; 1 is not at all."""
    transparent: bool = False
    """Whether the last channel is transparency."""


def read_header(content: Path | bytes) -> Header:
    """What Pillow reads of a file without its pixels."""
    with Image.open(BytesIO(content) if isinstance(content, bytes) else content, formats=FORMATS) as image:
        orientation = image.getexif().get(ORIENTATION, 1)
        # Of a TIFF Pillow has turned the size itself.
        turned = image.format != "TIFF" and orientation >= 5
        mode = PLAIN_MODES.get(image.mode, image.mode)
        size = (image.height, image.width) if turned else image.size
        return Header(size, Image.getmodebands(mode), orientation, mode in TRANSPARENT_MODES)


def decode(path: Path, config: DataConfig, content: bytes | None = None, short: int | None = None) -> np.ndarray:
    """(C, H, W) pixels as the settings ask; with the file's `content` at hand, the path is only its name.

    With `short`, images stay whole instead of becoming squares, their short side no longer than that.
    """
    suffix = path.suffix.lower()
    if suffix in DICOM_SUFFIXES:
        return convert(_read_dicom(path.read_bytes() if content is None else content), config, short)
    # Of a path, Pillow 12.3 maps grey TIFFs, with their sides exchanged where they are turned; a mapped file that is
    # cut short ends the process.
    with path.open("rb") if content is None else BytesIO(content) as file:
        try:
            return _read_with_pillow(file, config, short)
        except (LossError, UnidentifiedImageError):
            if suffix not in TIFF_SUFFIXES:
                raise
        file.seek(0)
        return convert(_read_tiff(file), config, short)


def _read_with_pillow(file: BinaryIO, config: DataConfig, short: int | None) -> np.ndarray:
    # Twice: what Pillow unpacks, of four bytes a pixel, and its conversion or its array.
    with Image.open(file, formats=FORMATS) as image, unpacking(image.width * image.height, 8):
        # How the pixels lie in the file; it tells depths that Pillow's own mode hides.
        arguments = image.tile[0][3] if getattr(image, "tile", None) else ""
        first = arguments[0] if isinstance(arguments, tuple) and arguments else arguments
        raw_mode = first if isinstance(first, str) else ""
        _refuse_losses(image, raw_mode, config.channels)
        # Read now, as the tags of a file that was loaded are not kept. Pillow turns 8 bits round itself.
        white_first = _tag(image, PHOTOMETRIC) == MINISWHITE
        wanted = short or SPARE * resized_to(config)
        if wanted:
            # A JPEG of many times the size is unpacked at a half, a quarter or an eighth of it: several times as fast.
            image.draft(None, (wanted, wanted))
        try:
            image.load()
        except ValueError as error:
            # So Pillow says that it has no mode for these channels.
            raise LossError(str(error)) from error
        # The way the camera was held; damaged EXIF data say nothing, and the pixels beside them are whole.
        with suppress(Exception):
            ImageOps.exif_transpose(image, in_place=True)
        if image.mode in DEEP_MODES:
            signed = "16" in raw_mode and raw_mode.endswith("S")
            pixels = _narrow(np.asarray(image), signed)
            return convert((_turned_round(pixels) if white_first else pixels)[None], config, short)
        mode = {1: "L", 3: "RGB", None: PLAIN_MODES.get(image.mode, image.mode)}[config.channels]
        plain = image if image.mode == mode else image.convert(mode)
        if short is not None:
            return capped(_first_channels(np.asarray(plain)), short)
        return _first_channels(np.asarray(as_square(plain, config)))


def _refuse_losses(image: Image.Image, raw_mode: str, channels: int | None) -> None:
    # A BMP of 16 bits a pixel ("BGR;16") has 5 or 6 a channel, which 8 hold. Of planes in a TIFF only a tag tells.
    deep = (";16" in raw_mode and not raw_mode.startswith("BGR")) or (_tag(image, BITS) or 8) > 8
    if deep and image.mode not in DEEP_MODES:
        raise LossError("16-bit colour, which would be cut to 8 bits; save it in a .npy file")
    ycbcr = _tag(image, PHOTOMETRIC) == YCBCR
    # Without compression Pillow takes it for four bytes a pixel, more than there are.
    if ycbcr and _tag(image, COMPRESSION) == UNCOMPRESSED:
        raise LossError("YCbCr without compression; save it as RGB")
    if image.format == "TIFF" and "X" in raw_mode and channels is None and not ycbcr:
        raise LossError("more channels than colours, which would be left out; save it in a .npy file")
    if image.mode == "L" and _tag(image, SAMPLE_FORMAT) == SIGNED:
        raise LossError("signed numbers of 8 bits; save it in a .npy file")
    frames = getattr(image, "n_frames", 1)
    # A photo with an embedded preview counts as two frames; that one loses nothing.
    if frames > 1 and image.format != "MPO":
        raise LossError(f"{frames} pages in one file; save each as a file of its own")


def _tag(image: Image.Image, number: int) -> int | None:
    """A tag of a TIFF file, the first of several alike; nothing for other formats."""
    value = getattr(image, "tag_v2", {}).get(number)
    return value[0] if isinstance(value, tuple) else value


def _turned_round(pixels: np.ndarray, bits: int = 16) -> np.ndarray:
    """Whole numbers from white to black as from black to white: their lowest plus their highest value, less each."""
    if pixels.dtype.kind == "f":
        return pixels
    ends = -1 if pixels.dtype.kind == "i" else 2**bits - 1
    return (ends - pixels.astype(np.int32)).astype(pixels.dtype)


def _narrow(pixels: np.ndarray, signed: bool) -> np.ndarray:
    """Pillow's 32-bit integers as the 16 bits they came from."""
    if pixels.dtype.kind == "f":
        return pixels
    kind = np.iinfo(np.int16 if signed else np.uint16)
    if pixels.min() < kind.min or pixels.max() > kind.max:
        raise ValueError(f"values from {pixels.min()} to {pixels.max()} need more than 16 bits; save it in a .npy file")
    return pixels.astype(kind.dtype)


def _first_channels(pixels: np.ndarray) -> np.ndarray:
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def _read_dicom(content: bytes) -> np.ndarray:
    """Pixels in the modality's own units; a rescale slope and intercept (Hounsfield units) make float32."""
    pydicom = optional("a DICOM file", "data", "pydicom.pixels.utils", "pydicom")
    with unpacking(_inflated(content), 2 * 8):
        header = pydicom.dcmread(BytesIO(content))
    frames, kind = int(header.get("NumberOfFrames") or 1), header.get("PhotometricInterpretation")
    if frames > 1:
        raise ValueError(f"{frames} frames in one file; save each as a file of its own")
    if kind == "PALETTE COLOR":
        raise ValueError("palette colour, whose numbers are names of colours; save it as RGB")
    values = int(header.Rows) * int(header.Columns) * int(header.get("SamplesPerPixel") or 1)
    # Beside the file's own and their array, values take float64 and float32 while units are computed.
    with unpacking(values, 8 + 4 + 2 * int(header.BitsAllocated) // 8):
        pixels = np.asarray(pydicom.pixels.utils.pixel_array(header))
        if kind == "MONOCHROME1":
            pixels = _turned_round(pixels, int(header.BitsStored))
        slope, intercept = float(header.get("RescaleSlope") or 1), float(header.get("RescaleIntercept") or 0)
        # Some makers of CT save its units as they are, and lie in one folder with those that do not.
        if (slope, intercept) != (1.0, 0.0) or header.get("Modality") == "CT":
            pixels = (pixels * slope + intercept).astype(np.float32)
    return _first_channels(_native(pixels))


def _native(pixels: np.ndarray) -> np.ndarray:
    """The same numbers in the machine's own byte order, which is the only one that torch takes."""
    return pixels.astype(pixels.dtype.newbyteorder("="), copy=False)


def _inflated(content: bytes) -> int:
    """How many values a DICOM file may hold that is compressed whole, counted without keeping them; 0 for any other."""
    if DICOM_DEFLATED not in content:
        return 0
    # The preamble, "DICM", and one element that tells how long the group with the transfer syntax is.
    start = 144 + int.from_bytes(content[140:144], "little")
    if DICOM_DEFLATED not in content[144:start]:
        raise ValueError("a deflated file whose first group is not as long as it says")
    limit = 8 * (Image.MAX_IMAGE_PIXELS or 2**60)
    count, inflate, rest = 0, zlib.decompressobj(-zlib.MAX_WBITS), content[start:]
    while rest and not inflate.eof and count <= limit:
        count += len(inflate.decompress(rest, 2**20))
        rest = inflate.unconsumed_tail
    return count // 8


def _read_tiff(content: BinaryIO) -> np.ndarray:
    """Pixels in their own depth; a stack of planes that are not channels is refused."""
    tifffile = optional("a TIFF of this kind", "data", "tifffile")
    with tifffile.TiffFile(content) as file:
        series, pages, first = file.series[0], len(file.pages), file.pages.first
        # Axes of length one say nothing, except that an image may be one row or column.
        kept = [(name, n) for name, n in zip(series.axes, series.shape, strict=True) if n > 1 or name in "YX"]
        axes = "".join(name for name, _ in kept)
        if len(file.series) > 1 or axes not in CHANNEL_AXES:
            raise ValueError(f"{pages} pages in one file; {_instead_of_pages(series.shape)}")
        if first.photometric not in COLORS_IN_TIFF:
            raise ValueError(f"its numbers are no colours but {first.photometric.name}; save it as grey or RGB")
        with unpacking(int(series.size), 3 * series.dtype.itemsize):
            _refuse_long_segments(file, series)
            pixels = series.asarray().reshape([n for _, n in kept])
    pixels, axis = _native(pixels), CHANNEL_AXES[axes]
    pixels = _turned_round(pixels, first.bitspersample) if first.photometric == MINISWHITE else pixels
    pixels = pixels[None] if axis is None else np.moveaxis(pixels, axis, 0)
    return _upright(pixels, first.tags.valueof(ORIENTATION, 1))


def _instead_of_pages(shape: tuple[int, ...]) -> str:
    """How to save what was written as a stack; of an array (H, W, C) tifffile makes H pages unless it is told."""
    instead = "save each as a file of its own, or all in a .npy file"
    if len(shape) == 3 and shape[2] < min(shape[:2]):
        instead += f"; where the {shape[2]} are channels, tifffile.imwrite takes planarconfig='contig'"
    return instead


def _upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """(C, H, W) pixels turned and mirrored as the tag of this value says."""
    if orientation >= 5:
        pixels, orientation = pixels.swapaxes(1, 2), orientation - 4
    rows, columns = -1 if orientation in (3, 4) else 1, -1 if orientation in (2, 3) else 1
    return pixels[:, ::rows, ::columns]


def _refuse_long_segments(file: Any, series: Any) -> None:
    """Refuse strips and tiles that unpack to more than their part of the image, which tifffile would unpack whole."""
    for page in series.pages:
        if page is None or int(page.compression) not in TIFF_DEFLATE:
            continue
        whole = series.dtype.itemsize * int(np.prod(page.chunks))
        for segment, _ in file.filehandle.read_segments(page.dataoffsets, page.databytecounts):
            if segment is not None and len(zlib.decompressobj().decompress(segment, whole + 1)) > whole:
                raise ValueError("a strip or tile is longer than the header says; it may be a decompression bomb")
