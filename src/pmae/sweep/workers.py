"""Where runs are trained: in this process, in local worker processes, or as tasks on Ray."""

import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import torch

from pmae import api
from pmae.config import Config, replace
from pmae.errors import Interrupted, UserError, optional, require
from pmae.runs import Run
from pmae.sweep.find import splits
from pmae.train.environment import release_memory

POLL_SECONDS = 30.0
"""Seconds to wait for runs that were told to stop, and between two looks at whether a cluster still has room."""
RETRIES = 3  # how often Ray begins a run again whose worker died
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # One attempt to reach a cluster takes half a minute; twenty, Ray's own number, are a hang.
    "RAY_NUM_REDIS_GET_RETRIES": "1",
}
"""What Ray reads from the environment when it is imported: no telemetry, no endless attempts."""
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Makes Ray listen on 127.0.0.1 alone, as it does by itself on macOS: it takes code from whoever reaches its ports."""


def train(path: Path, config: Config, until: int | None = None) -> int | None:
    """Begin the run of a folder, or go on with the one that is there; returns the signal that stopped it, if any."""
    begun = (path / "config.json").exists()
    if begun:
        config = replace(Run(path).config, train__device=config.train.device, data__root=config.data.root)
    data = splits(config.data)
    # A run is stopped early to be compared with others, and without labels nothing compares.
    if until is not None and data.train.labels is None and config.probe.data is None:
        told = f"data must have labels for a search that stops runs early, got none in {config.data.source!r}"
        instead = "`--set data.labels=folders` takes subfolders for classes, `--set probe.data=labelled/` another set"
        raise UserError(f"{told}; {instead}")
    try:
        api.pretrain(config, data, path, resume=begun, quiet=True, until=until, figures=False)
    except Interrupted as stop:
        return stop.code - 128
    release_memory()
    return None


class Workers:
    """Where runs are trained: in this process, one after another; those below train several at a time elsewhere."""

    lost: tuple[type[Exception], ...] = ()  # what a future raises if its worker died

    def room(self) -> int:
        """How many runs may be trained at a time."""
        return 1

    def submit(self, path: Path, config: Config, until: int | None) -> "Future[int | None]":
        """Train the run of a folder; the result is the signal that stopped it, if one did."""
        future: Future[int | None] = Future()
        future.set_result(train(path, config, until))
        return future


class LocalWorkers(Workers):
    """Processes of this machine; each stays, so that a compiled step serves the next run of the same shapes."""

    lost = (BrokenProcessPool,)

    def __init__(self, count: int) -> None:
        require(count >= 1, "--at-once", "at least 1", count)
        threads = max(1, (os.cpu_count() or 1) // count)
        # A pool for each, since a process that dies breaks its pool.
        context = _start_method()
        self._pools = [ProcessPoolExecutor(1, context, _prepare, (threads,)) for _ in range(count)]
        self._given: dict[ProcessPoolExecutor, Future[int | None]] = {}
        self._others = set(multiprocessing.active_children())

    def room(self) -> int:
        return len(self._pools)

    def submit(self, path: Path, config: Config, until: int | None) -> "Future[int | None]":
        pool = next(pool for pool in self._pools if pool not in self._given or self._given[pool].done())
        self._given[pool] = pool.submit(train, path, config, until)
        return self._given[pool]

    def close(self) -> None:
        """Let runs that are left save themselves, and processes end."""
        for pool in self._pools:
            pool.shutdown(wait=False, cancel_futures=True)
        processes = [each for each in multiprocessing.active_children() if each not in self._others]
        for process in processes:
            process.terminate()  # by SIGTERM, on which training saves
        for process in processes:
            process.join(POLL_SECONDS)
            process.kill()


def _start_method() -> Any:
    """Children of a server that has imported what they need, and no CUDA, which no forked child may use."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pmae.train.loop", __name__])
    return context


def _prepare(threads: int) -> None:
    """In a new process: leave Ctrl-C to the command, and when that was killed save and end, which a pool would not."""

    def end_with_parent() -> None:
        if (parent := multiprocessing.parent_process()) is not None:
            parent.join()
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(POLL_SECONDS)
            os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)
    threading.Thread(target=end_with_parent, daemon=True).start()


class RayWorkers(Workers):
    """Tasks on Ray, which places them, several on a GPU if told so, and begins them again when their worker dies."""

    def __init__(self, ray: Any, gpus: float | None, cpus: float) -> None:
        self._ray = ray
        has_gpus = any(node.get("GPU") for node in self._nodes())
        self._gpus, self._cpus = float(has_gpus) if gpus is None else gpus, cpus
        self._tasks: list[Any] = []
        kinds = ("WorkerCrashedError", "NodeDiedError", "OutOfMemoryError", "LocalRayletDiedError", "ObjectLostError")
        self.lost = tuple(getattr(ray.exceptions, kind) for kind in kinds)
        options = {"num_gpus": self._gpus, "num_cpus": cpus, "max_retries": RETRIES, "retry_exceptions": [Interrupted]}
        self._train = ray.remote(**options)(_train_in)
        self.room()

    def room(self) -> int:
        """As many as fit on the nodes; refused if none does."""
        nodes = self._nodes()
        if count := slots(nodes, self._gpus, self._cpus):
            return count
        # Sorted, for Ray names its nodes in any order.
        there = ", ".join(sorted(f"{node.get('GPU', 0):g} GPUs and {node.get('CPU', 0):g} CPUs" for node in nodes))
        rule = f"at most what a node has ({len(nodes)} here: {there})"
        raise UserError(f"--gpus-each and --cpus-each must be {rule}, got {self._gpus:g} GPUs and {self._cpus:g} CPUs")

    def submit(self, path: Path, config: Config, until: int | None) -> "Future[int | None]":
        if not self._gpus and config.train.device == "auto":
            # A GPU that Ray did not hand out belongs to somebody else.
            config = replace(config, train__device="cpu")
        self._tasks.append(self._train.remote(os.getcwd(), max(1, int(self._cpus)), path, config, until))
        return self._tasks[-1].future()

    def close(self) -> None:
        """Let the runs that are left save themselves and end."""
        for task in self._tasks:
            self._ray.cancel(task)
        if self._tasks:
            self._ray.wait(self._tasks, num_returns=len(self._tasks), timeout=POLL_SECONDS)

    def _nodes(self) -> list[dict[str, float]]:
        return [node["Resources"] for node in self._ray.nodes() if node["Alive"]]


def slots(nodes: Sequence[Mapping[str, float]], gpus: float, cpus: float) -> int:
    """How many runs fit at a time; each stays on one node and on one of its GPUs."""
    total = 0
    for node in nodes:
        by_cpu = int(node.get("CPU", 0) / cpus + 1e-6)  # a little more: in binary 1 holds 0.1 only nine times
        total += min(by_cpu, int(node.get("GPU", 0)) * int(1 / gpus + 1e-6)) if gpus else by_cpu
    return total


def _train_in(home: str, threads: int, path: Path, config: Config, until: int | None) -> None:
    """`train` in the folder that the command was given in, so that a path means the same on every node."""
    require(os.path.isdir(home), "the folder of the command", "there on every node", home)
    torch.set_num_threads(threads)
    with contextlib.chdir(home):
        stopped = train(path, config, until)
    if stopped:  # A node that is taken away tells its runs to stop: Ray begins them elsewhere.
        raise Interrupted("Ray begins it elsewhere", stopped)


@contextlib.contextmanager
def ray_workers(address: str, gpus: float | None = None, cpus: float = 1) -> Iterator[RayWorkers]:
    """Workers on this machine (`local`) or on the cluster at an address; each run gets a share of a GPU and CPUs."""
    require(gpus is None or 0 <= gpus <= 1, "--gpus-each", "between 0 and 1: a run trains on one GPU", gpus)
    require(cpus > 0, "--cpus-each", "above 0", cpus)
    folder, is_local = os.environ.get("RAY_TMPDIR"), address == "local"
    os.environ.update({k: v for k, v in (QUIET | (LOOPBACK if is_local else {})).items() if k not in os.environ})
    ray = optional("--ray", "sweep", "ray")
    with contextlib.ExitStack() as held:
        temporary = tempfile.TemporaryDirectory(prefix="pmae-", dir=folder, ignore_cleanup_errors=True)
        local = {"include_dashboard": False, "_temp_dir": held.enter_context(temporary)} if is_local else {}
        try:
            if not is_local:
                # Fail in seconds where nobody listens; of the loopback address Ray makes this machine's own.
                host, _, port = address.partition(":")
                host = ray.util.get_node_ip_address() if host in ("localhost", "127.0.0.1") else host
                socket.create_connection((host, int(port)), timeout=5).close()
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **local)
        except (OSError, RuntimeError, ValueError) as error:
            rule = "local, on a machine where Ray starts," if is_local else "local or the host:port of a cluster"
            raise UserError(f"--ray must be {rule}, got {address!r}: {' '.join(str(error).split())}") from error
        held.callback(ray.shutdown)
        workers = RayWorkers(ray, gpus, cpus)
        held.callback(workers.close)
        yield workers
