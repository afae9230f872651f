"""Random resized crops from the files' own pixels, with their aspect ratio, resized once with antialiasing.

Training on squares that were made of larger files would blow small crops up again: a fifth of a 224-pixel square is 100
pixels wide. Files are decoded whole, no larger than crops can use, and kept on the device, in memory, in a cache on the
disk, or not at all; the crops are the same.
"""

import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from rich.filesize import decimal
from torch import Tensor
from torch.nn import functional

from pmae.config import AugmentConfig, Config
from pmae.data.augment import Boxes, boxes_of, resize_weights
from pmae.data.batches import AHEAD, read_ahead
from pmae.data.images import ImageSet, as_tensor, require_uncut
from pmae.data.jpeg import decode_on, has_nvjpeg
from pmae.data.ondemand import RaggedOnDemand
from pmae.data.ragged import Ragged, cached, in_memory
from pmae.files import folder_path
from pmae.system import available_bytes

TOGETHER = 64  # crops that one matrix multiplication resizes: 130 MB of windows at 224 pixels
Place = Literal["device", "memory", "files"]
WORDS = {"device": "on the device", "memory": "in memory", "files": "decoded anew for every batch"}


class Plan(NamedTuple):
    """Which files crops are cut from, and where their pixels wait."""

    images: RaggedOnDemand
    short: int
    """What the short side of images may have."""
    plain: bool
    """Whether they are three channels of 8 bits."""
    bytes: int
    place: Place
    cache: Path | None
    key: str
    """What beside the files decides what is in the cache."""
    kernels: str
    """As `train.kernels`."""

    def __str__(self) -> str:
        kept = f"in the cache {str(self.cache)!r}" + ", then on the device" * (self.place == "device")
        where = kept if self.cache else WORDS[self.place]
        advice = "; data.cache FOLDER would keep them" if not self.cache and self.place == "files" else ""
        return f"crops are cut from the files' own pixels, about {decimal(self.bytes)}, {where}{advice}"

    def held(self, device: torch.device) -> Ragged | None:
        """All images where they are to wait; nothing where they stay in their files."""
        if self.cache is None and self.place == "files":
            return None
        whole = np.arange(len(self.images))
        held = cached(self.images, self.cache, self.key, self.bytes) if self.cache else in_memory(self.images, whole)
        return held.to(device) if self.place == "device" else held


def plan_crops(data: ImageSet, config: Config, device: torch.device) -> Plan | None:
    """How to cut crops from the files of a set; nothing where none is larger than the squares made of it."""
    augment, (channels, *size) = config.augment, data.shape
    if data.originals is None or not augment.crop or augment.crop_from == "square":
        return None
    sizes = np.array(data.originals.sizes).reshape(-1, 2)
    if not (sizes > size[0]).any():
        return None
    # The smallest crop has no fewer pixels than it is resized to, so more of them would be of no use.
    short = math.ceil(size[0] / math.sqrt(augment.crop_scale[0]))
    scale = np.minimum(1, short / sizes.min(1))
    each = channels * as_tensor(np.empty(0, data.images.dtype)).itemsize * sizes.prod(1) * scale**2
    expected, cache = int(each.mean() * len(data)), config.data.cache
    place = _place(data.originals.keeps, expected, config, device)
    key = f"{short} {channels} {config.data.layout} {data.images.dtype}"
    folder, plain = folder_path(cache, "data.cache") if cache else None, channels == 3 and data.images.dtype == np.uint8
    images = data.originals.capped(short)
    return Plan(images, short, plain, expected, place, folder, key, config.train.kernels)


def _place(keeps: bool, expected: int, config: Config, device: torch.device) -> Place:
    asked, cuda = config.data.keep_on, device.type == "cuda"
    # Every process that `torchrun` started on the machine keeps its own.
    fits = expected * int(os.environ.get("LOCAL_WORLD_SIZE", 1)) <= available_bytes() // 2
    fits = fits and (keeps or asked == "device")
    if not fits and config.data.cache is None:
        return "files"
    fits = cuda and expected <= torch.cuda.mem_get_info(device)[0] // 2
    return "device" if cuda and (asked == "device" or (asked == "auto" and fits)) else "memory"


Read = tuple[Ragged, np.ndarray, Boxes, torch.cuda.Event | None]
"""Images, which of them each crop is of, its box, and what tells that images on their way to a GPU are there."""


class Crops:
    """Batches of crops on a device, each a function of its images and of the noise drawn for it."""

    def __init__(self, plan: Plan, size: tuple[int, int], augment: AugmentConfig, device: torch.device) -> None:
        self._files, self._size, self._augment, self._device = plan.images, size, augment, device
        # Where crops are cut: of the devices that are no CPUs, CUDA alone knows antialiasing and half precision.
        self._cuts_on = device if device.type == "cuda" else torch.device("cpu")
        self._held, self._short = plan.held(device), plan.short
        on_gpu = self._cuts_on.type == "cuda" and self._held is None
        self._by_nvjpeg = on_gpu and plan.plain and has_nvjpeg(device)
        self._kernels = plan.kernels
        self._sending = torch.cuda.Stream(device) if self._cuts_on.type == "cuda" else None

    def each(self, draws: Iterable[tuple[Tensor, Tensor]]) -> Iterator[Tensor]:
        """Crops of the images at each index, one for each row of its noise: first views before second ones.

        A CPU cuts them ahead; for a GPU their images are read ahead.
        """
        if self._cuts_on.type == "cuda":
            yield from map(self._cut, read_ahead(self._read, draws, AHEAD))
        else:
            cut = read_ahead(lambda draw: self._cut(self._read(draw)), draws, AHEAD)
            yield from (crops.to(self._device) for crops in cut)

    def _read(self, draw: tuple[Tensor, Tensor]) -> Read:
        """What a batch of crops is cut from."""
        index, noise = draw[0].numpy(), draw[1]
        if self._held is not None and self._held.mapped is not None:
            require_uncut(self._held.mapped)
        if self._held is not None and self._held.pixels.device.type == self._cuts_on.type:
            images, places, sent = self._held, index, None
        else:
            (images, sent), places = self._batch(index), np.arange(len(index))
        places = np.tile(places, len(noise) // len(index))
        heights, widths = torch.from_numpy(images.sizes[places]).float().T
        return images, places, boxes_of(noise, heights, widths, self._augment), sent

    def _batch(self, index: np.ndarray) -> tuple[Ragged, torch.cuda.Event | None]:
        if self._by_nvjpeg:
            # Beyond twice what crops can use, unpacking at a half of the size on the CPU is less work.
            return decode_on(self._device, self._files, index, 2 * self._short), None
        pinned = self._sending is not None
        if self._held is not None:
            images = self._held.take(index, self._files.threads, pinned)
        else:
            images = in_memory(self._files, index)
            images = images._replace(pixels=images.pixels.pin_memory()) if pinned else images
        if not pinned:
            return images, None
        with torch.cuda.stream(self._sending):  # beside what the GPU computes
            coming, sent = images.to(self._cuts_on), torch.cuda.Event()
            sent.record()
        return coming, sent

    def _cut(self, batch: Read) -> Tensor:
        images, places, boxes, sent = batch
        if sent is not None:
            cutting = torch.cuda.current_stream(self._cuts_on)
            cutting.wait_event(sent)
            images.pixels.record_stream(cutting)  # which uses them after they are let go of here
        given = (images, places, boxes, self._size, self._augment.interpolation)
        return crop_ragged(*given, self._files.threads, plain=self._kernels != "all")


def crop_ragged(
    images: Ragged,
    places: np.ndarray | Sequence[int],
    boxes: Boxes,
    size: tuple[int, int],
    interpolation: str,
    threads: int = 1,
    plain: bool = False,
) -> Tensor:
    """Crops (B, C, *size) of the images at these places: uint8 of uint8, else float32; plain ones without kernels."""
    if images.pixels.is_cuda:
        cut = [slice(start, start + TOGETHER) for start in range(0, len(places), TOGETHER)]
        parts = [(np.asarray(places[c]), Boxes(*(each[c] for each in boxes))) for c in cut]
        return torch.cat([by_gemm(images, *part, size, interpolation, plain) for part in parts])
    windows = [tuple(map(int, box)) for box in zip(places, *(each.tolist() for each in boxes[:4]), strict=True)]

    def resized(window: tuple[int, ...], flip: bool) -> Tensor:
        pixels = images.window(*window)[None]
        pixels = pixels if pixels.dtype == torch.uint8 else pixels.float()
        made = functional.interpolate(pixels, size, mode=interpolation, antialias=True)
        return made.flip(3) if flip else made

    with ThreadPoolExecutor(threads) as pool:
        return torch.cat(list(pool.map(resized, windows, boxes.flip.tolist()))).contiguous()


def by_gemm(
    images: Ragged, places: np.ndarray, boxes: Boxes, size: tuple[int, int], interpolation: str, plain: bool = False
) -> Tensor:
    """Windows resized as `rows @ (window @ columns^T)`; beyond the end of a window the weights are 0."""
    # Half precision keeps 11 bits, 0.06 of a grey level, of numbers up to 255.
    whole = images.pixels.dtype == torch.uint8
    dtype = torch.float16 if whole else torch.float32
    make = _by_torch if plain else _maker(images.pixels.device)
    padded, rows, columns = make(images, places, boxes, size, interpolation, dtype)
    if not whole:
        return rows[:, None] @ (padded @ columns.transpose(1, 2)[:, None])
    # The cubic kernel overshoots; 8-bit resizing clips what it makes of rows before it goes on to columns.
    narrow = (padded @ columns.transpose(1, 2)[:, None]).clamp_(0, 255)
    return (rows[:, None] @ narrow).round_().clamp_(0, 255).to(torch.uint8)


Factors = tuple[Tensor, Tensor, Tensor]
"""Windows (B, C, high, wide) and the weights of rows (B, size, high) and columns (B, size, wide)."""


@cache
def _maker(device: torch.device) -> Callable[..., Factors]:
    """What cuts windows and weighs their pixels: kernels where they run, else torch's operations."""
    from pmae import fast

    if fast.level() != "all":
        return _by_torch
    one, first = torch.ones(1, dtype=torch.int64), np.zeros(1, int)
    images = Ragged(torch.zeros(3, dtype=torch.uint8, device=device), first, np.ones((1, 2), int), 3)
    box = Boxes(one - 1, one - 1, one, one, one > 1)
    try:
        _by_kernels(images, first, box, (1, 1), "bicubic", torch.float16)
    except Exception as error:  # no Triton, no compiler, a GPU it does not know: whatever it is, crops can be cut
        warnings.warn(f"crops are cut without kernels, which takes longer: {error}", stacklevel=2)
        return _by_torch
    return _by_kernels


def _by_kernels(
    images: Ragged, places: np.ndarray, boxes: Boxes, size: tuple[int, int], interpolation: str, dtype: torch.dtype
) -> Factors:
    from pmae.fast import crop_kernels

    device, (tops, lefts, heights, widths) = images.pixels.device, (each.long() for each in boxes[:4])
    corners = torch.from_numpy(images.corners(places, tops.numpy(), lefts.numpy()))
    given = torch.stack([*corners, heights, widths, boxes.flip.long()]).to(device, non_blocking=True)
    sides = int(heights.max()), int(widths.max())
    padded = crop_kernels.windows(images.pixels, given[:4], sides, images.channels, dtype)
    rows = crop_kernels.weights(given[2], torch.zeros_like(given[4]), sides[0], size[0], interpolation, dtype)
    return padded, rows, crop_kernels.weights(given[3], given[4], sides[1], size[1], interpolation, dtype)


def _by_torch(
    images: Ragged, places: np.ndarray, boxes: Boxes, size: tuple[int, int], interpolation: str, dtype: torch.dtype
) -> Factors:
    device, (tops, lefts, heights, widths) = images.pixels.device, (each.int().tolist() for each in boxes[:4])
    high, wide = max(heights), max(widths)
    padded = torch.zeros(len(places), images.channels, high, wide, dtype=dtype, device=device)
    windows = zip(places.tolist(), tops, lefts, heights, widths, strict=True)
    for window, room in zip(windows, padded.unbind(), strict=True):
        room[:, : window[3], : window[4]].copy_(images.window(*window))
    start, flip = torch.zeros(len(places), device=device), boxes.flip.to(device)
    rows = resize_weights(start, boxes.height.to(device), high, size[0], interpolation).to(dtype)
    columns = resize_weights(start, boxes.width.to(device), wide, size[1], interpolation).to(dtype)
    return padded, rows, torch.where(flip[:, None, None], columns.flip(1), columns)
