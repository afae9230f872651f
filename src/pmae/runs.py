"""The run folder: the one thing that reports, resumption, evaluation and export read.

config.json        resolved settings          metrics.jsonl   one line per logging interval
answers.safetensors  true and predicted class of every scored image, by score
environment.json   versions, device, commit   results.json    what evaluation found, merged section by section
fitted.safetensors standardization and space  samples.safetensors  a few pictures and the spectrum
checkpoints/epoch_0010/  encoder, decoder, optimizer, a space that learns (safetensors); state.json with their checksums
first/             the run with larger patches that came before, if there was one

Its files may be old, edited or damaged: they are checked when they are read.
"""

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

from pmae.config import Config
from pmae.config_file import from_dict, of_older_versions, to_dict
from pmae.errors import UserError, require
from pmae.files import disk_errors, lock, read_json, read_object, read_tensors, write_json, write_tensors
from pmae.remote import Mirror, is_remote
from pmae.results import Evaluation, Segmentation, read_evaluations
from pmae.validation import Count, NonNegative, Rule, WholeNumber, coerced

DTYPES = {"bool", "float16", "float32", "float64", *(f"{u}int{bits}" for u in ("", "u") for bits in (8, 16, 32, 64))}
CLASSIFIER = "classifier.json"
"""What tells the folder of a classifier, as config.json does that of a run."""
FIRST = "first"
"""The folder of a run's first stage, a run of its own (`pmae.train.stages`)."""
PARTS = {"top": (0.0, 0.8), "middle": (0.8, 0.95), "bottom": (0.95, 1.0)}
"""The shares of cumulated variance between which samples.safetensors cuts the spectrum."""
SHAPE = Rule("channels, height and width of an image", lambda shape: len(shape) == 3 and math.prod(shape) <= 2**28)


class DataRecord(TypedDict):
    """The images of a run."""

    name: str
    shape: Annotated[list[Count], SHAPE]
    dtype: Annotated[str, Rule(f"one of {', '.join(sorted(DTYPES))}", lambda name: name in DTYPES)]
    counts: Annotated[dict[str, Count], Rule("counts of the splits, train among them", lambda c: "train" in c)]
    classes: NotRequired[list[str]]
    unlabelled: NotRequired[list[str]]
    """Splits without labels, as val is where it was held out by rule."""
    notes: NotRequired[list[str]]


class Environment(TypedDict):
    """environment.json: where a run was made, and of what."""

    data: DataRecord
    device: NotRequired[str]
    python: NotRequired[str]
    system: NotRequired[str]
    packages: NotRequired[dict[str, str]]
    commit: NotRequired[str]
    start: NotRequired[list[str]]
    """What was done to make given weights fit."""
    weights: NotRequired[str]
    """Given weights that the run holds as they are: nothing was trained."""
    fit_seconds: NotRequired[NonNegative]


class CheckpointState(TypedDict):
    """state.json of a checkpoint."""

    step: WholeNumber
    epoch: int | float
    files: NotRequired[dict[str, WholeNumber]]
    blake2b: NotRequired[dict[str, str]]
    seal: NotRequired[str]


class Results(TypedDict):
    """results.json: the end of pretraining, and evaluations, which `results` reads."""

    pretrain: NotRequired[dict[str, int | float | None]]
    held_out: NotRequired[list[str]]
    adaptation: NotRequired[dict[str, dict[str, float]]]
    """Accuracy of the probes before and after given weights were trained on."""
    labelled: NotRequired[dict[str, Any]]
    """Where the labelled images of the last evaluation were, if they were not the run's own."""
    segmentation: NotRequired[dict[str, Any]]
    """Of the last folder of masks: its classes, and the scores of each representation."""
    evaluations: NotRequired[list[Any]]
    evaluation: NotRequired[dict[str, Any]]
    """As older versions wrote them."""


class Run:
    """A run folder that exists; whatever takes a run takes its path too."""

    def __init__(self, path: "Path | str | Run") -> None:
        if not isinstance(path, Run) and is_remote(path):
            mirror = Mirror(str(path))
            mirror.pull()
            path = mirror.folder
        self.path: Path = path.path if isinstance(path, Run) else Path(path).expanduser()
        if not (self.path / "config.json").is_file():
            raise UserError(f"run must be a folder that pretraining wrote (with a config.json), got {str(self.path)!r}")

    @property
    def config(self) -> Config:
        """The settings the run was made with."""
        return read_config(self.path / "config.json")

    @property
    def method(self) -> str:
        """pmae or mae, or weights, which were not trained here."""
        return "weights" if "weights" in self.environment else self.config.method

    @property
    def environment(self) -> dict[str, Any]:
        """Versions, device, commit and data of the run, as `Environment` says; an old one may not say its device."""
        return {"device": "unknown", **_read(self.path / "environment.json", Environment)}

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of the images that were trained on."""
        channels, height, width = self.environment["data"]["shape"]
        return channels, height, width

    @property
    def results(self) -> dict[str, Any]:
        """What has been evaluated so far, as `Results` says; empty if nothing was."""
        path = self.path / "results.json"
        return _read(path, Results) if path.exists() else {}

    @property
    def evaluations(self) -> list[Evaluation]:
        """Every evaluation in results.json, oldest first."""
        return read_evaluations(self.results, self.path / "results.json")

    @property
    def segmentation(self) -> Segmentation | None:
        """What the last segmentation probe found, if there was one."""
        found = self.results.get("segmentation")
        return None if found is None else coerced(found, Segmentation, f"{self.path / 'results.json'}: segmentation")

    def add_results(self, **sections: Any) -> None:
        """Merge sections into results.json, one process at a time."""
        path = self.path / "results.json"
        with lock(path):
            write_json(path, {**self.results, **sections})

    def add_evaluation(self, evaluation: Evaluation) -> None:
        """Add one to results.json, and its answers to answers.safetensors; what earlier ones recorded stays there."""
        import torch

        path, kept = self.path / "results.json", self.path / "answers.safetensors"
        answers = {one.key: torch.from_numpy(one.answers) for one in evaluation.scores if one.answers is not None}
        groups = {one.groups_key: one.groups for one in evaluation.scores}
        with lock(path):
            known = self.results
            if answers:
                with contextlib.suppress(UserError):  # a damaged file is written anew
                    answers = (read_tensors(kept) if kept.exists() else {}) | answers
                # What has no groups now may have had some before.
                known_groups = {key: torch.tensor(own) for key, own in groups.items() if own is not None}
                rest = {key: found for key, found in answers.items() if key not in groups}
                write_tensors(kept, rest | known_groups)
            write_json(path, {**known, "evaluations": [*known.get("evaluations", []), evaluation.to_json()]})

    def metrics(self) -> list[dict[str, Any]]:
        path = self.path / "metrics.jsonl"
        return [line for _, line in whole_lines(path)] if path.exists() else []

    def checkpoints(self) -> list[Path]:
        """Whole checkpoint folders, oldest first; one whose state is damaged is passed over."""
        found = []
        for state in (self.path / "checkpoints").glob("epoch_*/state.json"):
            with contextlib.suppress(UserError):
                found.append((read_state(state.parent)["step"], state.parent))
        return [folder for _, folder in sorted(found)]

    def checkpoint(self, epoch: int | None = None) -> Path:
        """The last checkpoint, or the one of this epoch."""
        found = [path for path in self.checkpoints() if epoch is None or path.name == f"epoch_{epoch:04d}"]
        if not found:
            which = "" if epoch is None else f" of epoch {epoch}"
            early = (self.path / FIRST).is_dir() and not self.checkpoints()
            why = "; its first stage has yet to end" if early else ""
            raise UserError(f"run {str(self.path)!r} must hold a checkpoint{which}{why}")
        return found[-1]


def is_run(path: Path | str) -> bool:
    """Whether a folder here is one that pretraining wrote: beside weights, config.json is another library's."""
    place = Path(path).expanduser()
    return (place / "environment.json").is_file() or (place / "checkpoints").is_dir()


def learned_on(weights: str | None, fingerprint: str | None) -> bool:
    """Whether weights are those of a run on the images with this fingerprint."""
    if weights is None or fingerprint is None or not is_run(weights):
        return False
    with contextlib.suppress(UserError):  # of a damaged run whoever loads its weights says so
        return bool(Run(weights).environment["data"].get("fingerprint") == fingerprint)
    return False


def is_classifier(path: Path | str) -> bool:
    """Whether a folder is one that `pmae finetune` wrote, not a run."""
    return (Path(path).expanduser() / CLASSIFIER).is_file()


def require_vacant(path: Path) -> None:
    """Refuse a folder that holds a run, and a file in its place."""
    if (path / "config.json").exists():
        instead = "resume the run, or name another folder"
        raise UserError(f"out must be a folder without a run, got {str(path)!r}; {instead}")
    if path.exists() and not path.is_dir():
        raise UserError(f"out must be a folder, got the file {str(path)!r}")


def create_run(path: Path | str, config: Config, environment: dict[str, Any]) -> Run:
    """Start a run in a folder that holds none yet."""
    path = Path(path)
    require_vacant(path)
    with disk_errors(path):
        path.mkdir(parents=True, exist_ok=True)
        write_json(path / "environment.json", environment)
        write_json(path / "config.json", to_dict(config))
    return Run(path)


def discard(run: Run) -> None:
    """Take back a run that was refused before its first step; anything else in its folder stays."""
    for name in ("fitted.safetensors", "environment.json", "config.json"):
        (run.path / name).unlink(missing_ok=True)
    if not any(run.path.iterdir()):
        run.path.rmdir()


def read_config(path: Path) -> Config:
    """The settings in a file, of this version or an older one."""
    return from_dict(of_older_versions(read_json(path)))


def read_state(checkpoint: Path) -> dict[str, Any]:
    return _read(checkpoint / "state.json", CheckpointState)


def _read(path: Path, kind: Any) -> dict[str, Any]:
    return coerced(read_object(path), kind, str(path))


def whole_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The lines of a metrics.jsonl, as text and as what they say; a last one without its end is not whole."""
    try:
        lines = path.read_bytes().decode("utf-8").split("\n")[:-1]
        said = [json.loads(line) for line in lines]
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"file must hold a JSON object a line, got {str(path)!r}: {error}") from error
    for number, value in enumerate(said, 1):
        where = f"{path}, line {number}"
        require(isinstance(value, dict), where, "a JSON object", value)
        for key, measured in value.items():
            if type(measured) is not float or key == "step":  # most are, and any will do: a run may diverge
                coerced(measured, WholeNumber if key == "step" else int | float | None, f"{where}: {key}")
        require("step" in value, where, "a JSON object with a step", sorted(value))
    return zip(lines, said, strict=True)
