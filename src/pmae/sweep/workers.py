"""Several runs at a time on this machine, each in a process of its own; those on one GPU share it."""

import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from pmae.config import Config, replace
from pmae.errors import Interrupted, UserError, missing_extra, require
from pmae.sweep.jobs import train

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


# Runs on Ray: on the cores and GPUs of this machine or of a cluster, several at a time.
#
# Ray places a run, and places it again when its worker dies; where it goes on from is in its folder, which all nodes
# see.

LOCAL = "local"
RETRIES = 3
"""How often a run whose worker died is begun again."""
POLL_SECONDS = 30.0
"""Seconds to wait for runs that were told to stop, and between two looks at whether the cluster still has room."""
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # One attempt to reach a cluster takes half a minute; twenty, Ray's own number, are a hang.
    "RAY_NUM_REDIS_GET_RETRIES": "1",
}
"""What Ray reads from the environment when it is imported: no telemetry, no endless attempts."""
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Makes Ray listen on 127.0.0.1 alone, as it does by itself on macOS: it takes code from whoever reaches its ports."""


@contextlib.contextmanager
def on_ray(address: str, gpus: float | None = None, cpus: float = 1) -> Iterator["RayWorkers"]:
    """Workers on this machine (`local`) or on the cluster at an address; each run gets a share of a GPU and CPUs."""
    require(gpus is None or 0 <= gpus <= 1, "--gpus-each", "between 0 and 1: a run trains on one GPU", gpus)
    require(cpus > 0, "--cpus-each", "above 0", cpus)
    with contextlib.ExitStack() as held:
        temporary = held.enter_context(
            tempfile.TemporaryDirectory(prefix="pmae-", dir=os.environ.get("RAY_TMPDIR"), ignore_cleanup_errors=True)
        )
        ray = _connected(address, temporary)
        held.callback(ray.shutdown)
        workers = RayWorkers(ray, gpus, cpus)
        held.callback(workers.stop)
        yield workers


class RayWorkers:
    """As many runs at a time as fit on the nodes."""

    def __init__(self, ray: Any, gpus: float | None, cpus: float) -> None:
        self._ray = ray
        has_gpus = any(node.get("GPU") for node in self._nodes())
        self.gpus, self.cpus = float(has_gpus) if gpus is None else gpus, cpus
        self._runs: dict[Any, Path] = {}
        options = {"num_gpus": self.gpus, "num_cpus": cpus, "max_retries": RETRIES, "retry_exceptions": [Interrupted]}
        self._train = ray.remote(**options)(train_in)
        self._require_room()

    def free(self) -> bool:
        """Whether one more run fits."""
        return len(self._runs) < slots(self._nodes(), self.gpus, self.cpus)

    def begin(self, path: Path, config: Config, until: int | None) -> None:
        """Have a run trained by whichever node has room."""
        if not self.gpus and config.train.device == "auto":
            # A GPU that Ray did not hand out belongs to somebody else.
            config = replace(config, train__device="cpu")
        self._runs[self._train.remote(os.getcwd(), max(1, int(self.cpus)), path, config, until)] = path

    def wait(self) -> Path:
        """The folder of a run that has ended; an error of its own is raised as if it had been trained here."""
        while not (ended := self._ray.wait(list(self._runs), timeout=POLL_SECONDS)[0]):
            self._require_room()
        path, errors = self._runs.pop(ended[0]), self._ray.exceptions
        try:
            self._ray.get(ended[0])
        except errors.RayTaskError as error:
            if isinstance(error.cause, UserError | Interrupted):
                raise error.cause from None
            raise
        except errors.RayError as error:
            first, *_ = str(error).splitlines()
            raise UserError(f"{path} lost its worker {RETRIES + 1} times and was given up: {first}") from error
        return path

    def stop(self) -> None:
        """Let the runs that are left save themselves and end."""
        for run in self._runs:
            self._ray.cancel(run)
        if self._runs:
            self._ray.wait(list(self._runs), num_returns=len(self._runs), timeout=POLL_SECONDS)

    def _nodes(self) -> list[dict[str, float]]:
        return [node["Resources"] for node in self._ray.nodes() if node["Alive"]]

    def _require_room(self) -> None:
        nodes = self._nodes()
        # Sorted, for Ray names its nodes in any order.
        there = ", ".join(sorted(f"{node.get('GPU', 0):g} GPUs and {node.get('CPU', 0):g} CPUs" for node in nodes))
        rule = f"at most what a node has ({len(nodes)} here: {there})"
        asked = f"{self.gpus:g} GPUs and {self.cpus:g} CPUs"
        if not slots(nodes, self.gpus, self.cpus):
            raise UserError(f"--gpus-each and --cpus-each must be {rule}, got {asked}")


def slots(nodes: Sequence[Mapping[str, float]], gpus: float, cpus: float) -> int:
    """How many runs fit at a time; each stays on one node and on one of its GPUs."""
    return sum(min(_fit(node, "CPU", cpus), _fit(node, "GPU", gpus)) for node in nodes)


def train_in(home: str, threads: int, path: Path, config: Config, until: int | None) -> None:
    """`train` in the folder that the command was given in, so that a path means the same on every node."""
    require(os.path.isdir(home), "the folder of the command", "there on every node", home)
    torch.set_num_threads(threads)
    with contextlib.chdir(home):
        train(path, config, until)


def _fit(node: Mapping[str, float], kind: str, each: float) -> int:
    # In ten-thousandths, as Ray counts: in binary 1 holds 0.1 only nine times.
    there, parts = node.get(kind, 0), round(each * 10_000)
    if not parts:
        return 10_000
    return int(there) * (10_000 // parts) if kind == "GPU" else round(there * 10_000) // parts


def _connected(address: str, temporary: str) -> Any:
    """Ray, started here or met at an address."""
    for name, value in {**QUIET, **(LOOPBACK if address == LOCAL else {})}.items():
        os.environ.setdefault(name, value)
    try:
        ray: Any = import_module("ray")
    except ImportError as error:
        raise missing_extra("--ray", "sweep", error) from error
    local: dict[str, Any] = {"include_dashboard": False, "_temp_dir": temporary} if address == LOCAL else {}
    try:
        if address != LOCAL:
            _knock(ray, address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **local)
    except (OSError, RuntimeError, ValueError) as error:
        rule = "local, on a machine where Ray starts," if address == LOCAL else "local or the host:port of a cluster"
        raise UserError(f"--ray must be {rule}, got {address!r}: {' '.join(str(error).split())}") from error
    return ray


def _knock(ray: Any, address: str) -> None:
    """Fail in seconds where nobody listens."""
    host, _, port = address.partition(":")
    # Ray replaces the loopback address by this machine's own, unless it was told not to.
    host = ray.util.get_node_ip_address() if host in ("localhost", "127.0.0.1") else host
    socket.create_connection((host, int(port)), timeout=5).close()
