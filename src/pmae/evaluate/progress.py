"""How far a long evaluation is, in plain lines."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

SECONDS = 10.0  # between two lines


class Pace:
    """Says how much of some work is done, and about how long the rest takes, seconds apart; of short work nothing."""

    def __init__(self, what: str, total: int, unit: str, say: Callable[[str], None]) -> None:
        self._what, self._total, self._unit, self._say, self._done = what, total, unit, say, 0
        self._began = self._told = time.monotonic()

    def add(self, count: int = 1) -> None:
        self._done, now = self._done + count, time.monotonic()
        if self._done < self._total and now - self._told >= SECONDS:
            left = timedelta(seconds=round((now - self._began) / self._done * (self._total - self._done)))
            self._say(f"{self._what}, {self._done:,} of {self._total:,} {self._unit}, about {left} left")
            self._told = now


class Stages:
    """The parts of an evaluation: each is said when it begins, and `seconds` keeps how long it took."""

    def __init__(self, label: str, say: Callable[[str], None]) -> None:
        self._label, self._say = label, say
        self.seconds: dict[str, float] = {}

    @contextmanager
    def next(self, name: str, total: int = 0, unit: str = "") -> Iterator[Pace]:
        """Begin a part; of one that is made of so many units, how far it is can be added to what this gives."""
        what = f"{self._label}: {name}"
        self._say(what)
        start = time.perf_counter()
        yield Pace(what, total, unit, self._say)
        self.seconds[name] = round(time.perf_counter() - start, 3)
