"""How far one accuracy is above another, with the interval of that: image by image where the answers were kept."""

from typing import NamedTuple

import numpy as np

from pmae.results import Score

RESAMPLES = 10_000  # of the images, behind the interval of a difference


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
    """How much better a score is than a rival on the same images; without their answers, or on images whose classes
    are others, as if independent."""
    points = (score.accuracy.value or 0.0) - (rival.accuracy.value or 0.0)
    mine, theirs = _right(score), _right(rival)
    if mine is not None and theirs is not None and np.array_equal(score.answers[0], rival.answers[0]):
        groups = score.groups if score.groups is not None and score.groups.shape == (score.images,) else None
        return Difference(points, *_paired_bootstrap(mine - theirs, groups), paired=True)
    reach = float(np.hypot(_half(score), _half(rival)))
    return Difference(points, points - reach, points + reach, paired=False)


def _right(score: Score) -> np.ndarray | None:
    """(images,) share of the seeds that are right; None where the answers were not kept."""
    answers = score.answers
    if answers is None or answers.ndim != 2 or answers.shape[1] != score.images or len(answers) < 2:
        return None
    shares: np.ndarray = (answers[1:] == answers[0]).mean(0)
    return shares


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
    return float(low), float(high)


def _half(score: Score) -> float:
    """Half of the width of an interval in points; infinite where it is unknown."""
    accuracy = score.accuracy
    return np.inf if accuracy.low is None or accuracy.high is None else (accuracy.high - accuracy.low) / 2
