"""Few labels: how much of the training labels a representation needs, over random draws of the labelled images."""

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from pmae.evaluate.features import ORDER, hold_out, mixed
from pmae.evaluate.probes import logistic_regression, statistics
from pmae.evaluate.protocols import FewLabelsProtocol
from pmae.results import Score


class LabelledFeatures(Protocol):
    """What is asked of the data of an evaluation: features by split and pooling, labels, and a way to score."""

    features: dict[str, dict[str, Tensor]]
    labels: dict[str, np.ndarray]
    held_out: list[str]
    classes: tuple[str, ...]

    def score(self, split: str, predictions: Any, **named: Any) -> Score:
        """The score of class scores by draw."""


def few_labels(data: LabelledFeatures, config: FewLabelsProtocol, seed: int) -> list[Score]:
    """Logistic regression for every budget and pooling; a score's seeds are the draws of the labelled images."""
    labels, scores = data.labels["train"], list[Score]()
    for pooling, train in data.features["train"].items():
        # Standardized by all training images: statistics need no labels.
        mean, std = statistics(train)
        x = {split: (data.features[split][pooling] - mean) / std for split in ("train", *data.held_out)}
        for name, draws in budgets(labels, config, seed):
            heads = [_fit(x["train"], labels, places, len(data.classes), config.penalty) for places in draws]
            chosen = {"labels": len(draws[0]), "penalty": config.penalty}
            named = {"protocol": name, "pooling": pooling, "chosen_on": f"{len(draws)} draws of the labelled images"}
            for split in data.held_out:
                logits = [x[split] @ weights[:-1] + weights[-1] for weights in heads]
                by_draw = [(number, found.softmax(1), chosen) for number, found in enumerate(logits)]
                scores.append(data.score(split, by_draw, **named))
    return scores


def budgets(labels: np.ndarray, config: FewLabelsProtocol, seed: int) -> Iterator[tuple[str, list[np.ndarray]]]:
    """The name of each budget of labels, and the training positions of each of its draws."""
    seeds = [mixed(seed, ORDER, number) for number in range(config.draws)]
    for count in config.shots:
        yield f"{count}-shot", [shots(labels, count, own) for own in seeds]
    for share in config.fractions:
        yield f"{100 * share:g}% labels", [hold_out(labels, share, own)[1] for own in seeds]


def shots(labels: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Sorted positions of so many random images of every class, or of all where it has fewer."""
    rng = np.random.default_rng(seed)
    members = [rng.permutation(np.flatnonzero(labels == label))[:count] for label in np.unique(labels)]
    return np.sort(np.concatenate(members))


def _fit(x: Tensor, labels: np.ndarray, places: np.ndarray, classes: int, penalty: float) -> Tensor:
    index = torch.from_numpy(places).to(x.device)
    return logistic_regression(x[index], torch.from_numpy(labels[places]).to(x.device), classes, penalty)
