"""A system under the clock, in a process of its own: its memory is its own, and so is what its library changes."""

import math
import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

from benchmarks.work import Work

OURS = ("plain", "compiled", "full")
"""Our engines: eager; compiled; compiled and the whole step in one CUDA graph."""
LEAST = 5
"""Steps that are timed however long they take."""


@dataclass(frozen=True)
class Entry:
    """Who takes part: an engine of ours or a peer, at some work."""

    system: str
    work: Work
    workers: int = 0
    """Loader processes of a peer."""

    @property
    def compiles(self) -> bool:
        """Whether its first step waits for the compiler."""
        return self.system in ("compiled", "full")


@dataclass(frozen=True)
class Take:
    """A task: take `steps`, or as many as fit into `seconds`, after `lead_in` that do not count but tell how many."""

    steps: int
    lead_in: int = 0
    seconds: float = math.inf

    def count(self, step: float) -> int:
        """How many steps to time if one took so many seconds."""
        fitting = self.steps if math.isinf(self.seconds) else int(self.seconds / step)
        return min(self.steps, max(LEAST, fitting))


@dataclass(frozen=True)
class Watch:
    """A task: profile so many steps."""

    steps: int


@dataclass(frozen=True)
class Timing:
    """Seconds that so many steps took, and the most bytes that the process held while it took them."""

    seconds: float
    steps: int
    peak: int


class Failed(Exception):
    """A contestant that cannot go on, and why."""


class Contestant:
    """A process that builds an entry and works on tasks when asked."""

    def __init__(self, entry: Entry, patience: float = math.inf) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, entry))
        self._process.start()
        theirs.close()
        self._patience, self._is_ready, self._is_warming = patience, False, False

    def begin(self, steps: int) -> None:
        """Ask for the first steps without waiting for them."""
        self._send(Take(steps))
        self._is_warming = True

    def warm_up(self, steps: int) -> float:
        """Seconds of the first steps, compilation included."""
        if not self._is_warming:
            self.begin(steps)
        return self._timing().seconds

    def time(self, take: Take) -> Timing:
        """Take steps that do not count and steps that do."""
        self._send(take)
        return self._timing()

    def watch(self, steps: int) -> object:
        """A profile of so many steps."""
        self._send(Watch(steps))
        return self._answer()

    def dismiss(self) -> None:
        """Let the process go."""
        self._pipe.close()

    def join(self, seconds: float = 20) -> None:
        """Wait so long for its end, and end it if it does not come."""
        self._process.join(seconds)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _send(self, task: Take | Watch) -> None:
        try:
            self._pipe.send(task)
        except ConnectionError as error:
            raise self._gone() from error

    def _timing(self) -> Timing:
        answer = self._answer()
        if not isinstance(answer, Timing):
            raise Failed(f"answered {answer!r}")
        return answer

    def _answer(self) -> object:
        if not self._is_ready:
            self._receive()
            self._is_ready = True
        return self._receive()

    def _receive(self) -> object:
        try:
            # Not to wait for ever for one that hangs: the others' numbers would be lost with it.
            if not self._pipe.poll(None if math.isinf(self._patience) else self._patience):
                self._process.kill()
                raise Failed(f"did not answer within {self._patience:g} seconds")
            answer = self._pipe.recv()
        except (EOFError, ConnectionError) as error:
            raise self._gone() from error
        if isinstance(answer, Failed):
            raise answer
        return answer

    def _gone(self) -> Failed:
        """What it said before it went, if it did: one that failed may be gone before it is asked anything."""
        with suppress(EOFError, ConnectionError):
            while self._pipe.poll(0):
                said = self._pipe.recv()
                if isinstance(said, Failed):
                    return said
        self._process.join(20)
        return Failed(f"its process ended with code {self._process.exitcode}")


def _serve(pipe: Connection, entry: Entry) -> None:
    """Build, then answer until the other end closes; a failure is an answer too."""
    # Ctrl-C is the parent's to handle: it closes the pipe, which ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("ignore")
    # The peers' logs would run through the table.
    os.environ.setdefault("LOGURU_LEVEL", "ERROR")
    try:
        _answer_all(pipe, entry)
    except (EOFError, ConnectionError):
        return
    except Exception as error:
        # Whatever a library raises belongs in its row, in one line, and must not end the comparison.
        text = " ".join(str(error).split()) or "no message"
        pipe.send(Failed(f"{type(error).__name__}: {text[:200]}"))


def _answer_all(pipe: Connection, entry: Entry) -> None:
    import torch
    from torch._inductor import config as compiler

    from benchmarks import machine, ours, peers
    from benchmarks.profile import watch
    from pmae.train.environment import pick_device

    # Many compile at once: each with as many processes as there are cores would be hundreds.
    compiler.compile_threads = min(4, compiler.compile_threads or 1)
    device = pick_device(entry.work.device)
    machine.settle(device)
    is_ours = entry.system in OURS
    if not is_ours:
        peers.network(entry.system)
    machine.forget_peak(device)
    before = 0 if device.type == "cuda" else machine.peak_bytes(device)
    steps = ours.build(entry.work, entry.system) if is_ours else peers.build(entry.work, entry.system, entry.workers)
    # Not again after the first steps: of a CUDA graph's memory only its capture is counted, not its replays.
    machine.forget_peak(device)
    pipe.send("built")
    while True:
        task = pipe.recv()
        if isinstance(task, Watch):
            pipe.send(watch(steps, task.steps, device))
        else:
            took, count = _take(task, lambda count: machine.seconds(steps, count, device))
            pipe.send(Timing(took, count, max(0, machine.peak_bytes(device) - before)))
        if device.type == "cuda":
            # Contestants share the card: what this one does not hold between steps is free for the next.
            torch.cuda.empty_cache()


def _take(task: Take, seconds: Callable[[int], float]) -> tuple[float, int]:
    """Seconds of the steps that count, and how many they were."""
    count = task.count(seconds(task.lead_in) / task.lead_in) if task.lead_in else task.steps
    return seconds(count), count
