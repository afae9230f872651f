"""Is one setting above another? How far two groups of runs are apart on the same test images, with an interval."""

import dataclasses
import statistics
from collections.abc import Sequence

import numpy as np

from pmae.files import read_tensors
from pmae.intervals import Interval
from pmae.report.difference import Difference, difference
from pmae.report.tables import Cell
from pmae.results import Score
from pmae.runs import Run

NORMAL = 1.96  # quantile behind a 95% interval
ABOVE, BELOW, CHANCE = "clearly above", "clearly below", "may be chance"
COLUMNS = ("difference", "low", "high", "said", "how")
NOTE = (
    "In points, with a 95% interval; one that leaves out 0 is clear. Paired: a bootstrap over the same test images, "
    "each with the share of the runs and heads that are right; else from the two intervals as if they were "
    "independent, which is wider. No interval knows of seeds of pretraining that were not run."
)


def between(mine: Sequence[tuple[Run, Score]], rival: Sequence[tuple[Run, Score]]) -> Difference | None:
    """How far runs are above others by their scores of one protocol; None where one side has none."""
    one, other = (pooled([with_answers(*each) for each in group]) for group in (mine, rival))
    return None if one is None or other is None else difference(one, other)


def cells(found: Difference) -> list[Cell]:
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
    return dataclasses.replace(known[0], metrics={"accuracy": Interval(value, low, high)}, answers=stacked)


def _interval(score: Score) -> tuple[float, float, float]:
    """Low end, value and high end as shares; that of a binomial proportion where no interval was kept."""
    found = score.metrics["accuracy"]
    value = found.value or 0.0
    half = NORMAL * (value * (1 - value) / score.images) ** 0.5
    low, high = (value - half, value + half) if found.low is None or found.high is None else (found.low, found.high)
    return low, value, high
