"""What a run says while it runs: metrics.jsonl, trackers, and a live line on a terminal or plain lines elsewhere.

Trackers get the lines of metrics.jsonl as curves under the same names, in the run folder; Weights & Biases stays
offline unless WANDB_MODE is set to online. Printing never raises: a reader that goes away must not end training.
"""

import contextlib
import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TextIO
from uuid import uuid4

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from pmae.config import Config
from pmae.config_file import to_dict
from pmae.errors import missing_extra
from pmae.files import disk_errors, read_object, write_json, write_whole
from pmae.runs import whole_lines

PLAIN_SECONDS = 10.0
SETTLED_SECONDS = 5.0
"""How long the speed is measured before the end of a run is foretold from it."""
LONG_SECONDS = 1800.0
"""What is worth a warning."""


class LastingStream(io.TextIOBase):
    """A text stream that goes silent for good where the one below fails: a closed pipe, a full disk, no terminal."""

    def __init__(self, below: TextIO | None) -> None:
        self._below = below

    def write(self, text: str) -> int:
        """Write, or drop what cannot be written; characters that the terminal does not know become question marks."""
        known = text.encode(self.encoding, "replace").decode(self.encoding)
        self._try(lambda below: below.write(known))
        return len(text)

    def flush(self) -> None:
        """Flush; most failures show here."""
        self._try(lambda below: below.flush())

    def isatty(self) -> bool:
        """Whether there is a terminal at the other end."""
        return self._below is not None and not self._below.closed and self._below.isatty()

    def fileno(self) -> int:
        """That of the stream below."""
        if self._below is None:
            raise io.UnsupportedOperation("no stream below")
        return self._below.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """That of the stream below."""
        return getattr(self._below, "encoding", None) or "utf-8"

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
    """Print a line that nobody has to read."""
    with contextlib.suppress(OSError, ValueError):
        print(text, flush=True)


PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb"}


class Tracker(Protocol):
    """Takes lines of metrics as they are written, and closes its file at the end."""

    def write(self, step: int, values: dict[str, float]) -> None:
        """Add a point to the curve of each value."""

    def close(self) -> None:
        """Flush and close."""


def require_tracker(name: str) -> None:
    """Refuse a tracker whose package is not there, before a run begins."""
    if name == "none":
        return
    # Wandb reports its own errors over the network unless told not to before it is imported.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    try:
        import_module(PACKAGES[name])
    except ImportError as error:
        raise missing_extra(f"train.track {name!r}", "tracking", error) from error


def open_tracker(config: Config, folder: Path, done: int) -> Tracker | None:
    """The tracker that the settings name, continuing after step `done` the curves that the run folder holds."""
    name = config.train.track
    require_tracker(name)
    if name == "tensorboard":
        return TensorBoard(folder / "tensorboard", done)
    return WeightsAndBiases(folder, config) if name == "wandb" else None


class TensorBoard:
    """Event files in the run's tensorboard/ folder, one for each time the run was started."""

    def __init__(self, folder: Path, done: int) -> None:
        writer: Any = import_module("torch.utils.tensorboard").SummaryWriter
        # Readers drop the points from `purge_step` on that an earlier start left: those steps are taken again.
        self._writer = writer(str(folder), purge_step=done + 1)

    def write(self, step: int, values: dict[str, float]) -> None:
        """Add a point to the curve of each value."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class WeightsAndBiases:
    """An offline run in the run's wandb/ folder; `wandb sync` uploads it. Each start has the same id, kept beside it.

    Steps that a resumed run takes again give the same values as before, so it does not matter which of them is kept.
    """

    def __init__(self, folder: Path, config: Config) -> None:
        wandb: Any = import_module("wandb")
        kept = folder / "wandb.json"
        if not kept.exists():
            write_json(kept, {"id": uuid4().hex})
        self._run = wandb.init(
            project="pmae",
            name=folder.name,
            id=read_object(kept)["id"],
            dir=str(folder),
            config=to_dict(config),
            mode="online" if os.environ.get("WANDB_MODE") == "online" else "offline",
            settings=wandb.Settings(silent=True, console="off", disable_git=True, save_code=False),
        )

    def write(self, step: int, values: dict[str, float]) -> None:
        """Add a point to the curve of each value."""
        self._run.log(values, step=step)

    def close(self) -> None:
        """Flush and close."""
        self._run.finish()


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
        self._path, self._epochs, self._steps = path, epochs, epochs * steps_an_epoch
        self._quiet, self._tracker = quiet, tracker
        self._shown_at, self._long_run_told = -PLAIN_SECONDS, False
        self._settled_at: tuple[float, int] | None = None
        stream = LastingStream(sys.stderr)
        self._live = _live_progress(stream) if stream.isatty() and not quiet else None
        self._task = self._live.add_task("", total=self._steps, completed=done) if self._live else None
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

    def note(self, text: str) -> None:
        """Say something beside the progress, unless quiet."""
        if self._live:
            self._live.console.print(text)
        elif not self._quiet:
            say(text)

    def show(self, values: dict[str, float], step: int) -> None:
        """Move the live line, or print a plain one if the last is a while ago or an epoch ends."""
        now = time.monotonic()
        left = self._seconds_left(now, step)
        self._warn_of_long_run(now, left)
        text = f"epoch {values['epoch']:.1f}/{self._epochs}  {_line(values)}"
        if self._live and self._task is not None:
            self._live.update(self._task, completed=step, description=text)
        elif not self._quiet and (step == self._steps or now - self._shown_at >= PLAIN_SECONDS):
            self._shown_at = now
            say(text if left is None else f"{text}  {_clock(left)} left")

    def _seconds_left(self, now: float, step: int) -> float | None:
        """From the speed since the first line: the steps before it compile and warm up. None while there is none."""
        since, first = self._settled_at = self._settled_at or (now, step)
        if step == self._steps:
            return 0.0
        return (now - since) / (step - first) * (self._steps - step) if step > first else None

    def _warn_of_long_run(self, now: float, left: float | None) -> None:
        """Once, if the run will be long: when it ends, and what makes it shorter."""
        if left is None or self._long_run_told or self._settled_at is None:
            return
        if now - self._settled_at[0] < SETTLED_SECONDS:
            return
        self._long_run_told = True
        if left >= LONG_SECONDS:
            self.note(
                f"{self._epochs} epochs will take about {_clock(left)} on this machine; "
                "--epochs with a smaller number takes less, Ctrl-C saves and --resume goes on"
            )


def forget_after(path: Path, step: int) -> None:
    """Drop the lines of steps that a resumed run will take again, and a half-written last line."""
    if not path.exists():
        return
    kept = "".join(f"{line}\n" for line, said in whole_lines(path) if said["step"] <= step)
    write_whole(path, lambda temporary: temporary.write_text(kept, encoding="utf-8"))


def _live_progress(stream: LastingStream) -> Progress:
    columns = (BarColumn(24), TextColumn("{task.description}"), TimeRemainingColumn(), TextColumn("left"))
    return Progress(*columns, console=Console(file=stream), refresh_per_second=4)  # type: ignore[arg-type]


def _line(values: dict[str, float]) -> str:
    speed = values["images_per_second"]
    return f"{speed:,.0f} images/s  loss {values['loss']:.4f}  R2 {values['r2']:+.3f}"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s"
