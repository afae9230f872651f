"""Images of differing sizes, one after the other: in memory, on a device, or in a cache mapped from the disk."""

import io
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import torch
from rich.filesize import decimal
from torch import Tensor

from pmae.data.batches import CHUNK
from pmae.data.images import as_tensor
from pmae.data.ondemand import RaggedOnDemand
from pmae.errors import UserError
from pmae.files import disk_errors, lock, write_whole

COPYING = 8  # threads that copy images, at most: 16 take longer than 8 for 256 MB on 16 cores
SIZES, PIXELS = "sizes.npy", "pixels"  # the files of an entry; the second one's suffix is its dtype


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

    def corners(self, images: np.ndarray, tops: np.ndarray, lefts: np.ndarray) -> np.ndarray:
        """Where windows of images begin, and how far their rows are apart (2, B)."""
        row = self.sizes[images, 1] * self.channels
        return np.stack([self.starts[images] + tops * row + lefts * self.channels, row])

    def to(self, device: torch.device) -> "Ragged":
        return self._replace(pixels=self.pixels.to(device, non_blocking=True), mapped=None)

    def take(self, images: np.ndarray, threads: int = 1, pinned: bool = False) -> "Ragged":
        """Some of the images, copied into one piece; a GPU is sent it while the caller goes on if it is pinned."""
        sizes = np.column_stack([self.sizes[images], np.full(len(images), self.channels)])
        lengths = sizes.prod(1)
        pixels = torch.empty(int(lengths.sum()), dtype=self.pixels.dtype, pin_memory=pinned)
        # A few long copies by numpy: of one an image, threads would take turns at Python with the one that trains, and
        # torch would divide each among threads of its own.
        source, room, ends = self.pixels.numpy(), pixels.numpy(), np.cumsum(lengths)
        starts = self.starts[images]

        def gather(part: np.ndarray) -> None:
            own = [source[starts[i] : starts[i] + lengths[i]] for i in part]
            np.concatenate(own, out=room[ends[part[0]] - lengths[part[0]] : ends[part[-1]]])

        parts = np.array_split(np.arange(len(images)), min(threads, COPYING, len(images)))
        with ThreadPoolExecutor(len(parts)) as pool:
            list(pool.map(gather, parts))
        return ragged(pixels, sizes)


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
    buffer = io.BytesIO()  # which grows in place
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
