"""Images held on the device when they fit, else on the host or on the disk; statistics and passes in fixed order."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from pmae.data.augment import Standardize
from pmae.data.images import FILL, as_tensor, require_uncut
from pmae.data.ondemand import OnDemand
from pmae.errors import UserError
from pmae.system import available_bytes

NUMBERS = 2**24  # how many numbers a batch of a pass may have: 64 MiB in float32
AHEAD = 2  # how many batches are read before they are asked for
CHUNK = 256  # how many images pass through the host at a time on their way to the device
SMALLEST_STD = 1e-30  # below it, float32 has too few digits left for a variation
Part = tuple[int, int]
"""Which part of the images, and of how many: each process has its own, one run of neighbours."""
T = TypeVar("T")
R = TypeVar("R")


class Batches:
    """Indexed access to images in batches on one device, without a host sync when they are resident."""

    def __init__(
        self, images: np.ndarray | OnDemand, device: torch.device, keep_on: Literal["auto", "device", "host"] = "auto"
    ) -> None:
        self.device, self._array = device, images
        if isinstance(images, np.ndarray) and device.type == "cpu":
            # A mapped file stays on the disk; to another device it goes whole.
            self.resident = not isinstance(images, np.memmap)
        elif isinstance(images, OnDemand) or keep_on != "auto":
            self.resident = keep_on == "device"
        else:
            free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_bytes()
            self.resident = images.nbytes <= free // 2
        self._images = _whole(images, device) if self.resident else None
        # Where positions are wanted: on the device only if that is where the images are.
        self._at = device if self.resident else torch.device("cpu")

    def __len__(self) -> int:
        return len(self._array)

    @property
    def shape(self) -> tuple[int, ...]:
        """(C, H, W) of an image."""
        return tuple(self._array.shape[1:])

    def on(self, device: torch.device) -> "Batches":
        """The same images on another device, or these if they are there."""
        return self if device == self.device else Batches(self._array, device)

    def take(self, index: Tensor) -> Tensor:
        """The images at `index`, on the device, in their own dtype."""
        if self._images is not None:
            return self._images[index]
        return to_device(self._read(index), self.device)

    def each(self, indices: Iterable[Tensor]) -> Iterator[Tensor]:
        """What `take` gives for each index in turn; images that are not resident are read ahead, meanwhile."""
        if self.resident:
            yield from map(self.take, indices)
            return
        yield from (to_device(rows, self.device) for rows in read_ahead(self._read, indices, AHEAD))

    def order(self, generator: torch.Generator) -> Tensor:
        """All positions in a random order; where the disk gives only whole blocks, a few of them mixed at a time."""
        blocks = self._array.blocks() if isinstance(self._array, OnDemand) and not self.resident else None
        if blocks is None:
            return torch.randperm(len(self), generator=generator, device=self.device).to(self._at)
        starts, window = blocks
        parts = torch.tensor_split(torch.arange(len(self)), torch.from_numpy(starts[1:]))
        turn = torch.randperm(len(parts), generator=generator, device=self.device).tolist()
        mixed = [torch.cat([parts[i] for i in turn[k : k + window]]) for k in range(0, len(turn), window)]
        return torch.cat([m[torch.randperm(len(m), generator=generator, device=self.device).cpu()] for m in mixed])

    def _read(self, index: Tensor) -> Tensor:
        require_uncut(self._array)
        return as_tensor(self._array[index.cpu().numpy()])

    def passes(self, size: int = 1024, part: Part = (0, 1)) -> Iterator[Tensor]:
        """All images of a part once, in order, at most `size` at a time and fewer where they are large."""
        size = max(1, min(size, NUMBERS // math.prod(self._array.shape[1:])))
        number, parts = part
        first, last = len(self) * number // parts, len(self) * (number + 1) // parts
        starts = range(first, last, size)
        yield from self.each(torch.arange(start, min(start + size, last), device=self._at) for start in starts)


class Standardized:
    """Standardized batches of all images in order, a new pass at every iteration: what a space is fitted on."""

    def __init__(self, batches: Batches, standardize: Standardize, part: Part = (0, 1)) -> None:
        self.batches, self.standardize, self.part = batches, standardize, part

    def __iter__(self) -> Iterator[Tensor]:
        return (self.standardize(batch) for batch in self.batches.passes(2048, self.part))


def read_ahead(read: Callable[[T], R], items: Iterable[T], ahead: int) -> Iterator[R]:
    """What `read` gives for each item in turn, so many read by a thread before they are asked for."""
    coming: deque[Future[R]] = deque()
    with ThreadPoolExecutor(1) as reader:
        try:
            for item in items:
                coming.append(reader.submit(read, item))
                if len(coming) > ahead:
                    yield coming.popleft().result()
            while coming:
                yield coming.popleft().result()
        finally:
            for future in coming:
                future.cancel()


def to_device(rows: Tensor, device: torch.device) -> Tensor:
    """Rows on a device; to a GPU they are sent while the caller goes on."""
    return rows.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else rows.to(device)


def _whole(images: np.ndarray | OnDemand, device: torch.device) -> Tensor:
    """All images on the device; those decoded on demand pass through the host a chunk at a time."""
    if isinstance(images, np.ndarray):
        require_uncut(images)
        return as_tensor(images).to(device)
    dtype = as_tensor(np.empty(0, images.dtype)).dtype
    whole = torch.empty(images.shape, dtype=dtype, device=device)
    for start in range(0, len(images), CHUNK):
        whole[start : start + CHUNK] = as_tensor(images[start : start + CHUNK]).to(device)
    return whole


def fit_standardize(
    batches: Batches,
    per: Literal["channel", "pixel"],
    part: Part = (0, 1),
    add_up: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> Standardize:
    """Mean and standard deviation of the training images, in one pass; `add_up` adds the sums of all processes."""
    # In float64, and for every pixel, so that images that are all alike are told from images that vary.
    count, shift = 0, None
    for batch in batches.passes(part=part):
        x = batch.to(torch.float64)
        if shift is None:
            # Sums about the first batch's mean, so that 16-bit data with a large offset loses no digits; it is the mean
            # over processes, the same in all, so that their sums add up.
            shift = add_up(x.mean(0)) / add_up(torch.ones_like(x[0]))
            total, squares = torch.zeros_like(shift), torch.zeros_like(shift)
        x = x - shift
        count += len(x)
        total += x.sum(0)
        squares += x.square().sum(0)
    if shift is None:
        raise UserError("data must be at least one image, got none")
    images = add_up(shift.new_tensor(count))
    offset = add_up(total) / images
    mean, variance = shift + offset, add_up(squares) / images - offset.square()
    _require_variation(mean, variance)
    if per == "channel":
        # A channel varies as its pixels do, and as their means do.
        centre = mean.mean((1, 2), keepdim=True)
        variance = (variance + (mean - centre).square()).mean((1, 2), keepdim=True)
        mean = centre
    std = variance.clamp(min=0).sqrt()
    # A constant channel or pixel carries nothing: dividing by 1 leaves it at 0. Others may have units of any size.
    return Standardize(mean, torch.where(std > _rounding(mean), std, torch.ones_like(std)))


def _require_variation(mean: Tensor, variance: Tensor) -> None:
    if not bool(torch.isfinite(mean).all() and torch.isfinite(variance).all()):
        raise UserError(f"data must be finite numbers, got NaN or infinity in the training images; {FILL}")
    std = variance.clamp(min=0).sqrt()
    if not bool((std > _rounding(mean)).any()):
        told = f"at most {float(std.max()):.2g}, at a mean of {float(mean.abs().max()):.3g}"
        what = "the standard deviation of a pixel over the training images is"
        raise UserError(f"data must be images that vary, got images that are all alike: {what} {told}")


def _rounding(mean: Tensor) -> Tensor:
    """The standard deviation up to which numbers of this mean are alike to float32."""
    return (torch.finfo(torch.float32).eps * mean.abs()).clamp(min=SMALLEST_STD)
