"""Commands in processes of their own, to be stopped and killed, without their imports."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from multiprocessing.context import ForkServerProcess

from pmae.cli import main


def forked(arguments: Sequence[str], said: str = os.devnull, largest: int | None = None) -> ForkServerProcess:
    """`pmae` with these arguments, forked from a server that has imported what it needs; what it says is in a file.

    No file may grow beyond `largest` bytes: as on a full disk, writing answers with an error.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pmae.train.loop", __name__])
    process = context.Process(target=_run, args=(list(arguments), said, largest))
    process.start()
    return process


def _run(arguments: list[str], said: str, largest: int | None = None) -> None:
    # Where tests run in the background of a shell, their children would ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with open(said, "wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if largest is not None:
        import resource

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
    sys.exit(main(arguments))
