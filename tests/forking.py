"""Processes that begin with everything imported: a server, which has imported it once, forks them.

`python forking.py serve SOCKET` is the server, until its standard input ends. `python forking.py run SOCKET -m MODULE`
(or `-c CODE`, or `FILE`, and arguments) stands in for `python -m MODULE`: a fork of the server takes over its files,
folder and environment, gets its signals, and it ends as the fork does. It imports next to nothing itself.
"""

import array
import contextlib
import importlib
import json
import os
import select
import signal
import socket
import sys
from typing import Any, NoReturn

LOADED = (
    "matplotlib.pyplot",
    "matplotlib.backends.backend_agg",
    "tyro",
    "pmae.demo",
    "pmae.report.page",
    "pmae.train.loop",
)
PASSED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STANDARD = (0, 1, 2)
STREAMS = ((0, "stdin", "r", -1, "strict"), (1, "stdout", "w", -1, "strict"), (2, "stderr", "w", 1, "backslashreplace"))


def is_open(file: int) -> bool:
    """Whether a number is that of an open file."""
    try:
        os.fstat(file)
    except OSError:
        return False
    return True


def run(address: str, arguments: list[str]) -> NoReturn:
    """Ask for a process and end as it does."""
    files = [file for file in STANDARD if is_open(file)]
    ignored = [int(number) for number in PASSED if signal.getsignal(number) == signal.SIG_IGN]
    wish = {"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ), "files": files}
    server = socket.socket(socket.AF_UNIX)
    server.connect(address)
    data = json.dumps({**wish, "ignored": ignored, "umask": umask()}).encode()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
    server.sendmsg([len(data).to_bytes(8, "big")], rights)
    server.sendall(data)
    process = int.from_bytes(server.recv(8), "big")
    for number in PASSED:
        if number not in ignored:
            signal.signal(number, lambda number, _: send(process, number))
    end(int.from_bytes(server.recv(8), "big"))


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def send(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


def end(status: int) -> NoReturn:
    """Leave with this status of `waitpid`: the same exit code, or by the same signal."""
    if os.WIFSIGNALED(status):
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


def serve(address: str) -> tuple[dict[str, Any], list[int]]:
    """Fork for every wish; returns in the fork, with the wish and its files, and never in the server."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address)
    listening.listen()
    print("ready", flush=True)
    running: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([0, listening, *running.values()], [], [], 0.02 if running else None)
        for process, asking in list(running.items()):
            if asking in ready:  # whoever asked is gone
                send(process, signal.SIGKILL)
            done, status = os.waitpid(process, 0 if asking in ready else os.WNOHANG)
            if done:
                with contextlib.suppress(OSError):
                    asking.sendall(status.to_bytes(8, "big"))
                running.pop(process).close()
        if 0 in ready:
            for process in running:
                send(process, signal.SIGKILL)
            os._exit(0)
        if listening in ready:
            asking, _ = listening.accept()
            wish, files = received(asking)
            if (process := os.fork()) == 0:
                for each in (listening, asking, *running.values()):
                    each.close()
                return wish, files
            for file in files:
                os.close(file)
            running[process] = asking
            asking.sendall(process.to_bytes(8, "big"))


def received(asking: socket.socket) -> tuple[dict[str, Any], list[int]]:
    size, rights, _, _ = asking.recvmsg(8, socket.CMSG_SPACE(4 * len(STANDARD)))
    files: array.array[int] = array.array("i")
    for _, _, data in rights:
        files.frombytes(data)
    left, data = int.from_bytes(size, "big"), b""
    while len(data) < left:
        data += asking.recv(left - len(data))
    return json.loads(data), list(files)


def become(wish: dict[str, Any], files: list[int]) -> None:
    """Make this process what was asked for, but for running it."""
    for number in STANDARD:
        os.close(number)
    # The files came with numbers above the standard ones, which are free now.
    for number, file in zip(wish["files"], files, strict=True):
        os.dup2(file, number)
        os.close(file)
    # As Python does when it starts: None for what is closed; errors are written line by line.
    for number, name, mode, buffering, errors in STREAMS:
        stream = open(number, mode, buffering, errors=errors, closefd=False) if number in wish["files"] else None  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    for number in PASSED:
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in wish["ignored"] else default)
    os.chdir(wish["folder"])
    os.umask(wish["umask"])
    os.environ.clear()
    os.environ.update(wish["environment"])
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))


def execute(arguments: list[str]) -> None:
    """What `python ARGUMENTS` does."""
    import runpy

    kind, *rest = arguments
    if kind == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    elif kind == "-m":
        sys.argv, sys.path[0] = rest, os.getcwd()
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = arguments, os.path.dirname(kind)
        runpy.run_path(kind, run_name="__main__")


def load() -> None:
    """Import what commands need; no tensor is touched before the fork."""
    for name in LOADED:
        importlib.import_module(name)


if __name__ == "__main__":
    if sys.argv[1] == "run":
        run(sys.argv[2], sys.argv[3:])
    load()
    wish, files = serve(sys.argv[2])
    become(wish, files)
    execute(wish["arguments"])
