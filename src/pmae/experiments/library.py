"""Runs found by their settings: what was finished is reused, what was interrupted is continued, wherever it lies."""

import functools
import hashlib
import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pmae.config import Config
from pmae.config_file import to_dict
from pmae.derive import resolve
from pmae.errors import UserError
from pmae.runs import Run

FREE = frozenset(
    {
        "data.root", "data.keep_on", "train.device", "train.engine", "train.log_every", "train.checkpoint_every",
        "train.keep", "train.track", "train.shard", "train.deterministic", "probe.every", "probe.data",
    }
)  # fmt: skip
"""Settings that say where and how a run is made or watched, not what it learns."""
LENGTH = frozenset({"train.epochs", "train.seed", "optim.warmup_epochs", "optim.warmup_steps"})
"""Settings that a search for a run of any length and seed leaves open."""


@dataclass(frozen=True)
class Job:
    """One pretraining run to be had: a name for people, and the settings, which need not be resolved yet."""

    name: str
    config: Config

    @property
    def folder(self) -> str:
        """A folder name that other settings do not share."""
        counted = json.dumps({k: v for k, v in _flat(self.config).items() if k not in FREE}, sort_keys=True)
        return f"{self.name}-{hashlib.blake2b(counted.encode(), digest_size=4).hexdigest()}"


@dataclass(frozen=True)
class Known:
    """What finding needs of a run: its settings by dotted name, the size of its data, and the kind of its machine."""

    settings: dict[str, Any]
    count: int
    shape: tuple[int, int, int]
    gpu: bool


class Library:
    """The run folders in some places; a place may not exist yet."""

    def __init__(self, places: Sequence[Path | str]) -> None:
        self.places = [Path(place) for place in places]

    def find(self, wanted: Config, loosely: bool = False) -> list[Run]:
        """Runs of the wanted settings: finished ones first, then by their length; `loosely`: of any length and seed."""
        free = FREE | LENGTH if loosely else FREE
        paths = [path for place in self.places for path in sorted(place.glob("*/config.json"))]
        found = [Run(path.parent) for path in paths if _alike(path, wanted, free)]
        return sorted(found, key=lambda run: (finished(run), run.config.train.epochs or 0), reverse=True)

    def nearest(self, wanted: Config, loosely: bool = False) -> tuple[str, dict[str, Any]] | None:
        """The run on the same data that differs in the fewest settings, by its name, with its values of those."""
        free = FREE | LENGTH if loosely else FREE
        paths = [path for place in self.places for path in sorted(place.glob("*/config.json"))]
        found = [(path.parent.name, other) for path in paths if (other := _difference(path, wanted, free)) is not None]
        return min(found, key=lambda one: len(one[1]), default=None)


def finished(run: Run) -> bool:
    """Whether pretraining came to its end; with checkpoints there, also whether its pictures were written."""
    done = run.results.get("pretrain", {}).get("epoch") == run.config.train.epochs
    return bool(done) and ((run.path / "samples.safetensors").is_file() or not run.checkpoints())


def validation(run: Run) -> float | None:
    """Accuracy in percent of the linear probe that pretraining ends with, on images no test ever uses.

    They are the val split, or a fifth of the training images where there is none; None without labels.
    """
    share = run.results.get("pretrain", {}).get("linear")
    return None if share is None else 100 * float(share)


def _alike(path: Path, wanted: Config, free: frozenset[str]) -> bool:
    """Whether a run is what the wanted settings become on its data and its machine."""
    return _difference(path, wanted, free) == {}


def _difference(path: Path, wanted: Config, free: frozenset[str]) -> dict[str, Any] | None:
    """A run's values where it is not what the wanted settings become there; None if they cannot be compared."""
    known = _known(path, path.stat().st_mtime_ns)
    if known is None or known.settings["data.source"] != wanted.data.source:
        return None
    resolved = _resolved(wanted, known.count, known.shape, known.gpu)
    if resolved is None:
        return None
    there = {name: known.settings[name] for name in resolved if name not in free}
    return {name: value for name, value in there.items() if value != resolved[name]}


@functools.lru_cache(maxsize=10_000)
def _known(path: Path, changed: int) -> Known | None:
    """A run folder's settings and data, read again when its config.json has changed; None if it cannot be read."""
    run = Run(path.parent)
    try:
        data, gpu = run.environment["data"], not run.environment["device"].startswith("CPU")
        channels, height, width = data["shape"]
        return Known(_flat(run.config), int(data["counts"]["train"]), (channels, height, width), gpu)
    except (UserError, KeyError, TypeError, ValueError, AttributeError) as error:
        warnings.warn(f"{run.path} cannot be read and is passed over: {error}", stacklevel=2)
        return None


@functools.lru_cache(maxsize=1000)
def _resolved(wanted: Config, count: int, shape: tuple[int, int, int], gpu: bool) -> dict[str, Any] | None:
    """The wanted settings on such data and such a machine; None where they are impossible: no run can have them."""
    try:
        return _flat(resolve(wanted, count, shape, gpu=gpu)[0])
    except UserError:
        return None


def _flat(config: Config) -> dict[str, Any]:
    """The settings by dotted name."""
    return {f"{room}.{key}": value for room, part in to_dict(config).items() for key, value in part.items()}
