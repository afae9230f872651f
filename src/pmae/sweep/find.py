"""Runs found by their settings, whatever their folders are called, and what they have been scored by."""

import dataclasses
import functools
import hashlib
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pmae import api
from pmae.config import Config, DataConfig, replace
from pmae.config_file import FREE, flat
from pmae.data.images import Splits, fingerprint
from pmae.data.sets import load, with_held_out
from pmae.derive import resolve
from pmae.errors import UserError, require, require_known
from pmae.evaluate.protocols import MOST_IMAGES, PROBED, Protocols, only, preset
from pmae.models.described import adopted
from pmae.results import PROTOCOLS, Score
from pmae.runs import Run, learned_on
from pmae.standing import primary, scores_of

MACHINE = FREE | {"data.keep_on", "train.engine", "train.deterministic"}
MACHINE |= {"probe.every", "probe.data"}
MACHINE -= {"train.bf16_gradients"}
"""Settings that say where and how a run is made or monitored, not what it learns, which rounded gradients touch."""
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
    counts = run.environment["data"]["counts"]
    there = counts.get("val") or round(PROBED * counts["train"])
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

    def require_of(self, run: Run, data: DataConfig) -> None:
        """A run that is reused; older ones have no fingerprint."""
        self._require(data, run.environment["data"].get("fingerprint"), str(run.path))

    def require_now(self, data: DataConfig) -> None:
        """The images as they are, beside runs that are reused; where they are not here it cannot be told."""
        if data in self._known:
            self._require(data, _fingerprint(data), data.source)

    def _require(self, data: DataConfig, found: str | None, place: str) -> None:
        known, where = self._known.setdefault(data, (found, place)) if found else (None, "")
        if known not in (None, found):
            told = f"data must be the images of the runs that are reused, got others in {place!r} than in {where!r}"
            raise UserError(f"{told}; begin anew in another --out, or leave a folder of runs out of --runs")


@dataclass(frozen=True)
class Scoring:
    """How runs are scored, where they are looked for and made, and whether any may be made."""

    out: Path = Path("runs/paper")  # folder of tables and figures; runs are made in `runs` below it
    folders: tuple[Path, ...] = ()  # more folders of runs to look in
    presets: tuple[str, ...] = ("paper",)
    protocols: tuple[str, ...] = ()  # to keep of a table's own; all if empty
    head_epochs: int | None = None  # epochs of probes and fine-tuning; the preset's own if not given
    only_found: bool = False  # take the runs and results that are there, and run nothing
    pooling: str = "cls"  # which representation's accuracies to show: the paper's, or the mean of the patch tokens

    def __post_init__(self) -> None:
        require_known("pooling", [self.pooling], ("cls", "mean"))
        require(len(set(self.presets)) == len(self.presets) > 0, "preset", "one or more, no two alike", self.presets)
        for name in self.presets:
            preset(name)
        require_known("protocols", self.protocols, PROTOCOLS)
        require(self.head_epochs is None or self.head_epochs > 0, "--head-epochs", "at least 1", self.head_epochs)
        for folder in self.folders:
            holds = folder.is_dir() and not (folder / "config.json").exists()
            require(holds, "--runs", "folders that hold run folders", str(folder))

    @property
    def index(self) -> RunIndex:
        return RunIndex([self.out / "runs", *self.folders])

    def chosen(self, protocols: Sequence[str], with_plain: bool = False) -> tuple[Protocols, ...]:
        """Some protocols under each preset; with probes also trained without augmentation if asked.

        k-NN is the same in all presets: the first one has it.
        """
        wanted = {name: [p for p in protocols if p != "knn" or name == self.presets[0]] for name in self.presets}
        if with_plain:
            wanted.setdefault("plain", [p for p in protocols if p in ("linear", "mlp")])
        return tuple(only(shortened(preset(name), self.head_epochs), some) for name, some in wanted.items() if some)


def shortened(protocols: Protocols, epochs: int | None) -> Protocols:
    """The same protocols with heads trained for fewer epochs, under a name that says so."""
    if epochs is None:
        return protocols
    shorter = {
        name: dataclasses.replace(head, epochs=epochs, warmup_epochs=head.warmup_epochs * epochs / head.epochs)
        for name in ("probe", "finetune")
        if (head := getattr(protocols, name))
    }
    return dataclasses.replace(protocols, name=f"{protocols.name}, {epochs} epoch{'s' * (epochs > 1)}", **shorter)


@dataclass(frozen=True)
class Requirements:
    """Protocols to be scored on the test split, at the last checkpoint or at every one; nothing if there are none."""

    protocols: tuple[Protocols, ...] = ()
    every_epoch: bool = False
    pooling: str = "cls"  # of what is scored, what is shown
    device: str = "auto"
    root: str = "data"  # folder of the data on this machine
    pictures: bool = False  # whether the sample pictures of a run are needed

    def missing(self, run: Run) -> dict[Protocols, list[int]]:
        """For each set of protocols the epochs at which one of them is missing."""
        whole = [p.name.removeprefix("epoch_") for p in run.checkpoints()] if self.every_epoch else []
        epochs = sorted({run.config.train.epochs or 0, *(int(name) for name in whole if name.isdigit())})
        found = {each: [epoch for epoch in epochs if unscored(run, each, [epoch])] for each in self.protocols}
        return {protocols: epochs for protocols, epochs in found.items() if epochs}

    def can_be_met(self, run: Run) -> bool:
        """Whether a run has the pictures and the numbers, or the checkpoints to get those."""
        return (has_pictures(run) or not self.pictures) and (bool(run.checkpoints()) or not self.missing(run))

    def evaluate(self, run: Run) -> None:
        """Evaluate what is missing into the run's results.json."""
        data, seeds = replace(run.config, data__root=self.root).data, (run.config.train.seed,)
        for protocols, epochs in self.missing(run).items():
            lacking = unscored(run, protocols, epochs)
            print(f"  {run.path.name}: {', '.join(lacking)} [{protocols.name}]", flush=True)
            api.evaluate(
                run.path, only(protocols, lacking), splits(data), epochs, False, seeds, self.device, figures=False
            )


def unscored(run: Run, protocols: Protocols, epochs: Sequence[int]) -> list[str]:
    """The protocols of a set that a run has not been scored by at one of these epochs."""
    scored = {kind: {score.epoch for score in own_scores(run, kind, protocols.name)} for kind in protocols.kinds}
    return [kind for kind, known in scored.items() if not known.issuperset(epochs)]


def own_scores(run: Run, protocol: str, preset: str, split: str = "test", pooling: str = "cls") -> list[Score]:
    """The scores of a run's encoder on its own data, one an epoch; of another pooling where it has not this one."""
    file = run.path / "results.json"
    found = _own_scores(run.path, pooling, file.stat().st_mtime_ns) if file.exists() else []
    return [s for s in found if (s.protocol, s.preset, s.split) == (protocol, preset, split)]


@functools.lru_cache(maxsize=1000)
def _own_scores(path: Path, pooling: str, changed: int) -> list[Score]:
    """Read again when results.json has changed: a table asks for every cell by itself."""
    run = Run(path)
    name = run.environment["data"]["name"]
    return primary([s for s in scores_of(run.evaluations) if not s.is_baseline and s.data == name], pooling)
