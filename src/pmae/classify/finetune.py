"""`pmae finetune`: from a run or weights and labelled images to a folder that `pmae predict` takes."""

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pmae.classify import FinetuneConfig
from pmae.classify.fit import Say, fit
from pmae.classify.labels import LabelledData, per_class, read_labelled, with_test, with_validation
from pmae.classify.lora import require_peft
from pmae.classify.model import ImageClassifier
from pmae.classify.score import score
from pmae.classify.table import USUAL, Columns
from pmae.config import DataConfig
from pmae.data.streamed import untold
from pmae.embed import require_pooling
from pmae.errors import UserError, require
from pmae.evaluate.duplicates import duplicates, require_apart
from pmae.files import disk_errors, folder_path, read_object, write_json
from pmae.runs import Run, is_classifier
from pmae.train.environment import pick_device
from pmae.train.start import load_start, reading_for

SETTINGS, STATE = "finetune.json", "finetune.safetensors"
"""What is there while training goes on, to be resumed; the second goes when it is done."""


def finetune(
    start: Run | Path | str,
    data: DataConfig | Path | str,
    out: Path | str,
    config: FinetuneConfig | None = None,
    labels: Path | str | None = None,
    encoder: str | None = None,
    device: str = "auto",
    resume: bool = False,
    say: Say = lambda message: None,
    columns: Mapping[str, str] | None = None,
) -> ImageClassifier:
    """Train a classifier on labelled images and keep it in the folder `out`, with its results.json.

    `start` is a run, or weights of timm or Hugging Face, whose network `encoder` names where no config.json does;
    `data` a folder with a subfolder a class, a table (`file,label`), an .npz file, shards or a named set; `labels` a
    table of files below `data`. Its columns are file, label and maybe split, or what `columns` calls them; it may name
    one of groups too, whose images are held out together: {"label": "diagnosis", "group": "patient"}.
    """
    path, config = folder_path(out), config or FinetuneConfig()
    _require_folder(path, resume)
    processes = int(os.environ.get("WORLD_SIZE", 1))
    require(processes == 1, "processes", "one, which trains a classifier; run it without torchrun", processes)
    pick_device(device)
    if config.method == "lora":
        require_peft()
    given = data if isinstance(data, DataConfig) else reading_for(start, str(data), encoder)
    reading, found = read_labelled(given, labels, called := Columns.named(columns or {}))
    held_out = {name: part.images for name, part in found.parts.items() if name != "train"}
    copies = duplicates(found.train.images, held_out, pick_device("cpu"))
    require_apart(copies, held_out)
    labelled = with_test(found, config.test, config.seed)
    labelled = with_validation(labelled, config.validation, config.seed)
    begin = load_start(start, labelled.train.images, encoder)
    require_pooling(config.pooling, begin.encoder)
    shared = [note for split, own in copies.items() for note in own.in_words(split)]
    notes = [*labelled.notes, *begin.notes, *shared]
    counts = ", ".join(f"{len(part.targets):,} {name}" for name, part in labelled.parts.items())
    kind = "labels, several an image" if labelled.multi_label else "classes"
    for note in (f"{labelled.name}: {counts} images, {len(labelled.classes)} {kind}", *untold(notes)):
        say(note)
    _begin(path, config, resume)
    classifier, history = fit(begin, labelled, config, device, path, reading, say)
    _keep(path, classifier, history, labelled, notes=notes, **where_from(reading, labels, called))
    return classifier


def _require_folder(path: Path, resume: bool) -> None:
    if is_classifier(path):
        raise UserError(f"out must be a folder without a classifier, got {str(path)!r}, which has one; name another")
    if resume and not (path / SETTINGS).is_file():
        raise UserError(f"out must be a folder with unfinished fine-tuning to be resumed, got {str(path)!r}")
    if not resume and path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"out must be a new or an empty folder, got {str(path)!r}; resume it, or name another")


def _begin(path: Path, config: FinetuneConfig, resume: bool) -> None:
    """Write the settings down, or refuse others than those that were."""
    given = asdict(config)
    if resume:
        for name, before in read_object(path / SETTINGS).items():
            require(given.get(name) == before, f"finetune.{name}", f"{before!r} to be resumed", given.get(name))
    with disk_errors(path):
        path.mkdir(parents=True, exist_ok=True)
    write_json(path / SETTINGS, given)


def where_from(reading: DataConfig, labels: Path | str | None, columns: Columns) -> dict[str, Any]:
    """Where the labelled images are, for the explorer to find them again."""
    given = {"source": reading.source, "labels": labels, "root": reading.root}
    there = {name: Path(value).expanduser() for name, value in given.items() if value is not None}
    found = {name: str(path.resolve() if path.exists() else given[name]) for name, path in there.items()}
    return found if columns == USUAL else {**found, "columns": columns._asdict()}


def _keep(path: Path, classifier: ImageClassifier, history: dict[str, Any], data: LabelledData, **about: Any) -> None:
    """Score on what was held out and write all of it; the classifier's own files come last."""
    scores = [score(classifier, part, name) for name, part in data.parts.items() if name != "train"]
    counts = {name: len(part.targets) for name, part in data.parts.items()}
    seen = dict(zip(data.classes, per_class(data.train, len(data.classes)).tolist(), strict=True))
    about = {"name": data.name, "counts": counts, "per_class": seen, **about}
    write_json(path / "results.json", {"data": about, "training": history, "scores": scores})
    classifier.save(path)
    (path / STATE).unlink(missing_ok=True)
    (path / SETTINGS).unlink(missing_ok=True)
