"""Representations of all images in one pass: no gradient, no masking, evaluation mode, bfloat16 on CUDA."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pmae.config import AugmentConfig
from pmae.data.augment import Boxes, Standardize, crop, draw_boxes
from pmae.data.batches import Batches
from pmae.evaluate.draws import BOXES, generator

CHUNK = {"cuda": 4096, "cpu": 256}
VALUES = 2**26


class Representation(Protocol):
    """What can be evaluated: an encoder, or a baseline that looks like one (in practice an `nn.Module`)."""

    training: bool

    @property
    def width(self) -> int:
        """Width of the hidden layers of an MLP head on it."""

    def features(self, x: Tensor) -> dict[str, Tensor]:
        """One vector per standardized image, for each way of pooling."""

    def train(self, mode: bool = True) -> Any:
        """Switch between training and evaluation."""


class Part(NamedTuple):
    """Which chunks of the images are this process's, `rank` of every `size`, and the sum of a tensor over processes."""

    rank: int
    size: int
    add_up: Callable[[Tensor], Tensor]


ALL = Part(0, 1, lambda tensor: tensor)


@contextmanager
def evaluating(represent: Representation) -> Iterator[None]:
    """Evaluation mode and no gradients inside; the module's mode is put back after."""
    before = represent.training
    represent.train(False)
    try:
        with torch.no_grad():
            yield
    finally:
        represent.train(before)


class Extractor:
    """Computes features pass after pass with one compiled forward; representation and statistics are on the device.

    Several processes that call it alike divide the chunks among them, and each has the features of all.
    """

    def __init__(
        self,
        represent: Representation,
        standardize: Standardize,
        device: torch.device,
        compile: bool | None = None,
        part: Part = ALL,
    ) -> None:
        self.represent, self.part = represent, part
        self.standardize = standardize
        self.device = device
        self.compiled = device.type == "cuda" if compile is None else compile
        self.interpolation: Any = "bicubic"
        self._forward: Any = torch.compile(self._plain, dynamic=False) if self.compiled else self._plain

    def __call__(
        self, batches: Batches, augment: AugmentConfig | None = None, key: tuple[int, ...] = ()
    ) -> dict[str, Tensor]:
        """Features (N, width) in float32 for each pooling; crops and flips are a function of `key`."""
        found: dict[str, Tensor] = {}
        self.interpolation = augment.interpolation if augment else self.interpolation
        with evaluating(self.represent):
            chunks = list(_chunks(batches, self.compiled))
            mine = chunks[self.part.rank :: self.part.size]
            # A process without a chunk computes the first one, to know what all of them add up.
            for start, stop, index in mine or chunks[:1]:
                images = batches.take(index)
                boxes = None if augment is None else self._boxes(images, augment, (*key, start))
                for name, value in self._forward(images, boxes).items():
                    if name not in found:
                        found[name] = torch.zeros(len(batches), value.shape[1], device=self.device)
                    if mine:
                        found[name][start:stop] = value[: stop - start]
        # A sum with zeros is exact: all processes have the numbers that one would have.
        return {name: self.part.add_up(value) for name, value in found.items()}

    def _boxes(self, images: Tensor, augment: AugmentConfig, key: tuple[int, ...]) -> Boxes:
        count, _, height, width = images.shape
        return draw_boxes(count, height, width, augment, generator(self.device, *key, BOXES), self.device)

    def _plain(self, images: Tensor, boxes: Boxes | None) -> dict[str, Tensor]:
        x = images if boxes is None else crop(images, boxes, self.interpolation)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            return self.represent.features(self.standardize(x))


def extract(
    represent: Representation, batches: Batches, standardize: Standardize, compile: bool | None = None
) -> dict[str, Tensor]:
    """Features (N, width) of all images in order, for each pooling the representation has."""
    return Extractor(represent, standardize, batches.device, compile)(batches)


def _chunks(batches: Batches, static: bool) -> Iterator[tuple[int, int, Tensor]]:
    """Start, stop and positions of each chunk; a compiled forward gets one shape, the last chunk wrapping around."""
    count, device = len(batches), batches.device
    values = batches.take(torch.zeros(1, dtype=torch.long, device=device)).numel()
    size = min(CHUNK.get(device.type, CHUNK["cpu"]), max(1, VALUES // values))
    for start in range(0, count, size):
        stop = min(start + size, count)
        yield start, stop, torch.arange(start, start + size if static else stop, device=device) % count


def stacked(features: Mapping[str, Tensor], poolings: tuple[str, ...]) -> Tensor:
    """(P, N, width): the named poolings one above the other."""
    return torch.stack([features[name] for name in poolings])


def effective_rank(features: Tensor) -> float:
    """exp(entropy of the singular values' shares): how many dimensions the features really use (RankMe)."""
    z = features.double()
    gram = z.T @ z if len(z) > z.shape[1] else z @ z.T
    # On the host: the CUDA solver gives up on the nearly singular products that untrained features have.
    values = torch.linalg.eigvalsh(gram.cpu()).clamp(min=0).sqrt()
    if float(values.sum()) == 0:
        return 0.0
    share = values / values.sum()
    return float(torch.special.entr(share).sum().exp())
