"""Features of all images in one pass (no gradient, no masking, bfloat16 on CUDA), and the data they are scored on."""

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from pmae.config import AugmentConfig
from pmae.data.augment import Boxes, Standardize, crop, draw_boxes
from pmae.data.batches import Batches
from pmae.data.images import ImageSet, Splits
from pmae.errors import UserError, require
from pmae.evaluate.duplicates import duplicates
from pmae.evaluate.splits import BOXES, generator, hold_out
from pmae.fast import accelerate
from pmae.results import EvaluatedData, FeatureShape

CHUNK = {"cuda": 4096, "cpu": 256}
"""Images that are encoded at once, at most."""
VALUES = 2**26
"""Pixels that are encoded at once, at most."""


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


class Processes(Protocol):
    """The processes that evaluate together; `train.distributed.World` is one, `OneProcess` another."""

    rank: int
    size: int
    main: bool

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum of a tensor over all of them."""

    def all_agree(self) -> AbstractContextManager[None]:
        """What one refuses inside is refused by all."""


class OneProcess:
    """The only process: it is its own sum and waits for nobody."""

    rank, size, main = 0, 1, True

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The tensor itself."""
        return tensor

    def all_agree(self) -> AbstractContextManager[None]:
        """Nothing to agree on."""
        return nullcontext()


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
        processes: Processes | None = None,
    ) -> None:
        self.represent, self.processes = represent, processes or OneProcess()
        if isinstance(represent, nn.Module):
            accelerate(represent)
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
            mine = chunks[self.processes.rank :: self.processes.size]
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
        return {name: self.processes.all_reduce(value) for name, value in found.items()}

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


WIDEST = 4096
"""Features wider than this have no effective rank: it takes a decomposition of their products."""


@dataclass
class EvaluationData:
    """What all protocols of an evaluation share: the images on the device, their labels and features, and the clock."""

    represent: Any
    standardize: Standardize
    extractor: Extractor
    parts: dict[str, Batches]
    labels: dict[str, np.ndarray]
    classes: tuple[str, ...]
    share: float
    features: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def held_out(self) -> list[str]:
        """Names of the parts that are scored."""
        return [name for name in self.parts if name != "train"]

    def target(self, part: str = "train") -> Tensor:
        """Labels of a part on the device."""
        return torch.from_numpy(self.labels[part]).to(self.extractor.device)

    def validation(self) -> tuple[Tensor, Tensor]:
        """Training positions to fit on, and those to choose settings on: the same for all protocols and seeds."""
        kept, held = hold_out(self.labels["train"], self.share)
        device = self.extractor.device
        return torch.from_numpy(kept).to(device), torch.from_numpy(held).to(device)

    def seen(self, scores: Tensor) -> np.ndarray:
        """Scores (N, C) on the host, 0 for classes that train does not hold: an untrained output is no answer."""
        found: np.ndarray = scores.cpu().numpy()
        found[:, np.setdiff1d(np.arange(len(self.classes)), self.labels["train"])] = 0
        return found

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Add the wall time inside to the clock."""
        start = time.perf_counter()
        yield
        self.seconds[what] = self.seconds.get(what, 0.0) + time.perf_counter() - start


def set_up(
    represent: Representation,
    splits: Splits,
    standardize: Standardize,
    share: float,
    device: torch.device,
    compile: bool | None,
    keep_on: Literal["auto", "device", "host"],
    processes: Processes | None = None,
) -> EvaluationData:
    """Put the parts of the data on the device and number their classes."""
    sets = {name: found for name in ("train", "val", "test") if (found := getattr(splits, name)) is not None}
    labels = {name: _labels(found, name) for name, found in sets.items()}
    count = max(len(splits.train.classes), 1 + max(int(numbers.max()) for numbers in labels.values()))
    names = splits.train.classes if len(splits.train.classes) == count else tuple(map(str, range(count)))
    data = EvaluationData(
        represent,
        standardize,
        Extractor(represent, standardize, device, compile, processes),
        {name: Batches(found.images, device, keep_on) for name, found in sets.items()},
        labels,
        names,
        share,
    )
    present = np.unique(labels["train"])
    if len(present) == 1:
        data.notes.append("the training part has a single class: every answer is that class")
    for name in data.held_out:
        missing = np.setdiff1d(labels[name], present)
        data.notes += [f"class {names[c]!r} is in {name} but not in train, and cannot be learned" for c in missing]
    return data


def _labels(part: ImageSet, name: str) -> np.ndarray:
    labels = part.labels
    if labels is None or not len(labels):
        raise UserError(f"the {name} split must have labelled images, got none")
    whole = labels.ndim == 1 and np.issubdtype(labels.dtype, np.integer) and labels.min() >= 0
    require(
        bool(whole), f"labels of {name}", "whole class numbers from 0 on, of shape (N,)", (labels.dtype, labels.shape)
    )
    return labels.astype(np.int64)


def shape_of(features: Tensor) -> FeatureShape:
    """Width and effective rank of features."""
    count, width = features.shape
    bad = int((~features.isfinite()).any(1).sum())
    require(bad == 0, "features", f"finite for each of {count:,} training images", f"NaN or infinity for {bad:,}")
    return FeatureShape(width, effective_rank(features) if width <= WIDEST else None)


def describe(splits: Splits, data: EvaluationData) -> EvaluatedData:
    """What a reader must know of the data: sizes, classes, duplicates, and the score of the commonest class."""
    commonest = np.bincount(data.labels["train"]).argmax()
    sizes = {name: len(data.parts[name]) if name in data.parts else None for name in ("train", "val", "test")}
    held_out = {name: getattr(splits, name) for name in data.held_out}
    return EvaluatedData(
        splits.name,
        tuple(data.classes),
        **sizes,
        notes=tuple(splits.notes),
        duplicates=duplicates(splits.train, held_out, data.extractor.device),
        majority={name: float((data.labels[name] == commonest).mean()) for name in data.held_out},
    )
