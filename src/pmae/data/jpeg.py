"""Plain JPEG files by torchvision: a quarter faster than Pillow, the same pixels; on a GPU in batches, by nvJPEG."""

from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from io import BytesIO
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from pmae.config import DataConfig
from pmae.data.decode import read_header
from pmae.data.images import as_tensor
from pmae.data.ondemand import RaggedOnDemand
from pmae.data.ragged import Ragged, ragged
from pmae.data.resize import resized_to

FRAMES = (0xC0, 0xC1, 0xC2)  # markers of a frame header that says the size: baseline, extended and progressive
LARGEST = 1024  # side of files that are decoded beside each other without counting what all of them take
EXIF, ADOBE = 0xE1, 0xEE  # markers of data (XMP too) that may say that pixels are turned, or are no YCbCr


def _decoder() -> Callable[..., Any] | None:
    """torchvision's, which deprecates it for torchcodec's, as fast, since 0.29; without either, Pillow decodes."""
    for module in ("torchvision.io", "torchcodec.decoders"):
        with suppress(ImportError, AttributeError, OSError, RuntimeError):
            return import_module(module).decode_jpeg
    return None


decode_jpeg = _decoder()


def has_nvjpeg(device: torch.device) -> bool:
    """Whether files can be decoded on this device: the decoder may be built without nvJPEG."""
    if decode_jpeg is None:
        return False
    file = BytesIO()
    Image.new("RGB", (16, 16)).save(file, "JPEG")
    try:
        _decoded([file.getvalue()], device)
    except RuntimeError:
        return False
    return True


def decode_plain(content: bytes, config: DataConfig, short: int | None = None) -> np.ndarray | None:
    """Pixels (3, H, W) of a file that needs nothing done to it; nothing for any other, or a broken one."""
    size = None if decode_jpeg is None or config.channels == 1 else plain_size(content)
    if size is None or not _stays(size, config, short):
        return None
    with suppress(RuntimeError):
        return _decoded([content], torch.device("cpu"))[0].numpy()
    return None


def _stays(size: tuple[int, int], config: DataConfig, short: int | None) -> bool:
    """Whether a file of this size is not resized, nor so large that it should wait for others to be unpacked."""
    if short is not None:
        return min(size) <= short
    if config.resize is None:
        return max(size) <= LARGEST
    return size == (config.resize, config.resize) and resized_to(config) == config.resize


def decode_on(device: torch.device, images: RaggedOnDemand, places: np.ndarray, longest: int) -> Ragged:
    """Images decoded on a device, the plain JPEG files in one batch; others, and larger ones, on the CPU as ever."""
    contents = images.contents(places)
    sizes = map(plain_size, contents)
    plain = [i for i, size in enumerate(sizes) if size is not None and min(size) <= longest]
    try:
        made = _decoded([contents[i] for i in plain], device)
    except RuntimeError:  # a file among them is broken: the CPU finds out which and puts another in its place
        plain, made = [], []
    rest = np.setdiff1d(np.arange(len(places)), plain)
    decoded = dict(zip(plain, made, strict=True))
    for i, pixels in zip(rest.tolist(), images.ragged(places[rest]), strict=True):
        decoded[i] = as_tensor(pixels).to(device, non_blocking=True)
    whole = [decoded[i].permute(1, 2, 0) for i in range(len(places))]
    return ragged(torch.cat([pixels.reshape(-1) for pixels in whole]), np.array([pixels.shape for pixels in whole]))


def _decoded(contents: list[bytes], device: torch.device) -> list[Tensor]:
    given = [torch.frombuffer(bytearray(content), dtype=torch.uint8) for content in contents]
    return decode_jpeg(given, mode="RGB", device=device) if given and decode_jpeg else []


def plain_size(content: bytes) -> tuple[int, int] | None:
    """Height and width of an upright colour JPEG of 8 bits, by its headers; nothing for any other file."""
    at, described = 2, False
    while content[:2] == b"\xff\xd8" and content[at : at + 1] == b"\xff" and at + 10 < len(content):
        marker, length, body = content[at + 1], int.from_bytes(content[at + 2 : at + 4]), content[at + 4 : at + 16]
        if marker in FRAMES:
            size = int.from_bytes(body[1:3]), int.from_bytes(body[3:5])
            fits = body[0] == 8 and body[5] == 3 and min(size) > 0
            return size if fits and (not described or _is_upright(content)) else None
        if marker == ADOBE and body[:5] == b"Adobe" and body[11:12] == b"\0":
            return None
        described = described or marker == EXIF
        at += 2 + length
    return None


def _is_upright(content: bytes) -> bool:
    with suppress(Exception):  # damaged EXIF data trip over anything; the CPU knows what to make of them
        return read_header(content).orientation == 1
    return False
