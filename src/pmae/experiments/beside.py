"""Several runs at a time on this machine, each in a process of its own; those on one GPU share it."""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from pmae.config import Config
from pmae.errors import Interrupted, UserError, require
from pmae.experiments.jobs import train

PATIENCE = 30.0
"""Seconds that runs which were told to stop have for saving themselves."""


@contextlib.contextmanager
def beside(count: int) -> Iterator["Beside"]:
    """So many workers; runs that are left at the end save themselves."""
    require(count >= 1, "--at-once", "at least 1", count)
    workers = Beside(count)
    try:
        yield workers
    finally:
        workers.stop()


@dataclass(frozen=True)
class Worker:
    """A process, and the line to it."""

    process: BaseProcess
    line: Connection


class Beside:
    """Processes that stay: one that has compiled a step uses it for the next run of the same shapes."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._idle: list[Worker] = []
        self._busy: dict[Path, Worker] = {}

    def free(self) -> bool:
        """Whether another run can begin."""
        return len(self._busy) < self.count

    def begin(self, path: Path, config: Config, until: int | None) -> None:
        """Have a run trained by a process that waits, or by a new one."""
        worker = self._idle.pop() if self._idle else _hire(max(1, (os.cpu_count() or 1) // self.count))
        worker.line.send((path, config, until))
        self._busy[path] = worker

    def wait(self) -> Path:
        """The folder of a run that has ended; a mistake in its settings is raised as if it had been trained here."""
        ended = wait([worker.line for worker in self._busy.values()])[0]
        path = next(path for path, worker in self._busy.items() if worker.line is ended)
        worker = self._busy.pop(path)
        try:
            answer: str | int | None = worker.line.recv()
        except EOFError:
            worker.process.join()
            raise _lost(path, worker.process.exitcode or 0) from None
        self._idle.append(worker)
        if isinstance(answer, str):
            raise UserError(answer)
        if isinstance(answer, int):
            raise Interrupted(path, answer)
        return path

    def stop(self) -> None:
        """Let runs save themselves and processes end."""
        for worker in self._busy.values():
            if worker.process.pid and worker.process.is_alive():
                os.kill(worker.process.pid, signal.SIGTERM)
        for worker in (*self._busy.values(), *self._idle):
            worker.line.close()
        for worker in (*self._busy.values(), *self._idle):
            worker.process.join(PATIENCE)
            worker.process.kill()


def _hire(threads: int) -> Worker:
    # Not forked: a child would share this process's CUDA, which no child may use.
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, threads), daemon=True)
    process.start()
    theirs.close()  # so that the line ends when the process does
    return Worker(process, mine)


def _serve(line: Connection, threads: int) -> None:
    """Train what comes until nobody sends any more; the answer is None, a user's mistake in words, or a signal."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the first one says what follows
    torch.set_num_threads(threads)
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            path, config, until = line.recv()
            line.send(_answer(path, config, until))


def _answer(path: Path, config: Config, until: int | None) -> str | int | None:
    try:
        train(path, config, until)
    except UserError as error:
        return str(error)
    except Interrupted as error:
        return error.code - 128
    return None


def _lost(path: Path, code: int) -> Exception:
    """A process that was killed, by the system for its memory perhaps, or that failed and said why."""
    if code < 0:
        return UserError(
            f"--at-once must leave every run enough memory: the process of {path} was killed by signal {-code}; the "
            "same command goes on, with fewer at once if memory was short"
        )
    return RuntimeError(f"the process of {path} ended with exit code {code}; its error stands above")
