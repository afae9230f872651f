"""What runs have been scored by, and what is still to be: protocols, epochs and presets against results.json."""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pmae import api
from pmae.config import replace
from pmae.errors import UserError, require, require_known
from pmae.evaluate.protocols import Protocols, only, preset
from pmae.results import PROTOCOLS, Score
from pmae.runs import Run
from pmae.standing import primary, scores_of
from pmae.sweep.find import RunIndex, has_pictures, splits
from pmae.train.checkpoint import require_whole


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
        """Whether a run has the pictures and the numbers, or whole checkpoints to get those."""
        lacking = {epoch for epochs in self.missing(run).values() for epoch in epochs}
        return (has_pictures(run) or not self.pictures) and all(_holds_encoder(run, epoch) for epoch in lacking)

    def evaluate(self, run: Run) -> None:
        """Evaluate what is missing into the run's results.json."""
        data, seeds = replace(run.config, data__root=self.root).data, (run.config.train.seed,)
        for protocols, epochs in self.missing(run).items():
            lacking = unscored(run, protocols, epochs)
            print(f"  {run.path.name}: {', '.join(lacking)} [{protocols.name}]", flush=True)
            given = (run.path, only(protocols, lacking), splits(data), epochs, False, seeds, self.device)
            api.evaluate(*given, figures=False)


def _holds_encoder(run: Run, epoch: int) -> bool:
    """Whether a run has the encoder of an epoch as it was written."""
    try:
        return require_whole(run.checkpoint(epoch), "encoder.safetensors").is_file()
    except UserError:
        return False


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
