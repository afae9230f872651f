"""Runs with the scores that a table needs: which of them results.json has, and training and evaluating the rest."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pmae import api
from pmae.config import replace
from pmae.errors import require, unknown_name
from pmae.evaluate.protocols import Protocols, only, preset
from pmae.results import PROTOCOLS, Score, primary, scores_of
from pmae.runs import Run
from pmae.sweep.execute import InOrder, run_all
from pmae.sweep.find import RunIndex, RunSpec
from pmae.sweep.workers import Workers, splits

SHOWN = ("cls", "mean")
"""Poolings whose accuracies a table may show."""
AUGMENTED = ("linear", "mlp")
"""The protocols that augmentation makes a difference to."""


@dataclass(frozen=True)
class Scoring:
    """How runs are scored, where they are looked for and made, and whether any may be made."""

    out: Path = Path("runs/paper")
    """Folder of tables and figures; runs are made in `runs` below it."""
    folders: tuple[Path, ...] = ()
    """More folders of runs to look in."""
    presets: tuple[str, ...] = ("paper",)
    protocols: tuple[str, ...] = ()
    """Protocols to keep of a table's own; all if empty."""
    head_epochs: int | None = None
    """Epochs of probes and fine-tuning; the preset's own if not given."""
    only_found: bool = False
    """Take the runs and results that are there, and run nothing."""
    pooling: str = "cls"
    """Which representation's accuracies to show: the paper's, or the mean of the patch tokens."""

    def __post_init__(self) -> None:
        if self.pooling not in SHOWN:
            raise unknown_name("pooling", self.pooling, SHOWN)
        require(len(set(self.presets)) == len(self.presets) > 0, "preset", "one or more, no two alike", self.presets)
        for name in self.presets:
            preset(name)
        for name in self.protocols:
            if name not in PROTOCOLS:
                raise unknown_name("protocols", name, PROTOCOLS)
        require(self.head_epochs is None or self.head_epochs > 0, "--head-epochs", "at least 1", self.head_epochs)
        for folder in self.folders:
            holds = folder.is_dir() and not (folder / "config.json").exists()
            require(holds, "--runs", "folders that hold run folders", str(folder))

    @property
    def index(self) -> RunIndex:
        """The runs that it looks in."""
        return RunIndex([self.out / "runs", *self.folders])

    def chosen(self, protocols: Sequence[str], with_plain: bool = False) -> tuple[Protocols, ...]:
        """Some protocols under each preset; with probes also trained without augmentation if asked.

        k-NN is the same in all presets: the first one has it.
        """
        wanted = {name: [p for p in protocols if p != "knn" or name == self.presets[0]] for name in self.presets}
        if with_plain:
            wanted.setdefault("plain", [p for p in protocols if p in AUGMENTED])
        return tuple(only(shortened(preset(name), self.head_epochs), some) for name, some in wanted.items() if some)


def shortened(protocols: Protocols, epochs: int | None) -> Protocols:
    """The same protocols with heads trained for fewer epochs, under a name that says so."""
    if epochs is None:
        return protocols
    heads = {name: head for name in ("probe", "finetune") if (head := getattr(protocols, name))}
    shorter = {
        name: dataclasses.replace(head, epochs=epochs, warmup_epochs=head.warmup_epochs * epochs / head.epochs)
        for name, head in heads.items()
    }
    return dataclasses.replace(protocols, name=f"{protocols.name}, {epochs} epoch{'s' * (epochs > 1)}", **shorter)


@dataclass(frozen=True)
class Requirements:
    """Protocols to be scored on the test split, at the last checkpoint or at every one."""

    protocols: tuple[Protocols, ...]
    every_epoch: bool = False
    pooling: str = "cls"
    """Of what is scored, what is shown."""
    device: str = "auto"
    root: str = "data"
    """Folder of the data on this machine."""
    pictures: bool = False
    """Whether the sample pictures of a run are needed, which published results leave out."""

    def missing(self, run: Run) -> dict[Protocols, list[int]]:
        """For each set of protocols the epochs at which one of them is missing."""
        found = {each: [e for e in self._epochs(run) if unscored(run, each, [e])] for each in self.protocols}
        return {protocols: epochs for protocols, epochs in found.items() if epochs}

    def can_be_met(self, run: Run) -> bool:
        """Whether a run has the pictures and the numbers, or the checkpoints to get those."""
        return self.has_pictures(run) and (bool(run.checkpoints()) or not self.missing(run))

    def has_pictures(self, run: Run) -> bool:
        """Whether the pictures that are needed are there."""
        return not self.pictures or (run.path / "samples.safetensors").is_file()

    def evaluate(self, run: Run) -> None:
        """Evaluate what is missing into the run's results.json."""
        data, seeds = replace(run.config, data__root=self.root).data, (run.config.train.seed,)
        for protocols, epochs in self.missing(run).items():
            lacking = unscored(run, protocols, epochs)
            print(f"  {run.path.name}: {', '.join(lacking)} [{protocols.name}]", flush=True)
            api.evaluate(
                run.path, only(protocols, lacking), splits(data), epochs, False, seeds, self.device, figures=False
            )

    def _epochs(self, run: Run) -> list[int]:
        last = run.config.train.epochs or 0
        whole = [p.name.removeprefix("epoch_") for p in run.checkpoints()] if self.every_epoch else []
        return sorted({last, *(int(name) for name in whole if name.isdigit())})


def unscored(run: Run, protocols: Protocols, epochs: Sequence[int]) -> list[str]:
    """The protocols of a set that a run has not been scored by at one of these epochs."""
    found = {kind: own_scores(run, kind, protocols.name) for kind in protocols.kinds}
    scored = {kind: {score.epoch for score in scores} for kind, scores in found.items()}
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


GetRuns = Callable[[Sequence[RunSpec], Requirements | None], list[Run | None]]
"""A way to get runs, scored as required; without requirements any finished run will do."""


def get_runs(scoring: Scoring, any_length: bool = False, workers: Workers | None = None) -> GetRuns:
    """A way to get runs: those that are found, with None for the others if no run may be made.

    Runs that are missing are pretrained and evaluated, each before the next one begins; workers are not kept waiting
    for evaluations, which are done here when all runs have ended.
    """
    index = scoring.index

    def get(specs: Sequence[RunSpec], needed: Requirements | None) -> list[Run | None]:
        if scoring.only_found:
            return [index.first(spec.config, any_length=any_length) for spec in specs]
        accept, evaluate = (needed.can_be_met, needed.evaluate) if needed else (lambda run: True, lambda run: None)
        scheduler = InOrder(specs) if workers else InOrder(specs, evaluate)
        runs = run_all(scheduler, scoring.out / "runs", index, workers or Workers(), accept, any_length)
        for run in runs.values() if workers else ():
            evaluate(run)
        return [runs[spec.config] for spec in specs]

    return get
