"""Doing what is missing: a plan says what to train next, workers train it, and run folders hold what came of it.

`train` needs nothing but its arguments and may be called again after it was killed, here or on another machine.
"""

import functools
import gc
import hashlib
import json
import time
import warnings
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from pmae import api
from pmae.config import Config, DataConfig, replace
from pmae.config_file import to_dict
from pmae.data.images import Splits
from pmae.data.sets import load, read_chunks, tinyimagenet_folder
from pmae.derive import resolve
from pmae.errors import Interrupted, UserError
from pmae.runs import Run

# Runs found by their settings: what was finished is reused, what was interrupted is continued, wherever it lies.

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


Accept = Callable[[Run], bool]


@dataclass(frozen=True)
class Task:
    """A job, what to call it while it is done, and how far to take it."""

    job: Job
    name: str
    until: int | None = None
    """The epoch to stop after, ready to go on; the last one if not given."""


class Plan(Protocol):
    """What is to be trained, in which order."""

    def next(self, running: bool) -> Task | None:
        """What to begin now; None for nothing, or nothing before what is running has ended."""

    def ended(self, task: Task, run: Run) -> None:
        """Take note of how a task ended."""


class Workers(Protocol):
    """Those who train: so many runs at a time."""

    def free(self) -> bool:
        """Whether another run can begin."""

    def begin(self, path: Path, config: Config, until: int | None) -> None:
        """Have a run folder trained."""

    def wait(self) -> Path:
        """The folder of a run that has ended."""


class InTurn:
    """A plan: all jobs to their end, one for each different configuration; `then` is done to each run that ended."""

    def __init__(self, jobs: Sequence[Job], then: Callable[[Run], None] = lambda run: None) -> None:
        self._then = then
        different = list({job.config: job for job in jobs}.values())
        self._tasks = [Task(job, f"[{number}/{len(different)}] {job.name}") for number, job in enumerate(different, 1)]

    def next(self, running: bool) -> Task | None:
        """The first one that has not begun."""
        return self._tasks.pop(0) if self._tasks else None

    def ended(self, task: Task, run: Run) -> None:
        """What is to be done then, before another run begins here: a command that is killed leaves whole results."""
        self._then(run)


class Here:
    """A worker: this process, one run after another."""

    def __init__(self) -> None:
        self._given: tuple[Path, Config, int | None] | None = None

    def free(self) -> bool:
        """Whether no run was given."""
        return self._given is None

    def begin(self, path: Path, config: Config, until: int | None) -> None:
        """Take a run."""
        self._given = path, config, until

    def wait(self) -> Path:
        """Train it."""
        if self._given is None:
            raise RuntimeError("there is no run to wait for")
        path, config, until = self._given
        train(path, config, until)
        self._given = None
        return path


def anything(_: Run) -> bool:
    """Every finished run will do."""
    return True


def carry_out(
    plan: Plan,
    folder: Path,
    library: Library,
    workers: Workers,
    accept: Accept = anything,
    loosely: bool = False,
) -> dict[Config, Run]:
    """The runs that a plan asks for: found in the library, or else continued or made below `folder`.

    Finished runs that `accept` refuses are left alone; `loosely` takes a run of any length and seed.
    """
    runs: dict[Config, Run] = {}
    begun: dict[Path, tuple[Task, float]] = {}

    def end(task: Task, run: Run) -> None:
        runs[task.job.config] = run
        plan.ended(task, run)

    while True:
        while workers.free() and (task := plan.next(bool(begun))) is not None:
            run = find_run(task.job, library, accept, loosely) or _far_enough(task, folder, library)
            if run is not None:
                end(task, run)
                continue
            path = _place(task.job, folder, library, begun)
            print(f"{task.name}: {'goes on' if _has_run(path) else 'pretrains'} in {path}", flush=True)
            workers.begin(path, task.job.config, task.until)
            begun[path] = task, time.monotonic()
        if not begun:
            return runs
        try:
            path = workers.wait()
        except Interrupted as stop:
            stop.args = ("stopped and saved; the same command again goes on from there",)
            raise
        task, since = begun.pop(path)
        print(f"{task.name}: done in {time.monotonic() - since:.0f} s", flush=True)
        end(task, Run(path))


def train(path: Path, config: Config, until: int | None = None) -> None:
    """Begin the run of a folder, or go on with the one that is there."""
    if _has_run(path):
        here = {"train__device": config.train.device, "data__root": config.data.root}
        config = replace(Run(path).config, **here)
    data = splits(config.data)
    # A run is stopped early to be compared with others, and without labels nothing compares.
    if until is not None and data.train.labels is None and config.probe.data is None:
        raise UserError(
            f"data must have labels for a search that stops runs early, got none in {config.data.source!r}; give a "
            "small labelled set with --set probe.data=NAME"
        )
    api.pretrain(config, data, path, resume=_has_run(path), quiet=True, until=until, figures=False)
    # A compiled step refers to itself: its model and graphs wait for the collector, and so does the memory they hold.
    gc.collect()
    torch.cuda.empty_cache()


def find_run(job: Job, library: Library, accept: Accept = anything, loosely: bool = False) -> Run | None:
    """The first finished run of a job that is accepted."""
    return next((run for run in library.find(job.config, loosely) if finished(run) and accept(run)), None)


@functools.lru_cache(maxsize=1)
def splits(data: DataConfig) -> Splits:
    """The images that settings name; the last set stays at hand, since neighbouring jobs share it."""
    return load(data)


def check_data(jobs: Sequence[Job], library: Library, loosely: bool = False) -> None:
    """Refuse now what would fail hours later: data that a run is missing for, and that are not there."""
    missing = [job for job in jobs if find_run(job, library, loosely=loosely) is None]
    for data in dict.fromkeys(job.config.data for job in missing):
        if tinyimagenet_folder(data) is None:  # a hundred thousand files: that they are there is enough
            read_chunks(data, size=1)


def _begun(job: Job, folder: Path, library: Library) -> list[Run]:
    return [run for run in library.find(job.config) if not finished(run) and run.path.parent == folder]


def _far_enough(task: Task, folder: Path, library: Library) -> Run | None:
    """A run that was scored at the epoch a task ends with, or later."""
    if task.until is None:
        return None
    begun = _begun(task.job, folder, library)
    return next((run for run in begun if run.results.get("pretrain", {}).get("epoch", 0) >= task.until), None)


def _place(job: Job, folder: Path, library: Library, taken: Container[Path]) -> Path:
    """The folder of a run that was begun, unless another task has it right now, or a new one."""
    there = [run.path for run in _begun(job, folder, library) if run.path not in taken]
    return there[0] if there else folder / job.folder


def _has_run(path: Path) -> bool:
    return (path / "config.json").exists()
