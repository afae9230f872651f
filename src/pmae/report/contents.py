"""What a run folder holds, read once; a part that is missing or broken is named and left out, and stops nothing."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file

from pmae.config import Config
from pmae.errors import UserError
from pmae.results import Evaluation, Score, Segmentation
from pmae.runs import FIRST, Run, is_run
from pmae.standing import scores_of, standing

T = TypeVar("T")
BROKEN = (UserError, ValueError, LookupError, ArithmeticError, TypeError, AttributeError, OSError, SafetensorError)
"""What a file with unexpected content can raise while it is read."""
COMPONENTS = 24  # of the space, to be drawn


@dataclass(frozen=True, eq=False)
class Contents:
    """One run as the report sees it."""

    name: str
    path: Path
    config: Config
    environment: dict[str, Any]
    metrics: list[dict[str, Any]]
    evaluations: list[Evaluation]
    scores: list[Score]
    samples: dict[str, np.ndarray]
    fitted: dict[str, np.ndarray]
    features: dict[str, np.ndarray]
    segmentation: Segmentation | None = None
    labelled: dict[str, Any] = field(default_factory=dict)
    """Source, labels and columns of the labelled images of the last evaluation, if they were not the run's own."""
    held_out: list[str] = field(default_factory=list)
    """Images that were held out by rule as val, without labels, where the data had no such part."""
    operations: float | None = None
    """Floating-point, of pretraining up to its last look; None where they are not counted."""
    first: "Contents | None" = None
    """The run with larger patches that came before, if there was one."""
    problems: list[str] = field(default_factory=list)

    @property
    def stages(self) -> "list[Contents]":
        """The runs that its training consists of."""
        return [self] if self.first is None else [self.first, self]

    @property
    def data(self) -> dict[str, Any]:
        """Name, shape, counts, classes and notes of the data it was trained on."""
        return dict(self.environment.get("data", {}))

    @property
    def has_labels(self) -> bool:
        """Whether its own training images have labels, as far as the run tells."""
        return bool(self.data.get("classes")) or "train" not in self.data.get("unlabelled", ["train"])

    @property
    def given(self) -> bool:
        """Whether these are weights that were scored as they are: nothing was trained."""
        return "weights" in self.environment

    @property
    def start(self) -> list[str]:
        """What was done to weights that were scored as they are."""
        return list(self.environment.get("start", [])) if self.given else []

    @property
    def method(self) -> str:
        return "weights" if self.given else self.config.method.upper()

    @property
    def units(self) -> str:
        """What a mask of components hides as one, in words."""
        return "groups" if self.config.space.grouped else "components"

    @property
    def r2_name(self) -> str:
        """The key of R2 in the signals: of held-out images, or of training images where none were held out."""
        return "train_r2" if any("train_r2" in line for line in self.metrics) else "held_out_r2"

    @property
    def measured_on(self) -> str:
        return "training images" if self.r2_name == "train_r2" else "held-out images"

    @property
    def training(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl that training steps wrote."""
        return [line for line in self.metrics if "loss" in line]

    @property
    def signals(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl that measurements between epochs wrote."""
        return [line for line in self.metrics if "loss" not in line]

    @property
    def epoch(self) -> float:
        return float(self.training[-1]["epoch"]) if self.training else 0.0

    @property
    def finished(self) -> bool:
        return self.given or (bool(self.training) and self.epoch >= (self.config.train.epochs or 0))


def load(path: Path | str, name: str | None = None, whole: bool = True) -> Contents:
    """Read a run folder, without its tensors if not `whole`; only a folder that is no run at all is an error."""
    run, problems = Run(path), []

    def attempt(what: str, read: Callable[[], T], otherwise: T) -> T:
        try:
            return read()
        except BROKEN as error:
            problems.append(f"{what} could not be read and is left out: {error}")
            return otherwise

    def tensors(kind: str) -> dict[str, np.ndarray]:
        file = run.path / f"{kind}.safetensors"
        return attempt(file.name, lambda: dict(load_file(file)) if whole and file.is_file() else {}, {})

    answers, empty = tensors("answers"), dict[str, Any]()
    results = attempt("results.json", lambda: run.results, empty)
    nothing: tuple[list[Evaluation], Segmentation | None] = ([], None)
    evaluations, segmentation = attempt("results.json", lambda: (standing(run.evaluations), run.segmentation), nothing)
    read = Contents(
        name or run.path.resolve().name,
        run.path,
        run.config,
        environment=attempt("environment.json", lambda: run.environment, {}),
        metrics=attempt("metrics.jsonl", lambda: _metrics(run), []),
        evaluations=evaluations,
        scores=[score.with_kept(answers) for score in scores_of(evaluations)],
        samples=tensors("samples"),
        fitted=attempt("fitted.safetensors", lambda: _fitted(run.path / "fitted.safetensors") if whole else {}, {}),
        features=tensors("features"),
        segmentation=segmentation,
        labelled=results.get("labelled", {}),
        held_out=results.get("held_out", []),
        operations=results.get("pretrain", {}).get("operations"),
        first=attempt(FIRST, lambda: load(run.path / FIRST, whole=False) if is_run(run.path / FIRST) else None, None),
        problems=problems,
    )
    if not read.given:
        problems += _lacking(read, attempt("checkpoints", run.checkpoints, []))
    return read


def _lacking(run: Contents, checkpoints: Sequence[Path]) -> Iterator[str]:
    """What a run that was trained here does not have, or not yet."""
    if run.first and not run.training:
        yield f"training stopped in its first stage, at epoch {run.first.epoch:.4g} of {run.first.config.train.epochs}"
    elif not run.training:
        yield "no training step was logged: the run has not begun, or was stopped at once"
    elif not run.finished:
        yield f"training stopped at epoch {run.epoch:.4g} of {run.config.train.epochs}"
    if not checkpoints:
        yield "there is no checkpoint in the run folder: nothing more can be evaluated"
    if not run.samples:
        yield "there are no sample pictures (training writes them when it ends): no reconstructions, masks or spectrum"


def load_all(paths: Sequence[Path | str]) -> tuple[list[Contents], list[str]]:
    """Every run that can be read, under names that differ, and one sentence for each path that cannot."""
    runs, refused = [], []
    for path, name in zip(paths, distinct_names(paths), strict=True):
        try:
            runs.append(load(path, name))
        except UserError as error:
            refused.append(str(error))
    return runs, refused


def distinct_names(paths: Sequence[Path | str]) -> list[str]:
    """Folder names, with as many parents as it takes to tell them apart."""
    parts = [Path(path).resolve().parts for path in paths]
    for depth in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    # The same folder was given twice.
    return [f"{part[-1]} ({position})" for position, part in enumerate(parts, 1)]


def file_names(names: Sequence[str]) -> list[str]:
    """Names that every file system, and an id in a page, can carry; those that come out alike are numbered."""
    plain = [re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower() or "run" for name in names]
    return [name if plain.count(name) == 1 else f"{name}-{number}" for number, name in enumerate(plain, 1)]


def _fitted(file: Path) -> dict[str, np.ndarray]:
    """Standardization and the first principal components: all of them may be gigabytes."""
    if not file.is_file():
        return {}
    with safe_open(file, framework="numpy") as opened:
        names = [name for name in opened.keys() if name.startswith("standardize.")]  # noqa: SIM118 - it is no mapping
        found = {name: opened.get_tensor(name) for name in names}
        if "space.components" in opened.keys():  # noqa: SIM118
            found["space.components"] = opened.get_slice("space.components")[:COMPONENTS]
    return found


def _metrics(run: Run) -> list[dict[str, Any]]:
    lines = run.metrics()
    for line in lines:
        needed = {"epoch", "step"} | ({"images_per_second"} if "loss" in line else set())
        if missing := needed - {key for key, value in line.items() if value is not None}:
            raise UserError(f"a line has no {', '.join(sorted(missing))}")
    return lines
