"""Runs found by their settings, whatever their folders are called, and what their training came to."""

import dataclasses
import functools
import hashlib
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pmae.config import Config, DataConfig
from pmae.config_file import FREE, flat
from pmae.data.images import Splits, fingerprint
from pmae.data.sets import load, with_held_out
from pmae.derive import resolve
from pmae.errors import UserError
from pmae.evaluate.protocols import MOST_IMAGES, PROBED
from pmae.models.described import adopted
from pmae.runs import Run, learned_on

MACHINE = FREE | {"data.keep_on", "train.engine", "train.deterministic", "probe.every"}
MACHINE -= {"train.bf16_gradients"}
"""Settings that say where and how a run is made or monitored, not what it learns, which rounded gradients touch. The
images of `probe.data` are not among them: what a run is best by is their accuracy."""
LENGTH = frozenset({"train.epochs", "train.seed", "optim.warmup_epochs", "optim.warmup_steps"})
"""Settings that a search for a run of any length and seed leaves open."""


@dataclass(frozen=True)
class RunSpec:
    """A pretraining run that is wanted: a name for people, and settings, which need not be resolved yet."""

    name: str
    config: Config

    @property
    def folder(self) -> str:
        """A folder name that other settings do not share."""
        counted = {name: value for name, value in flat(self.config).items() if name not in MACHINE}
        digest = hashlib.blake2b(json.dumps(counted, sort_keys=True).encode(), digest_size=4)
        return f"{self.name}-{digest.hexdigest()}"


class RunIndex:
    """The run folders below some folders; one of these may not exist yet."""

    def __init__(self, folders: Sequence[Path | str]) -> None:
        self.folders = [Path(folder) for folder in folders]

    def find(self, wanted: Config, any_length: bool = False) -> list[Run]:
        """Runs of these settings, perhaps of any length and seed: finished ones first, then the longer ones."""
        found = [Run(path) for path, other in self._compared(wanted, any_length) if not other]
        return sorted(found, key=lambda run: (finished(run), run.config.train.epochs or 0), reverse=True)

    def first(
        self, wanted: Config, accept: Callable[[Run], bool] = lambda run: True, any_length: bool = False
    ) -> Run | None:
        """The first finished run of these settings that is accepted."""
        return next((run for run in self.find(wanted, any_length) if finished(run) and accept(run)), None)

    def stopped(self, wanted: Config, folder: Path) -> list[Run]:
        """Runs of these settings in a folder that have not come to their end."""
        return [run for run in self.find(wanted) if not finished(run) and run.path.parent == folder]

    def nearest(self, wanted: Config, any_length: bool = False) -> tuple[str, dict[str, Any]] | None:
        """The run on the same data that differs in the fewest settings, by its name, with its values of those."""
        found = [(path.name, other) for path, other in self._compared(wanted, any_length)]
        return min(found, key=lambda one: len(one[1]), default=None)

    def _compared(self, wanted: Config, any_length: bool) -> Iterator[tuple[Path, dict[str, Any]]]:
        """Every run on the same data, with its values where they are not what the wanted settings become there."""
        free = MACHINE | LENGTH if any_length else MACHINE
        for path in (path for folder in self.folders for path in sorted(folder.glob("*/config.json"))):
            recorded = _recorded(path, path.stat().st_mtime_ns)
            if recorded is None or recorded[0]["data.source"] != wanted.data.source:
                continue
            settings, seen = recorded
            there = _resolved(wanted, seen)
            if there is not None:
                names = [name for name in there if name not in free and settings[name] != there[name]]
                yield path.parent, {name: settings[name] for name in names}


@dataclass(frozen=True)
class Seen:
    """Training images: their number, shape and kind, how alike hues are, whether on a GPU, and whether an encoder
    goes on with them."""

    count: int
    shape: tuple[int, int, int]
    vectors: bool
    gpu: bool
    dtype: str
    hues: float | None
    goes_on: bool


@functools.lru_cache(maxsize=10_000)
def _recorded(path: Path, changed: int) -> tuple[dict[str, Any], Seen] | None:
    """Settings, and what else decides what settings become; None if the folder cannot be read."""
    run = Run(path.parent)
    try:
        data, gpu = run.environment["data"], not run.environment["device"].startswith("CPU")
        channels, height, width = data["shape"]
        count, vectors = int(data["counts"]["train"]), bool(data.get("vectors"))
        goes_on = learned_on(run.config.encoder.weights, data.get("fingerprint"))
        # What hues are like, and whether these are vectors, is not known of older runs.
        known = Seen(count, (channels, height, width), vectors, gpu, data["dtype"], data.get("hues"), goes_on)
        return flat(run.config), known
    except (UserError, KeyError, TypeError, ValueError, AttributeError) as error:
        warnings.warn(f"{run.path} cannot be read and is passed over: {error}", stacklevel=2)
        return None


@functools.lru_cache(maxsize=1000)
def _resolved(wanted: Config, seen: Seen) -> dict[str, Any] | None:
    """The wanted settings on such data and such a machine; None where they are impossible: no run can have them."""
    try:
        wanted = dataclasses.replace(wanted, encoder=adopted(wanted.encoder, seen.shape))
        return flat(resolve(wanted, **vars(seen))[0])
    except UserError:
        return None


def finished(run: Run) -> bool:
    """Whether pretraining came to its end; with checkpoints there, also whether its pictures were written."""
    done = run.results.get("pretrain", {}).get("epoch") == run.config.train.epochs
    return bool(done) and (has_pictures(run) or not run.checkpoints())


def has_pictures(run: Run) -> bool:
    """Whether sample pictures are there, which published results leave out."""
    return (run.path / "samples.safetensors").is_file()


def validation(run: Run) -> float | None:
    """Accuracy in percent of the linear probe that pretraining ends with, on images no test ever uses.

    They are the val split, or a fifth of the training images where there is none; None without labels.
    """
    share = run.results.get("pretrain", {}).get("linear")
    return None if share is None else 100 * float(share)


def validation_images(run: Run) -> int | None:
    """How many images that accuracy is of; None where a run is probed on another set than its own."""
    if run.config.probe.data is not None:
        return None
    data = run.environment["data"]
    counts, unlabelled = data["counts"], "val" in data.get("unlabelled", ())
    # What was held out by rule, in place of a split that was missing, has no labels.
    own = None if unlabelled or "held_out" in run.results else counts.get("val")
    there = own or round(PROBED * counts["train"])
    return min(there, MOST_IMAGES["cpu" if run.environment["device"].startswith("CPU") else "cuda"] // 4)


def logged_speeds(run: Run) -> list[float]:
    """Images a second while pretraining, one a line of its log."""
    return [line["images_per_second"] for line in run.metrics() if "images_per_second" in line]


@functools.lru_cache(maxsize=1)
def splits(data: DataConfig) -> Splits:
    """The images that settings name; the last set stays at hand, since neighbouring runs share it."""
    return load(data)


@functools.lru_cache(maxsize=100)
def _fingerprint(data: DataConfig) -> str | None:
    """That of the images that settings name; None where they are not here."""
    try:
        return fingerprint(with_held_out(splits(data)))
    except UserError:
        return None


class SameImages:
    """Refuses runs of other images than those beside them, or than settings name now: their scores do not compare.

    Images are read where a run is about to see them; runs that are there tell of theirs by a fingerprint.
    """

    def __init__(self) -> None:
        self._known: dict[DataConfig, tuple[str, str]] = {}  # fingerprints, and where they are from

    def require(self, data: DataConfig, run: Run | None = None) -> None:
        """The images of a run that is reused or, beside such runs, as they are; what has no fingerprint is let pass."""
        if run is None and data not in self._known:
            return
        found = run.environment["data"].get("fingerprint") if run else _fingerprint(data)
        place = str(run.path) if run else data.source
        known, where = self._known.setdefault(data, (found, place)) if found else (None, "")
        if known not in (None, found):
            told = f"data must be the images of the runs that are reused, got others in {place!r} than in {where!r}"
            raise UserError(f"{told}; begin anew in another --out, or leave a folder of runs out of --runs")
