"""Images of differing sizes, one after the other: in memory, on a device, or in a cache mapped from the disk.

Plain JPEG files are decoded by torchvision: a quarter faster than by Pillow, the same pixels; on a GPU by nvJPEG.
"""

import shutil
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import torch
from PIL import Image
from rich.filesize import decimal
from torch import Tensor
from torchvision.io import ImageReadMode, decode_jpeg

from pmae.data.batches import CHUNK
from pmae.data.decode import ORIENTATION
from pmae.data.images import as_tensor
from pmae.data.ondemand import RaggedOnDemand
from pmae.errors import UserError
from pmae.files import disk_errors, lock, write_whole

SIZES, PIXELS = "sizes.npy", "pixels"  # the files of an entry; the second one's suffix is its dtype
FRAMES = (0xC0, 0xC1, 0xC2)  # markers of a frame header that says the size: baseline, extended and progressive
EXIF, ADOBE = 0xE1, 0xEE  # markers of data that may say that pixels are turned, or are no YCbCr


class Ragged(NamedTuple):
    """Images (h, w, C) of differing sizes, one after the other in one tensor."""

    pixels: Tensor
    starts: np.ndarray
    """Where each begins (N,)."""
    sizes: np.ndarray
    """Heights and widths (N, 2)."""
    channels: int
    mapped: np.ndarray | None = None
    """The file on the disk that they are in, if they are."""

    def window(self, image: int, top: int, left: int, height: int, width: int) -> Tensor:
        """Pixels (C, height, width) of an image, not copied."""
        row = int(self.sizes[image, 1]) * self.channels
        start = int(self.starts[image]) + top * row + left * self.channels
        return self.pixels.as_strided((self.channels, height, width), (1, row, self.channels), start)

    def to(self, device: torch.device) -> "Ragged":
        """The same images on a device."""
        return self._replace(pixels=self.pixels.to(device, non_blocking=True), mapped=None)

    def take(self, images: np.ndarray) -> "Ragged":
        """Some of the images, copied into one piece."""
        sizes = np.column_stack([self.sizes[images], np.full(len(images), self.channels)])
        spans = zip(self.starts[images].tolist(), sizes.prod(1).tolist(), strict=True)
        return ragged(torch.cat([self.pixels[start : start + length] for start, length in spans]), sizes)


def pack(images: RaggedOnDemand, places: np.ndarray, file: BinaryIO) -> tuple[np.ndarray, torch.dtype]:
    """Decode images into a file, one after the other; their sizes (N, 3), height, width and channels, and dtype."""
    sizes = np.empty((len(places), 3), np.int64)
    for start in range(0, len(places), CHUNK):
        for number, image in enumerate(images.ragged(places[start : start + CHUNK]), start):
            pixels = as_tensor(image.transpose(1, 2, 0))
            sizes[number] = pixels.shape
            file.write(pixels.numpy().data)
    return sizes, pixels.dtype


def in_memory(images: RaggedOnDemand, places: np.ndarray) -> Ragged:
    """Some images, decoded."""
    buffer = BytesIO()  # which grows in place
    sizes, dtype = pack(images, places, buffer)
    return ragged(torch.frombuffer(buffer.getbuffer(), dtype=dtype), sizes)


def ragged(pixels: Tensor, sizes: np.ndarray) -> Ragged:
    """Images of these sizes (N, 3) that lie one after the other."""
    lengths = sizes.prod(1)
    return Ragged(pixels, np.cumsum(lengths) - lengths, sizes[:, :2], int(sizes[0, 2]))


def cached(images: RaggedOnDemand, folder: Path, settings: str, expected: int) -> Ragged:
    """All images, mapped from their entry in a cache, which is written first where it is not there.

    The entry is named for the files and the settings, so that what changed is decoded again. Of several processes one
    writes it and the others wait.
    """
    entry = folder / images.digest(settings)
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with lock(entry):
        found = _mapped(entry)
        if found is None:
            free = shutil.disk_usage(folder).free
            if expected > free:
                need = f"about {decimal(expected)} of photographs, and {decimal(free)} are free"
                raise UserError(f"data.cache must be a folder with room for {need}, got {str(folder)!r}")
            write_whole(entry, lambda temporary: _write(images, temporary))
            found = _mapped(entry)
    if found is None:
        raise UserError(f"data.cache must be left as it is while it is written, got {str(entry)!r}")
    return found


def _write(images: RaggedOnDemand, entry: Path) -> None:
    entry.mkdir()
    with (entry / PIXELS).open("wb") as file:
        sizes, dtype = pack(images, np.arange(len(images)), file)
    np.save(entry / SIZES, sizes)
    (entry / PIXELS).rename(entry / f"{PIXELS}.{str(dtype).removeprefix('torch.')}")


def _mapped(entry: Path) -> Ragged | None:
    """The images of an entry; nothing where it is not there or not whole."""
    try:
        (path,) = entry.glob(f"{PIXELS}.*")
        sizes = np.load(entry / SIZES, allow_pickle=False)
        # Private: torch knows no tensors that cannot be written.
        pixels = np.memmap(path, np.dtype(path.suffix[1:]), mode="c")
    except (OSError, ValueError, TypeError):
        return None
    whole = sizes.ndim == 2 and len(pixels) == sizes.prod(1).sum()
    return ragged(torch.from_numpy(pixels), sizes)._replace(mapped=pixels) if whole else None


def has_nvjpeg(device: torch.device) -> bool:
    """Whether torchvision can decode on this device: it may be built without nvJPEG."""
    file = BytesIO()
    Image.new("RGB", (16, 16)).save(file, "JPEG")
    try:
        _decoded([file.getvalue()], device)
    except RuntimeError:
        return False
    return True


def decode_plain(content: bytes, short: int) -> np.ndarray | None:
    """Pixels (3, H, W) of a file that needs nothing done to it; nothing for any other, or a broken one."""
    with suppress(RuntimeError):
        return _decoded([content], torch.device("cpu"))[0].numpy() if is_plain_jpeg(content, short) else None
    return None


def decode_on(device: torch.device, images: RaggedOnDemand, places: np.ndarray, longest: int) -> Ragged:
    """Images decoded on a device, the plain JPEG files in one batch; others, and larger ones, on the CPU as ever."""
    contents = images.contents(places)
    plain = [i for i, content in enumerate(contents) if is_plain_jpeg(content, longest)]
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
    return decode_jpeg(given, ImageReadMode.RGB, device=device) if given else []


def is_plain_jpeg(content: bytes, longest: int) -> bool:
    """Whether a file is an upright colour JPEG of 8 bits whose short side is no longer than this, by its headers."""
    at, has_exif = 2, False
    while content[:2] == b"\xff\xd8" and content[at : at + 1] == b"\xff" and at + 10 < len(content):
        marker, length, body = content[at + 1], int.from_bytes(content[at + 2 : at + 4]), content[at + 4 : at + 16]
        if marker in FRAMES:
            height, width = int.from_bytes(body[1:3]), int.from_bytes(body[3:5])
            fits = body[0] == 8 and body[5] == 3 and 0 < min(height, width) <= longest
            return fits and (not has_exif or _is_upright(content))
        if marker == ADOBE and body[:5] == b"Adobe" and body[11:12] == b"\0":
            return False
        has_exif = has_exif or (marker == EXIF and body[:4] == b"Exif")
        at += 2 + length
    return False


def _is_upright(content: bytes) -> bool:
    try:
        with Image.open(BytesIO(content), formats=["JPEG"]) as image:
            return image.getexif().get(ORIENTATION, 1) == 1
    except Exception:  # damaged EXIF data trip over anything; the CPU knows what to make of them
        return False
