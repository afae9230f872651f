"""How many epochs fit into the minutes that a run may take: a short trial of it on this machine, and arithmetic."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch

from pmae.config import Config, replace
from pmae.derive import tenth
from pmae.errors import Interrupted, require
from pmae.files import temporary_folder
from pmae.plugins import TABLES
from pmae.train.callbacks import Callback, Training
from pmae.train.distributed import launched
from pmae.train.environment import release_memory
from pmae.train.stages import first_epochs, first_stage

RESERVE = 0.05
"""Share of the time that is left over: a machine is not always as fast as during a trial."""
TRIED, MOST_TRIED = 0.05, 10.0
"""For how long steps are tried: a share of the time, and seconds at most."""
NAME = "trial_of_speed"
FEWEST_EPOCHS = 10
"""Of the trial's schedule, so that there is a second step to measure in the smallest set."""


class Train(Protocol):
    """Trains settings into a folder as the run itself will be, and calls back when a checkpoint was saved."""

    def __call__(self, config: Config, folder: Path, *, on_checkpoint: Callable[[], None]) -> object: ...


@dataclass(frozen=True)
class Pace:
    """Seconds that the parts of a run take."""

    fixed: float
    """What comes once: fits, compilation and the first step, figures."""
    epoch: float
    save: float
    """A checkpoint."""
    look: float
    """R2, the online probe and pictures."""

    def seconds(self, epochs: int, save_every: int | None = None, look_every: int | None = None) -> float:
        """A whole run; the last epoch is saved and looked at in any case."""
        saves, looks = (math.ceil(epochs / (every or tenth(epochs))) for every in (save_every, look_every))
        return self.fixed + epochs * self.epoch + saves * self.save + looks * self.look

    def after(self, first: "Pace", epochs: int) -> "Pace":
        """Of both stages of a run: so many epochs of the first to one of this, and as many checkpoints and looks."""
        each = (first.fixed, epochs * first.epoch, first.save, first.look)
        return Pace(*(mine + other for mine, other in zip(astuple(self), each, strict=True)))

    def most_epochs(self, seconds: float, save_every: int | None = None, look_every: int | None = None) -> int:
        """The largest number of epochs that take no longer; 0 where a single one does."""
        most = int(max(seconds - self.fixed, 0.0) / self.epoch)
        fits = (n for n in range(most, 0, -1) if self.seconds(n, save_every, look_every) <= seconds)
        return next(fits, 0)


def require_minutes(minutes: float | None, resume: bool) -> None:
    """Refuse minutes that are none, and runs whose length they cannot settle."""
    if minutes is None:
        return
    require(0 < minutes < math.inf, "minutes", "a number above 0", minutes)
    require(not resume, "minutes", "left out to resume a run, whose length was settled when it began", minutes)
    rule = "left out with several processes, each of which would measure another speed: give train.epochs"
    require(not launched(), "minutes", rule, minutes)


def settings_within(
    minutes: float, began: float, given: Config, resolved: Config, train: Train
) -> dict[str, tuple[int, str]]:
    """The most epochs that a run which `began` at that moment can take, and why; refused where not even one fits.

    Of the settings as `given`, those that follow from the epochs are still open. Large patches that follow from the
    data are left out where there is no time for them.
    """
    tried, limit = min(MOST_TRIED, TRIED * minutes * 60), minutes * 60 * (1 - RESERVE)
    every, staged = (given.train.checkpoint_every, given.probe.every), bool(resolved.encoder.first_patch_size)
    alone = both = measure(resolved, train, tried)
    if staged:
        both = alone.after(measure(first_stage(resolved), train, tried), first_epochs(resolved))
    spent = time.monotonic() - began
    shorter = staged and given.encoder.first_patch_size is None and spent + both.seconds(1, *every) > limit
    pace, hint = alone if shorter else both, " with large patches first (encoder.first_patch_size 0: without)"
    epochs, least = pace.most_epochs(limit - spent, *every), least_minutes(spent + pace.seconds(1, *every))
    told = hint if staged and not shorter else ""
    require(epochs > 0, "minutes", f"at least {least:g}, what one epoch takes here{told}", minutes)
    found = {"train.epochs": (epochs, in_words(epochs, pace, minutes))}
    if shorter:
        needed = least_minutes(spent + both.seconds(1, *every))
        found["encoder.first_patch_size"] = 0, f"large patches first would take at least {needed:g} minutes"
    return found


def least_minutes(seconds: float) -> float:
    """The minutes, in tenths, that have so many seconds beside what is reserved."""
    return math.ceil(seconds / (1 - RESERVE) / 6) / 10


def in_words(epochs: int, pace: Pace, minutes: float) -> str:
    """Why there are so many epochs."""
    each = f"{pace.epoch:.2g} s" if pace.epoch < 10 else f"{timedelta(seconds=round(pace.epoch))}"
    count = f"{epochs:,} epoch{'s' * (epochs > 1)} of {each}{' each' * (epochs > 1)}"
    return f"{count} fit{'s' * (epochs == 1)} into {minutes:g} minute{'s' * (minutes != 1)} on this machine"


def measure(config: Config, train: Train, seconds: float) -> Pace:
    """The pace of resolved settings: trained for so many seconds of steps, saved and looked at once, and deleted.

    Trackers and callbacks of somebody's own are left out, since others may see what they do.
    """
    clock, epochs = Clock(seconds), max(config.train.epochs or 1, FEWEST_EPOCHS)
    trial = replace(
        config,
        encoder__first_patch_size=0,
        train__epochs=epochs,
        train__checkpoint_every=epochs,
        probe__every=epochs,
        train__track="none",
        train__callbacks=(NAME,),
        train__plugins=(),
    )
    with temporary_folder("pmae-trial-") as folder, clock.registered():
        began = time.monotonic()
        try:
            train(trial, folder / "run", on_checkpoint=clock.on_checkpoint)
        except Interrupted as stop:  # there is no run to go on with
            raise (KeyboardInterrupt() if stop.code == 130 else SystemExit(stop.code)) from None
        whole = time.monotonic() - began
    release_memory()
    return clock.pace(whole)


class Clock:
    """Ends a run after some seconds of steps, and keeps the moments between its parts."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._steps, self._steps_an_epoch = seconds, 0, 0
        self._first = self._last = self._saved = self._looked = 0.0

    @contextmanager
    def registered(self) -> Iterator[None]:
        """Inside, the callback of this clock has a name, by which settings know callbacks."""
        clock = self

        class Trial(Callback):
            def on_step(self, training: Training) -> None:
                clock.on_step(training)

            def on_end(self, training: Training) -> None:
                clock._looked = time.monotonic()

        TABLES["callback"][NAME] = Trial
        try:
            yield
        finally:
            del TABLES["callback"][NAME]

    def on_step(self, training: Training) -> None:
        """The first step compiles and warms up, so the clock starts after it."""
        if training.step == 1:
            self._first = _now()
            return
        self._steps, self._steps_an_epoch, self._last = training.step - 1, training.steps, time.monotonic()
        if self._last - self._first >= self._seconds:
            self._last = _now()
            training.stop("its speed is known")

    def on_checkpoint(self) -> None:
        self._saved = time.monotonic()

    def pace(self, whole: float) -> Pace:
        """Of a trial that took so many seconds in all."""
        stepped, save, look = self._last - self._first, self._saved - self._last, self._looked - self._saved
        return Pace(whole - stepped - save - look, stepped / self._steps * self._steps_an_epoch, save, look)


def _now() -> float:
    """The time once the device has done what it was told."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.monotonic()
