"""What a run says while it runs: metrics.jsonl, a tracker, and a live line on a terminal or plain lines elsewhere."""

import contextlib
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from pmae.errors import first_line
from pmae.files import disk_errors, write_text
from pmae.runs import whole_lines
from pmae.train.trackers import Tracker

LOG = logging.getLogger("pmae")
PLAIN_SECONDS = 10.0  # between two plain lines
Say = Callable[[str], None]


class LastingStream:
    """A text stream that goes silent for good where the one below fails: a closed pipe, a full disk, no terminal."""

    def __init__(self, below: TextIO | None) -> None:
        self._below = None if below is None or below.closed else below
        self._encoding = getattr(below, "encoding", None) or "utf-8"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._below, name)

    def write(self, text: str) -> int:
        # Characters that the terminal does not know become question marks.
        known = text.encode(self._encoding, "replace").decode(self._encoding)
        self._try(lambda below: below.write(known))
        return len(text)

    def flush(self) -> None:
        self._try(lambda below: below.flush())

    def isatty(self) -> bool:
        return self._below is not None and self._below.isatty()

    def _try(self, act: Callable[[TextIO], object]) -> None:
        if self._below is None:
            return
        try:
            act(self._below)
        # ValueError is what a closed file raises.
        except (OSError, ValueError):
            # What is still buffered would fail once more when Python leaves, and change the exit code.
            with contextlib.suppress(OSError, ValueError):
                silence = os.open(os.devnull, os.O_WRONLY)
                os.dup2(silence, self._below.fileno())
                os.close(silence)
            self._below = None


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """Inside, nothing that is printed can fail, by whomever."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (LastingStream(stream) for stream in before)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before


def say(text: str) -> None:
    """A line that nobody has to read: to the `pmae` logger where it has handlers and shows INFO, else printed."""
    if LOG.hasHandlers() and LOG.isEnabledFor(logging.INFO):
        LOG.info(text)
        return
    with contextlib.suppress(OSError, ValueError):
        print(text, flush=True)


class ProgressLine:
    """How far a number of steps is: a live line on a terminal, or plain ones with the time left, seconds apart."""

    def __init__(self, steps: int, done: int = 0, say: Say = say, live: bool = True, left: str = "left") -> None:
        self._steps, self._say, self._left = steps, say, left
        self._shown_at = -PLAIN_SECONDS
        self._first: tuple[float, int] | None = None
        stream = LastingStream(sys.stderr)
        columns = (BarColumn(24), TextColumn("{task.description}"), TimeRemainingColumn(), TextColumn(left))
        console = Console(file=stream)  # type: ignore[arg-type]
        self._live = Progress(*columns, console=console, refresh_per_second=4, disable=not (live and stream.isatty()))
        self._task = self._live.add_task("", total=steps, completed=done)

    def __enter__(self) -> "ProgressLine":
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._live.disable:
            self._live.stop()

    def note(self, text: str) -> None:
        """Say something beside the progress."""
        self._say(text) if self._live.disable else self._live.console.print(text)

    def show(self, text: str, step: int) -> None:
        """Move the live line, or print a plain one if the last is a while ago or this step is the last."""
        self._live.update(self._task, completed=step, description=text)
        now = time.monotonic()
        # The steps before the first line compile and warm up: how long the rest takes is told from those after it.
        since, first = self._first = self._first or (now, step)
        if not self._live.disable or (step < self._steps and now - self._shown_at < PLAIN_SECONDS):
            return
        self._shown_at = now
        seconds = (now - since) / max(step - first, 1) * (self._steps - step)
        known = step > first or step == self._steps
        self._say(f"{text}  {timedelta(seconds=round(seconds))} {self._left}" if known else text)


class Journal:
    """Appends whole lines to metrics.jsonl, passes them to a tracker and shows progress; use as a context."""

    def __init__(
        self, path: Path, epochs: int, steps: int, done: int, quiet: bool = False, tracker: Tracker | None = None
    ) -> None:
        """Of so many `steps` an epoch, of which so many in all are `done`."""
        self._path, self._epochs, self._tracker = path, epochs, tracker
        self._line = ProgressLine(epochs * steps, done, (lambda text: None) if quiet else say, live=not quiet)
        if path.exists():
            # Without the lines of steps that a resumed run will take again, and a half-written last line.
            write_text(path, "".join(f"{line}\n" for line, said in whole_lines(path) if said["step"] <= done))

    def __enter__(self) -> "Journal":
        self._line.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._line.__exit__()
        self._track(lambda tracker: tracker.close())

    def write(self, **values: Any) -> None:
        with disk_errors(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")
        points = {name: value for name, value in values.items() if name != "step"}
        self._track(lambda tracker: tracker.write(values["step"], points))

    def picture(self, step: int, name: str, pixels: np.ndarray) -> None:
        self._track(lambda tracker: tracker.picture(step, name, pixels))

    def _track(self, act: Callable[[Tracker], None]) -> None:
        """A tracker that fails, such as one whose server is gone, is let go of; the run goes on."""
        if self._tracker:
            try:
                act(self._tracker)
            except Exception as error:  # each library has its own
                self._tracker, said = None, f"the tracker failed and gets no more of this run ({first_line(error)})"
                warnings.warn(f"{said}; training goes on", stacklevel=2)

    def note(self, text: str) -> None:
        """Say something beside the progress, unless quiet."""
        self._line.note(text)

    def show(self, values: Mapping[str, float | None], step: int) -> None:
        """Move the live line, or print a plain one now and then."""
        speed = f"{values['images_per_second']:,.0f} images/s"
        text = f"epoch {values['epoch']:.1f}/{self._epochs}  {speed}  loss {values['loss']:.4f}"
        self._line.show(text + (f"  R2 {values['r2']:+.3f}" if values["r2"] is not None else ""), step)
