"""What a run says while it runs: metrics.jsonl, and a live line on a terminal or plain lines elsewhere."""

import json
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from pmae.runs import disk_errors, whole_lines, write_whole
from pmae.train.tracking import Tracker

PLAIN_SECONDS = 10.0
SETTLED_SECONDS = 5.0
"""How long the speed is measured before the end of a run is foretold from it."""
LONG_SECONDS = 1800.0
"""What is worth a warning."""


class Journal:
    """Appends whole lines to metrics.jsonl, passes them to a tracker and shows progress; use as a context."""

    def __init__(
        self,
        path: Path,
        epochs: int,
        steps_an_epoch: int,
        done: int,
        quiet: bool = False,
        tracker: Tracker | None = None,
    ) -> None:
        self._tracker = tracker
        self._path, self._epochs, self._steps_an_epoch = path, epochs, steps_an_epoch
        self._quiet, self._last_line, self._began = quiet, 0.0, time.monotonic()
        self._began_at, self._foretold = done, False
        self._settled_from: tuple[float, int] | None = None
        self._live = _live_progress() if sys.stderr.isatty() and not quiet else None
        self._task = self._live.add_task("", total=epochs * steps_an_epoch, completed=done) if self._live else None
        forget_after(path, done)

    def __enter__(self) -> "Journal":
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()
        if self._tracker:
            self._tracker.close()

    def write(self, **values: Any) -> None:
        """Append one line to metrics.jsonl."""
        with disk_errors(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")
        if self._tracker:
            self._tracker.write(values["step"], {name: value for name, value in values.items() if name != "step"})

    def show(self, values: dict[str, float], step: int) -> None:
        """Move the live line, or print a plain one if the last is a while ago or an epoch ends."""
        self._foretell(step)
        text = f"epoch {values['epoch']:.1f}/{self._epochs}  {_line(values)}"
        if self._live and self._task is not None:
            self._live.update(self._task, completed=step, description=text)
            return
        now, ends = time.monotonic(), step == self._epochs * self._steps_an_epoch
        if not self._quiet and (ends or now - self._last_line >= PLAIN_SECONDS):
            self._last_line = now
            left = (now - self._began) / max(step - self._began_at, 1) * (self._epochs * self._steps_an_epoch - step)
            print(f"{text}  {_clock(left)} left", flush=True)

    def _foretell(self, step: int) -> None:
        """Once, if the run will be long: when it ends, and what makes it shorter."""
        now = time.monotonic()
        # The first steps compile and warm up, so the speed is that of those after them.
        since, first = self._settled_from = self._settled_from or (now, step)
        if self._quiet or self._foretold or step == first or now - since < SETTLED_SECONDS:
            return
        self._foretold = True
        left = (now - since) / (step - first) * (self._epochs * self._steps_an_epoch - step)
        if left >= LONG_SECONDS:
            (self._live.console.print if self._live else print)(
                f"{self._epochs} epochs will take about {_clock(left)} on this machine; "
                "--epochs with a smaller number takes less, Ctrl-C saves and --resume goes on"
            )


def forget_after(path: Path, step: int) -> None:
    """Drop the lines of steps that a resumed run will take again, and a half-written last line."""
    if not path.exists():
        return
    kept = "".join(f"{line}\n" for line, said in whole_lines(path) if said["step"] <= step)
    write_whole(path, lambda temporary: temporary.write_text(kept, encoding="utf-8"))


def _live_progress() -> Progress:
    columns = (BarColumn(24), TextColumn("{task.description}"), TimeRemainingColumn(), TextColumn("left"))
    return Progress(*columns, console=Console(stderr=True), refresh_per_second=4)


def _line(values: dict[str, float]) -> str:
    speed = values["images_per_second"]
    return f"{speed:,.0f} images/s  loss {values['loss']:.4f}  R2 {values['r2']:+.3f}"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s"
