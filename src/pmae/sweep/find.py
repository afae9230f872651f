"""Runs found by their settings: finished ones are reused and stopped ones go on, whatever their folders are called."""

import functools
import hashlib
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pmae.config import Config
from pmae.config_file import to_dict
from pmae.derive import resolve
from pmae.errors import UserError
from pmae.runs import Run

MACHINE = frozenset(
    {
        "data.root", "data.keep_on", "train.device", "train.engine", "train.log_every", "train.checkpoint_every",
        "train.keep", "train.track", "train.shard", "train.deterministic", "probe.every", "probe.data",
    }
)  # fmt: skip
"""Settings that say where and how a run is made or monitored, not what it learns."""
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


@dataclass(frozen=True)
class Recorded:
    """What comparing settings needs of a run folder."""

    settings: dict[str, Any]
    """By dotted name."""
    images: int
    shape: tuple[int, int, int]
    gpu: bool
    """Whether it was made on a GPU: some settings are derived otherwise there."""


class RunIndex:
    """The run folders below some folders; one of these may not exist yet."""

    def __init__(self, folders: Sequence[Path | str]) -> None:
        self.folders = [Path(folder) for folder in folders]

    def find(self, wanted: Config, any_length: bool = False) -> list[Run]:
        """Runs of these settings, perhaps of any length and seed: finished ones first, then the longer ones."""
        found = [Run(path.parent) for path, other in self._compared(wanted, any_length) if not other]
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
        found = [(path.parent.name, other) for path, other in self._compared(wanted, any_length)]
        return min(found, key=lambda one: len(one[1]), default=None)

    def _compared(self, wanted: Config, any_length: bool) -> Iterator[tuple[Path, dict[str, Any]]]:
        """Every run that can be compared, with its values where they are not the wanted ones."""
        free = MACHINE | LENGTH if any_length else MACHINE
        for path in (path for folder in self.folders for path in sorted(folder.glob("*/config.json"))):
            if (other := _difference(path, wanted, free)) is not None:
                yield path, other


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


def flat(config: Config) -> dict[str, Any]:
    """Settings by dotted name."""
    return {f"{room}.{key}": value for room, part in to_dict(config).items() for key, value in part.items()}


def _difference(path: Path, wanted: Config, free: frozenset[str]) -> dict[str, Any] | None:
    """A run's values where it is not what the wanted settings become there; None if they cannot be compared."""
    run = _recorded(path, path.stat().st_mtime_ns)
    if run is None or run.settings["data.source"] != wanted.data.source:
        return None
    there = _resolved(wanted, run.images, run.shape, run.gpu)
    if there is None:
        return None
    return {name: run.settings[name] for name in there if name not in free and run.settings[name] != there[name]}


@functools.lru_cache(maxsize=10_000)
def _recorded(path: Path, changed: int) -> Recorded | None:
    """A run folder's settings and data, read again when its config.json has changed; None if it cannot be read."""
    run = Run(path.parent)
    try:
        data, gpu = run.environment["data"], not run.environment["device"].startswith("CPU")
        channels, height, width = data["shape"]
        return Recorded(flat(run.config), int(data["counts"]["train"]), (channels, height, width), gpu)
    except (UserError, KeyError, TypeError, ValueError, AttributeError) as error:
        warnings.warn(f"{run.path} cannot be read and is passed over: {error}", stacklevel=2)
        return None


@functools.lru_cache(maxsize=1000)
def _resolved(wanted: Config, images: int, shape: tuple[int, int, int], gpu: bool) -> dict[str, Any] | None:
    """The wanted settings on such data and such a machine; None where they are impossible: no run can have them."""
    try:
        return flat(resolve(wanted, images, shape, gpu=gpu)[0])
    except UserError:
        return None
