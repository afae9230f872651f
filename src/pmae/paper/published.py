"""The paper's numbers, settings and claims, shipped with the package."""

import functools
import json
import re
from importlib.resources import files
from typing import Any


@functools.cache
def paper() -> dict[str, Any]:
    """Everything in published.json: source, setting, validation, methods, data, accuracy, settings, claims."""
    text = files("pmae.paper").joinpath("published.json").read_text(encoding="utf-8")
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
