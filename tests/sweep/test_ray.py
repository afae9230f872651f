"""Sweeps on Ray, on a real cluster: two nodes on 127.0.0.1, each with its own scheduler and worker processes."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from pmae.cli import main
from pmae.runs import Run
from pmae.sweep.workers import QUIET, slots

from .test_grid import SMALL, rows, sweep

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
LOOPBACK = {**QUIET, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Makes Ray stay on 127.0.0.1 instead of looking for an address that others can reach."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of two nodes with one CPU each; the second says that it has a GPU too."""
    from ray.cluster_utils import Cluster

    # Sockets lie in this folder, and their paths may not be long.
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        for name, value in {**LOOPBACK, "RAY_TMPDIR": folder}.items():
            patch.setenv(name, value)
        node = {"num_cpus": 1, "node_ip_address": "127.0.0.1", "include_dashboard": False}
        started = Cluster(initialize_head=True, head_node_args=node)
        try:
            started.add_node(**node, num_gpus=1)
            yield started.address
        finally:
            started.shutdown()


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "pmae", "sweep", *map(str, arguments), *SMALL]


def begin(*arguments: object) -> subprocess.Popen[str]:
    environment = os.environ | LOOPBACK | {"OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(command(*arguments), stdout=pipe, stderr=pipe, text=True, env=environment)


def until(found: Callable[[], Any], process: subprocess.Popen[str], seconds: float = 300) -> Any:
    """What is found, as soon as it is, while a process lives."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := found():
            return value
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    raise AssertionError("this took too long")


def holders(folder: Path) -> dict[Path, int]:
    """The processes that train right now, by run folder."""
    found = {lock.parent: lock.read_text().split() for lock in folder.glob("runs/*/.lock")}
    return {path: int(words[0]) for path, words in found.items() if words}


def parent(process: int) -> int:
    """The process that started another: Ray's scheduler of a node, for a worker."""
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def without_speed(path: Path) -> list[dict[str, str]]:
    return [{key: value for key, value in row.items() if key != "images/s"} for row in rows(path)]


@pytest.mark.slow
def test_a_killed_worker_goes_on_from_its_checkpoint_and_equals_one_that_was_not_killed(
    root: Path, tmp_path: Path, cluster: str
) -> None:
    options = ["ratio", "--data", "dermamnist", "--ratios", 0.1, 0.4, "--epochs", 40, "--root", root]
    options += ["--set", "train.checkpoint_every=5", "probe.every=20"]
    process = begin(*options, "--out", tmp_path / "ray", "--ray", cluster)
    try:
        both = until(lambda: found if len(found := holders(tmp_path / "ray")) == 2 else None, process)
        assert len({parent(number) for number in both.values()}) == 2, "each node has one CPU, so each trains one run"
        path, number = next(iter(both.items()))
        until(lambda: (path / "checkpoints/epoch_0005/state.json").exists(), process)
        os.kill(number, signal.SIGKILL)
        before = (path / "metrics.jsonl").read_text().splitlines()
        again = until(lambda: holders(tmp_path / "ray").get(path, number) != number, process)
        out, errors = process.communicate(timeout=300)
    finally:
        process.kill()
    assert (process.returncode, again) == (0, True), errors
    assert "[2/2]" in out
    # The lines up to the checkpoint hold the speed of the first worker: nothing before it was trained again.
    kept = [line for line in before if line.startswith('{"epoch": 5.0,')]
    assert kept
    assert before[: before.index(kept[0])] == (path / "metrics.jsonl").read_text().splitlines()[: before.index(kept[0])]
    assert sweep(*options, "--out", tmp_path / "here") == 0
    assert without_speed(tmp_path / "ray/sweep.csv") == without_speed(tmp_path / "here/sweep.csv")
    for name in ("encoder", "decoder", "optimizer"):
        file = f"checkpoints/epoch_0040/{name}.safetensors"
        for run in both:
            assert (run / file).read_bytes() == (tmp_path / "here/runs" / run.name / file).read_bytes()


def test_more_than_this_machine_has_is_refused_with_the_numbers(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["ratio", 0.2, "--data", "dermamnist", "--root", root, "--out", tmp_path / "out", "--ray", "local"]
    with tempfile.TemporaryDirectory() as folder:
        for name, value in {**LOOPBACK, "RAY_TMPDIR": folder}.items():
            monkeypatch.setenv(name, value)
        assert sweep(*options, "--cpus-each", 4000) == 2
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    assert "(1 here: 0 GPUs and " in errors
    assert errors.endswith("CPUs), got 0 GPUs and 4000 CPUs\n")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_more_than_a_node_has_is_refused_with_the_numbers(root: Path, tmp_path: Path, cluster: str) -> None:
    options = ["ratio", 0.2, "--data", "dermamnist", "--root", root, "--out", tmp_path / "out", "--ray", cluster]
    process = begin(*options, "--gpus-each", 0.5, "--cpus-each", 4)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 2
    assert errors.count("\n") == 1
    assert "(2 here: 0 GPUs and 1 CPUs, 1 GPUs and 1 CPUs), got 0.5 GPUs and 4 CPUs" in errors
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_small_runs_share_a_gpu_and_asha_stops_the_same_ones(root: Path, tmp_path: Path, cluster: str) -> None:
    options = ["ratio", "--data", "dermamnist", "--ratios", 0.1, 0.3, 0.5, "--epochs", 150, "--root", root]
    options += ["--search", "asha", "--set", "probe.every=50"]
    shares = ["--gpus-each", 0.25, "--cpus-each", 0.25]
    process = begin(*options, "--out", tmp_path / "ray", "--ray", cluster, *shares)
    together = until(lambda: found if len(found := holders(tmp_path / "ray")) == 3 else None, process)
    assert len({parent(number) for number in together.values()}) == 1, "one node has a GPU"
    assert process.wait(300) == 0
    assert sweep(*options, "--out", tmp_path / "here") == 0
    assert without_speed(tmp_path / "ray/sweep.csv") == without_speed(tmp_path / "here/sweep.csv")


@pytest.mark.slow
def test_on_this_machine_ctrl_c_saves_every_run_and_leaves_nothing_behind(root: Path, tmp_path: Path) -> None:
    options = ["ratio", "--data", "dermamnist", "--ratios", 0.1, 0.4, "--epochs", 400, "--root", root]
    options += ["--set", "train.checkpoint_every=400", "probe.every=400", "--out", tmp_path, "--ray", "local"]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)
        process = begin(*options)
        until(lambda: len(list(tmp_path.glob("runs/*/metrics.jsonl"))) == 2, process)
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 130
        assert not list(Path(folder).iterdir())
    runs = [Run(path) for path in (tmp_path / "runs").iterdir()]
    assert [len(run.checkpoints()) for run in runs] == [1, 1]
    assert not holders(tmp_path)


@pytest.mark.parametrize(
    ("nodes", "gpus", "cpus", "count"),
    [
        ([{"CPU": 8.0, "GPU": 1.0}], 0.25, 1, 4),
        ([{"CPU": 3.0, "GPU": 1.0}], 0.25, 1, 3),
        ([{"CPU": 8.0, "GPU": 3.0}], 0.75, 1, 3),
        ([{"CPU": 8.0, "GPU": 2.0}, {"CPU": 64.0}], 1, 2, 2),
        ([{"CPU": 8.0, "GPU": 2.0}, {"CPU": 64.0}], 0, 2, 36),
        ([{"CPU": 1.0, "GPU": 1.0}], 0.1, 0.1, 10),
        ([{"memory": 1.0}], 0, 1, 0),
    ],
)
def test_runs_are_packed_by_node_and_by_card(
    nodes: list[dict[str, float]], gpus: float, cpus: float, count: int
) -> None:
    assert slots(nodes, gpus, cpus) == count


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ray", "127.0.0.1:1"], "--ray must be local or the host:port of a cluster, got '127.0.0.1:1': "),
        (["--ray", "here"], "--ray must be local or the host:port of a cluster, got 'here': "),
        (["--ray", "local", "--gpus-each", "2"], "--gpus-each must be between 0 and 1: a run trains on one GPU, got 2"),
        (["--ray", "local", "--cpus-each", "0"], "--cpus-each must be above 0, got 0"),
        (["--gpus-each", "0.5"], "--gpus-each must be given with --ray, which hands them out, got 0.5"),
    ],
)
def test_a_mistake_is_one_line_within_seconds(
    options: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in LOOPBACK.items():
        monkeypatch.setenv(name, value)
    began = time.monotonic()
    assert sweep("ratio", 0.2, "--out", tmp_path / "out", *options) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert time.monotonic() - began < 20
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("arguments", [["sweep", "ratio", "0.2"], ["paper", "ratio", "--datasets", "cifar10"]])
def test_without_ray_the_extra_is_named(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in LOOPBACK.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main([*arguments, "--out", str(tmp_path / "out"), "--ray", "local"]) == 2
    assert "--ray needs ray, which is not installed: pip install 'pmae[sweep]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
