"""The model card: what the encoder is, what it saw, how well it does and how to load it."""

import re
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from pmae.config_file import flat
from pmae.export.formats import FORMATS
from pmae.export.source import RunSource, Source
from pmae.report.tables import Cell, Table, in_line, to_markdown
from pmae.results import PROTOCOLS
from pmae.standing import scores_of

LOCAL = ("data.source", "data.root", "data.cache", "probe.data", "encoder.weights", "train.device")
"""Settings that say where things lie on the machine that trained, which is nobody else's business."""
LICENCES = {"bloodmnist": "cc-by-4.0", "dermamnist": "cc-by-nc-4.0", "pathmnist": "cc-by-4.0"}
"""Of the named sets whose publisher states one."""
POOLED = {"cls": "its [CLS] token (`cls`)", "mean": "the mean of its patch tokens (`mean`)"}


def write_card(
    source: Source, folder: Path, kind: str, name: str, difference: float, data_licence: str | None, on_hub: bool
) -> None:
    """Write README.md; `name` is the folder's, or that of its repository on the hub."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader, library = PackageLoader("pmae.export", ""), FORMATS[kind].library
    environment = Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    environment.filters |= {"text": _text, "numbers": _numbers}
    limits = np.iinfo(source.dtype) if source.dtype.kind in "iu" else None
    values = f"{limits.min} to {limits.max}" if limits else "as in the data"
    # The mode in which PIL, and so the transforms of timm and Hugging Face, keep the values of such an image.
    modes = {1: "L", 3: "RGB", 4: "RGBA"} if source.dtype == np.uint8 else {1: "F"}
    mode = modes.get(source.shape[0])
    told = {"kind": kind, "name": name, "on_hub": on_hub, "library": library, "version": version(library)}
    told |= {"source": source, "mode": mode, "values": values, "difference": difference}
    told |= {"licence": data_licence, **(_of_run(source) if isinstance(source, RunSource) else {})}
    (folder / "README.md").write_text(environment.get_template("card.md.j2").render(told), encoding="utf-8")


def _of_run(source: RunSource) -> dict[str, Any]:
    """What a run knows beyond its encoder: data, scores, settings."""
    data, start = source.run.environment["data"], source.run.environment.get("start")
    given = {name: value for name, value in flat(source.config).items() if name not in LOCAL and value is not None}
    notes = ["training did not start from random weights"] if start else []
    if source.config.objective.contrastive_weight and source.config.objective.contrastive.startswith("distill("):
        given["objective.contrastive"] = "distill"  # whose option is a place on that machine
        notes.append("it learned the tokens of another encoder, whose licence may bind it too (distillation)")
    return {
        "data": data,
        "known_licence": LICENCES.get(source.config.data.source),
        "counts": ", ".join(f"{count:,} {split}" for split, count in data["counts"].items()),
        "notes": [*data.get("notes", []), *notes],
        "pooled": [POOLED[name] for name in source.features(source.images()[:1])],
        "evaluation": _evaluation(source),
        "settings": {name: " ".join(str(value).split()) for name, value in given.items()},
    }


def _evaluation(source: RunSource) -> str:
    found = scores_of(source.run.evaluations)
    found = [score for score in found if score.is_baseline or score.epoch == source.epoch]
    if all(score.is_baseline for score in found):
        return "Not evaluated with labels." + _r2(source)
    rows: list[list[Cell]] = [
        [s.representation, PROTOCOLS.get(s.protocol, s.protocol), s.preset, f"{_marked(s.data)} {s.split}", s.accuracy]
        for s in found
    ]
    header = ("representation", "protocol", "preset", "images", "accuracy %")
    table = Table("evaluation", "The encoder and what needs no pretraining", header, rows, "With 95% intervals.")
    return to_markdown(table).rstrip() + _r2(source)


def _r2(source: RunSource) -> str:
    signals = source.run.results.get("pretrain", {})
    named = {"held_out_r2": "held-out images", "train_r2": "training images, as none were held out"}
    told = [f"{images}: {signals[name]:.3f}" for name, images in named.items() if name in signals]
    if signals.get("epoch") != source.epoch or not told:
        return ""
    return f"\n\nR2 of the hidden variance on {told[0]} (0 is predicting the mean, 1 is perfect)."


def _text(value: object) -> str:
    """A name or note that stays text: no tag, no link, no picture, no new line."""
    return _marked(in_line(str(value)))


def _marked(text: str) -> str:
    return re.sub(r"([\\`*_\[\]#~])", r"\\\1", text)


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.6g}" for value in values)
