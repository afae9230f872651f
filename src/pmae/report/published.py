"""The paper's own numbers, settings and claims, to be set beside ours."""

import functools
import json
import re
from importlib.resources import files
from typing import Any

from pmae.config import Config
from pmae.results import Score


@functools.cache
def published() -> dict[str, Any]:
    """The paper's numbers, settings and claims: everything in published.json."""
    return dict(json.loads(files("pmae.report").joinpath("published.json").read_text(encoding="utf-8")))


def published_accuracy(protocol: str, method: str, data: str | None) -> float | None:
    """The paper's accuracy in percent; None where it has none."""
    value = published()["accuracy"].get(protocol, {}).get(method, {}).get(data)
    return None if value is None else float(value)


def published_split(data: str | None) -> str:
    """The images that the published numbers of a data set are of: test or val."""
    return "val" if data in published()["validation"] else "test"


def published_data(name: str) -> str | None:
    """The paper's name of a data set, whatever follows it (`bloodmnist_64`) but another number (`cifar100`)."""
    plain = re.sub(r"[-_ ]", "", name.lower())
    patterns = {known: known + (r"(?!\d)" if known[-1].isdigit() else "") for known in published()["data"]}
    return next((known for known, pattern in patterns.items() if re.match(pattern, plain)), None)


def published_for(score: Score, config: Config) -> tuple[float, str] | None:
    """The paper's accuracy for this data, protocol and kind of method, and what it calls it; None without one."""
    if score.is_baseline or score.method == "weights" or score.pooling != "cls":
        return None
    usual = score.method == "mae" and config.masking.masked_patches in (None, 0.75)
    kind = "random" if config.masking.ratio_schedule == "uniform" else "std" if usual else "oracle"
    target = "pixels" if config.objective.target == "pixels" else "components"
    # The paper has kernel PCA beside PCA; its numbers say nothing about other spaces.
    rows = {"pca": f"pmae_{kind}_{target}", "kernel_pca": f"kmae_{kind}"}
    method = f"mae_{kind}" if score.method == "mae" else rows.get(config.space.name, "unpublished")
    value = published_accuracy(score.protocol, method, published_data(score.data))
    return None if value is None else (value, str(published()["methods"][method]))
