"""A system under the clock, in a process of its own: its memory is its own, and so is what its library changes."""

import multiprocessing
import os
import signal
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Connection

from pmae.bench.work import Work

OURS = ("plain", "compiled", "full")
"""Our engines: eager; compiled; compiled and the whole step in one CUDA graph."""


@dataclass(frozen=True)
class Entry:
    """Who takes part: an engine of ours or a peer, at some work."""

    system: str
    work: Work
    workers: int = 0
    """Loader processes of a peer."""


@dataclass(frozen=True)
class Timing:
    """Seconds that so many steps took, and the most bytes that the process held while it took them."""

    seconds: float
    steps: int
    peak: int


class Failed(Exception):
    """A contestant that cannot go on, and why."""


class Contestant:
    """A process that builds an entry and takes steps when asked."""

    def __init__(self, entry: Entry) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, entry))
        self._process.start()
        theirs.close()
        self._is_ready = False

    def warm_up(self, steps: int) -> float:
        """Seconds of the first steps, compilation included."""
        return self.time(steps, 0).seconds

    def time(self, steps: int, lead_in: int) -> Timing:
        """Take steps that do not count and steps that do."""
        self._wait_until_built()
        return self._ask(lead_in, steps)

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join(20)
        if self._process.is_alive():
            self._process.kill()

    def _wait_until_built(self) -> None:
        if not self._is_ready:
            self._answer()
            self._is_ready = True

    def _ask(self, lead_in: int, steps: int) -> Timing:
        self._pipe.send((lead_in, steps))
        answer = self._answer()
        if not isinstance(answer, Timing):
            raise Failed(f"answered {answer!r}")
        return answer

    def _answer(self) -> object:
        try:
            answer = self._pipe.recv()
        except (EOFError, ConnectionError) as error:
            self._process.join(20)
            raise Failed(f"its process ended with code {self._process.exitcode}") from error
        if isinstance(answer, Failed):
            raise answer
        return answer


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

    from pmae.bench import machine, ours, peers
    from pmae.train.environment import pick_device

    device = pick_device(entry.work.device)
    is_ours = entry.system in OURS
    if not is_ours:
        peers.network(entry.system)
    machine.forget_peak(device)
    before = 0 if device.type == "cuda" else machine.peak_bytes(device)
    steps = ours.build(entry.work, entry.system) if is_ours else peers.build(entry.work, entry.system, entry.workers)
    machine.forget_peak(device)
    pipe.send("built")
    while True:
        lead_in, count = pipe.recv()
        steps(lead_in)
        took = machine.seconds(steps, count, device)
        pipe.send(Timing(took, count, max(0, machine.peak_bytes(device) - before)))
        if device.type == "cuda":
            # Contestants share the card: what this one does not hold between steps is free for the next.
            torch.cuda.empty_cache()
