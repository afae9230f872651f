"""Which of many scores stand: the newest of the same thing, the latest epoch of an encoder, and one pooling of each."""

import dataclasses
import math
from collections.abc import Sequence

from pmae.results import BASELINES, LAST, POOLINGS, PRIMARY, Evaluation, KAccuracy, Score

POINT = 0.01
"""Of accuracy, up to which two poolings are level, however many images they were compared on."""


def scores_of(evaluations: Sequence[Evaluation]) -> list[Score]:
    """Every score that stands, pretrained representations first, baselines in their usual order."""
    found = [score for evaluation in standing(evaluations) for score in evaluation.scores]
    return sorted(found, key=lambda s: BASELINES.index(s.method) if s.is_baseline else -1)


def standing(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """Evaluations, oldest first, with the scores that no later one measured anew; those left without any are gone.

    So are scores of other images than those that the newest evaluation under the same name is of.
    """
    seen: set[tuple[object, ...]] = set()
    newest: dict[str, Score] = {}
    kept = []
    for evaluation in reversed(evaluations):
        scores = [score for score in evaluation.scores if score.same_images(newest.setdefault(score.data, score))]
        scores = [score for score in scores if score.measured not in seen]
        seen |= {score.measured for score in scores}
        kept += [dataclasses.replace(evaluation, scores=tuple(scores))] if scores else []
    return kept[::-1]


def primary_pooling(scores: Sequence[Score]) -> str:
    """The pooling that stands for a run everywhere: chosen by k-NN on validation images, so that no test set chooses.

    It is the mean of the patch tokens unless another is clearly better, as on a few images it may be by chance.
    """
    return _chosen_pooling(pretrained(scores)) or PRIMARY


def _chosen_pooling(scores: Sequence[Score]) -> str | None:
    """That pooling of one representation; None where k-NN did not measure it."""
    found: dict[str, KAccuracy] = {}
    for score in scores:
        # What several blocks say together no single vector of the encoder is, so it stands for nothing else.
        if score.protocol == "knn" and score.by_k and not score.pooling.startswith(LAST):
            best = max(score.by_k, key=lambda one: one.validation)
            if score.pooling not in found or best.validation > found[score.pooling].validation:
                found[score.pooling] = best
    usual = found.get(PRIMARY)
    other = max(found, key=lambda pooling: found[pooling].validation, default=None)
    return PRIMARY if usual and other and not clearly_better(found[other], usual) else other


def clearly_better(one: KAccuracy, other: KAccuracy) -> bool:
    """Whether one is right more often on validation images by more than a point and than the difference's error."""
    error = math.sqrt(_variance(one) + _variance(other))
    return one.validation - other.validation > max(POINT, error)


def _variance(one: KAccuracy) -> float:
    """Of the share of right answers, as if one more were right and one more wrong: all right is no certainty."""
    if one.images is None:
        return 0.0
    share = (one.validation * one.images + 1) / (one.images + 2)
    return share * (1 - share) / one.images


def primary(scores: Sequence[Score], pooling: str | None = None) -> list[Score]:
    """For each representation, preset, data, protocol and split one pooling: this one, or the run's primary one.

    A baseline is chosen its own in the same way: the run's, if it were the worse for it, would flatter the run. Where
    it was not measured (raw pixels have their own) the next of `POOLINGS` stands in.
    """
    usual, own = pooling or primary_pooling(scores), dict[str, str | None]()
    if pooling is None:
        own = {name: _chosen_pooling([score for score in scores if score.method == name]) for name in BASELINES}

    def rank(score: Score) -> int:
        order = [own.get(score.method) or usual, PRIMARY, *POOLINGS]
        return order.index(score.pooling) if score.pooling in order else len(order)

    kept: dict[tuple[object, ...], Score] = {}
    for score in sorted(scores, key=rank):
        kept.setdefault(dataclasses.replace(score, pooling="").measured, score)
    chosen = {id(score) for score in kept.values()}
    return [score for score in scores if id(score) in chosen]


def pretrained(scores: Sequence[Score]) -> list[Score]:
    """Scores of the latest evaluated epoch of every pretrained encoder on each data set."""
    ours = [score for score in scores if not score.is_baseline]
    latest: dict[tuple[str, str], int] = {}
    for score in ours:
        key = score.method, score.data
        latest[key] = max(latest.get(key, 0), score.epoch)
    return [score for score in ours if score.epoch == latest[score.method, score.data]]
