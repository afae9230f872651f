"""How far one accuracy, of a run or of several, is above another, with the interval of that.

It is taken image by image where the answers were kept.
"""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pmae.files import read_tensors
from pmae.intervals import NORMAL, Interval
from pmae.results import Score
from pmae.runs import Run

RESAMPLES = 10_000  # of the images, behind the interval of a difference
FEWEST = 6
"""Images, or groups, that must differ: by a sign test fewer may be chance though all are on one side, and resamples of
one or two say nothing of others."""
ABOVE, BELOW, CHANCE = "clearly above", "clearly below", "may be chance"
COLUMNS = ("difference", "low", "high", "said", "how")
NOTE = (
    "In points, with a 95% interval; one that leaves out 0 is clear. Paired: a bootstrap over the same test images, "
    "each with the share of the runs and heads that are right; else from the two intervals as if they were "
    "independent, which is wider. No interval knows of seeds of pretraining that were not run."
)


class Difference(NamedTuple):
    """Points by which one accuracy is above another, and the interval of that; `paired` if image by image."""

    points: float
    low: float
    high: float
    paired: bool

    @property
    def clear(self) -> bool:
        """Whether the interval leaves out 0."""
        return self.low > 0 or self.high < 0

    @property
    def words(self) -> str:
        """The interval and what follows from it."""
        if not np.isfinite([self.low, self.high]).all():
            return "how sure that is cannot be told, for it has no interval"
        sure = "clear" if self.clear else "may be chance"
        how = "on the same images" if self.paired else "from the two intervals, for the answers were not kept"
        return f"95% interval of the difference {self.low:+.1f} to {self.high:+.1f} {how}: {sure}".replace("-", "−")


def difference(score: Score, rival: Score) -> Difference:
    """How much better a score is than a rival on the same images; without their answers, or on other images, as if
    independent."""
    points = (score.accuracy.value or 0.0) - (rival.accuracy.value or 0.0)
    mine, theirs = _right(score), _right(rival)
    alike = score.same_images(rival)
    if alike and mine is not None and theirs is not None and np.array_equal(score.answers[0], rival.answers[0]):
        # The images are the same, so what one evaluation knows of their groups is true of the other.
        known = (each.groups for each in (score, rival) if each.groups is not None)
        groups = next((each for each in known if each.shape == (score.images,)), None)
        return Difference(points, *_paired_bootstrap(mine - theirs, groups), paired=True)
    reach = float(np.hypot(_half(score), _half(rival)))
    return Difference(points, points - reach, points + reach, paired=False)


def _right(score: Score) -> np.ndarray | None:
    """(images,) share of the seeds that are right; None where the answers were not kept."""
    answers = score.answers
    if answers is None or answers.ndim != 2 or answers.shape[1] != score.images or len(answers) < 2:
        return None
    return (answers[1:] == answers[0]).mean(0)


def _paired_bootstrap(each: np.ndarray, groups: np.ndarray | None) -> tuple[float, float]:
    """Percentiles of the mean over images, in percent, drawn one by one or by whole groups.

    Few sums and sizes of groups occur, so resamples are drawn as counts of each of them.
    """
    own = np.arange(len(each)) if groups is None else np.unique(groups, return_inverse=True)[1].reshape(-1)
    units = np.stack([np.bincount(own, each).round(6), np.bincount(own)], 1)
    kinds, counts = np.unique(units, axis=0, return_counts=True)
    sums, sizes = kinds.T
    drawn = np.random.default_rng(0).multinomial(len(units), counts / len(units), size=RESAMPLES)
    low, high = np.percentile(100 * drawn @ sums / (drawn @ sizes), [2.5, 97.5])
    if np.count_nonzero(units[:, 0]) < FEWEST:
        return float(min(low, 0)), float(max(high, 0))
    return float(low), float(high)


def _half(score: Score) -> float:
    """Half of the width of an interval in points; infinite where it is unknown."""
    accuracy = score.accuracy
    return np.inf if accuracy.low is None or accuracy.high is None else (accuracy.high - accuracy.low) / 2


def between(mine: Sequence[tuple[Run, Score]], rival: Sequence[tuple[Run, Score]]) -> Difference | None:
    """How far runs are above others by their scores of one protocol; None where one side has none."""
    one, other = (pooled([with_answers(*each) for each in group]) for group in (mine, rival))
    return None if one is None or other is None else difference(one, other)


def cells(found: Difference) -> list[float | str]:
    """A difference as the cells of `COLUMNS`."""
    said = CHANCE if not found.clear else ABOVE if found.points > 0 else BELOW
    numbers = [round(number, 6) for number in (found.points, found.low, found.high)]
    return [*numbers, said, "paired" if found.paired else "from two intervals"]


def with_answers(run: Run, score: Score) -> Score:
    """A score of a run with its answers to every image, where they were kept beside results.json."""
    file = run.path / "answers.safetensors"
    kept = {key: found.numpy() for key, found in read_tensors(file).items()} if file.is_file() else {}
    return score.with_kept(kept) if score.key in kept else score


def pooled(scores: Sequence[Score]) -> Score | None:
    """Scores of the same images by several runs as one: their mean accuracy, and the answers of all heads."""
    known = [score for score in scores if score.accuracy.value is not None]
    if not known:
        return None
    low, value, high = (statistics.fmean(ends) for ends in zip(*map(_interval, known), strict=True))
    answers = [score.answers for score in known if score.answers is not None]
    whole = len(answers) == len(known) and all(np.array_equal(each[0], answers[0][0]) for each in answers)
    stacked = np.concatenate([answers[0][:1], *(each[1:] for each in answers)]) if whole else None
    groups = next((score.groups for score in known if whole and score.groups is not None), None)
    metrics = {"accuracy": Interval(value, low, high)}
    return dataclasses.replace(known[0], metrics=metrics, answers=stacked, groups=groups)


def _interval(score: Score) -> tuple[float, float, float]:
    """Low end, value and high end as shares; that of a binomial proportion where no interval was kept."""
    found = score.metrics["accuracy"]
    value = found.value or 0.0
    half = NORMAL * (value * (1 - value) / score.images) ** 0.5
    low, high = (value - half, value + half) if found.low is None or found.high is None else (found.low, found.high)
    return low, value, high
