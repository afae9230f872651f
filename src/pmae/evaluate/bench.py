"""The parts of the data on the device, their features and the clock, shared by all protocols of one evaluation."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from pmae.data.augment import Standardize
from pmae.data.batches import Batches
from pmae.data.images import ImageSet, Splits
from pmae.errors import UserError, require
from pmae.evaluate.features import ALL, Extractor, Part, Representation, effective_rank
from pmae.evaluate.splits import duplicates, hold_out

WIDEST = 4096


@dataclass
class Bench:
    """What all protocols share: the parts of the data on the device, their features, and the clock."""

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
    part: Part = ALL,
) -> Bench:
    """Put the parts of the data on the device and number their classes."""
    sets = {name: found for name in ("train", "val", "test") if (found := getattr(splits, name)) is not None}
    labels = {name: _labels(found, name) for name, found in sets.items()}
    count = max(len(splits.train.classes), 1 + max(int(numbers.max()) for numbers in labels.values()))
    names = splits.train.classes if len(splits.train.classes) == count else tuple(map(str, range(count)))
    bench = Bench(
        represent,
        standardize,
        Extractor(represent, standardize, device, compile, part),
        {name: Batches(found.images, device, keep_on) for name, found in sets.items()},
        labels,
        names,
        share,
    )
    present = np.unique(labels["train"])
    if len(present) == 1:
        bench.notes.append("the training part has a single class: every answer is that class")
    for name in bench.held_out:
        missing = np.setdiff1d(labels[name], present)
        bench.notes += [f"class {names[c]!r} is in {name} but not in train, and cannot be learned" for c in missing]
    return bench


def _labels(part: ImageSet, name: str) -> np.ndarray:
    labels = part.labels
    if labels is None or not len(labels):
        raise UserError(f"the {name} split must have labelled images, got none")
    whole = labels.ndim == 1 and np.issubdtype(labels.dtype, np.integer) and labels.min() >= 0
    require(
        bool(whole), f"labels of {name}", "whole class numbers from 0 on, of shape (N,)", (labels.dtype, labels.shape)
    )
    return labels.astype(np.int64)


def shape_of(features: Tensor) -> dict[str, Any]:
    """Width and effective rank of features."""
    count, width = features.shape
    bad = int((~features.isfinite()).any(1).sum())
    require(bad == 0, "features", f"finite for each of {count:,} training images", f"NaN or infinity for {bad:,}")
    return {"width": width, "effective_rank": effective_rank(features) if width <= WIDEST else None}


def describe(splits: Splits, bench: Bench) -> dict[str, Any]:
    """What a reader must know of the data: sizes, classes, duplicates, and the score of the commonest class."""
    commonest = np.bincount(bench.labels["train"]).argmax()
    sizes = {name: len(bench.parts[name]) if name in bench.parts else None for name in ("train", "val", "test")}
    return {
        "name": splits.name,
        "classes": list(bench.classes),
        **sizes,
        "notes": list(splits.notes),
        "duplicates": {name: duplicates(splits.train, getattr(splits, name)) for name in bench.held_out},
        "majority": {name: float((bench.labels[name] == commonest).mean()) for name in bench.held_out},
    }
