"""Commands and calls in processes of their own, to be stopped and killed, without their imports."""

import ctypes
import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerProcess

from pmae import api
from pmae.cli import main


def started(work: Callable[..., object], *arguments: object, said: str = os.devnull) -> ForkServerProcess:
    """A call in a process forked from a server that has imported what it needs; what it says is in a file."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pmae.train.loop", __name__])
    process = context.Process(target=_told, args=(work, arguments, said))
    process.start()
    return process


def _told(work: Callable[..., object], arguments: Sequence[object], said: str) -> None:
    # Where tests run in the background of a shell, their children would ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.freeze()  # what the server imported: a collection would look through it, and copy the memory it lies in
    os.fsync = lambda handle: None  # as in the tests' own process
    with open(said, "wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    work(*arguments)


def one_heap() -> None:
    """From here on, as MALLOC_ARENA_MAX=1 would from the start: every arena keeps what it had, now more, now less, and
    reserves addresses by the dozen of megabytes, which are not memory.
    """
    ctypes.CDLL("libc.so.6").mallopt(-8, 1)


def forked(
    arguments: Sequence[str], said: str = os.devnull, largest: int | None = None, figures: bool = True
) -> ForkServerProcess:
    """`pmae` with these arguments in such a process.

    No file may grow beyond `largest` bytes: as on a full disk, writing answers with an error.
    """
    return started(_run, list(arguments), largest, figures, said=said)


def _run(arguments: list[str], largest: int | None, figures: bool) -> None:
    if not figures:
        api.save_figures = lambda run: []
    if largest is not None:
        import resource

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
    sys.exit(main(arguments))
