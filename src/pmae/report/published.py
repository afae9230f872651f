"""The paper's numbers, settings and claims, shipped with the package, and the one to set beside a score."""

import functools
import json
import re
from importlib.resources import files
from typing import Any

from pmae.config import Config
from pmae.results import Score


@functools.cache
def paper() -> dict[str, Any]:
    """Everything in published.json: source, setting, validation, methods, data, accuracy, settings, claims."""
    text = files("pmae.report").joinpath("published.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def accuracy(protocol: str, method: str, data: str | None) -> float | None:
    """The published accuracy in percent; None where the paper has none."""
    value = paper()["accuracy"].get(protocol, {}).get(method, {}).get(data)
    return None if value is None else float(value)


def data_name(name: str) -> str | None:
    """The paper's name of a data set, whatever follows it (`bloodmnist_64`) but another number (`cifar100`)."""
    plain = re.sub(r"[-_ ]", "", name.lower())
    for known in paper()["data"]:
        following = plain.removeprefix(known)
        if plain.startswith(known) and not (known[-1].isdigit() and following[:1].isdigit()):
            return str(known)
    return None


def split(data: str) -> str:
    """The images that the published numbers of a data set are of: test or val."""
    return "val" if data in paper()["validation"] else "test"


def source() -> str:
    """Where the published numbers come from, and how they were measured."""
    return f"{paper()['source']} {paper()['setting']}"


def for_score(score: Score, config: Config) -> tuple[float, str] | None:
    """The paper's accuracy for this data, protocol and kind of method, and what it calls it; None without one."""
    if score.is_baseline or score.pooling != "cls":
        return None
    kind = _method(score, config)
    value = accuracy(score.protocol, kind, data_name(score.data))
    return None if value is None else (value, str(paper()["methods"][kind]))


def _method(score: Score, config: Config) -> str:
    """Which published row is the nearest: the method from the score, the kind of ratio and loss from the settings."""
    is_mae = score.method == "mae"
    if config.masking.ratio_schedule == "uniform":
        kind = "random"
    else:
        kind = "std" if is_mae and config.masking.masked_patches in (None, 0.75) else "oracle"
    if is_mae:
        return f"mae_{kind}"
    if config.space.name != "pca":
        # The paper has kernel PCA beside PCA; its numbers say nothing about other spaces.
        return f"kmae_{kind}" if config.space.name == "kernel_pca" else "unpublished"
    return f"pmae_{kind}_{'pixels' if config.objective.target == 'pixels' else 'components'}"
