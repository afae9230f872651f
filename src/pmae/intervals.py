"""Shares with their 95% intervals: of bootstrap resamples, or Wilson's."""

import math
from dataclasses import dataclass
from typing import Annotated

from pmae.validation import Rule

NORMAL = 1.959964  # the quantile of a normal distribution behind a 95% interval
Fraction = Annotated[float, Rule("a share between 0 and 1", lambda share: 0 <= share <= 1)]
"""Checked where a file is read; in memory an `Interval` may also be in percent."""


@dataclass(frozen=True)
class Interval:
    """A metric with its 95% bootstrap interval, averaged over the seeds of the heads; None where it is undefined."""

    value: Fraction | None = None
    low: Fraction | None = None
    high: Fraction | None = None
    std: Fraction | None = None
    """Standard deviation of the value between the seeds of the heads; None for one seed."""

    @property
    def percent(self) -> "Interval":
        """The same, of a share, in percent."""
        parts = (self.value, self.low, self.high, self.std)
        return Interval(*(None if share is None else 100 * share for share in parts))


def wilson(right: float, count: float) -> Interval:
    """A share with Wilson's interval, which holds for few images too, and where all of them or none are right."""
    if not count:
        return Interval()
    share, least = float(right / count), NORMAL**2
    centre = (right + least / 2) / (count + least)
    half = NORMAL * math.sqrt(count * share * (1 - share) + least / 4) / (count + least)
    return Interval(share, max(centre - half, 0.0), min(centre + half, 1.0))
