"""What other systems lack is hidden, and everything still imports and trains; their names are used in one place."""

import ast
import os
import signal
import sys
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
from tests.commands import started
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import pmae
from pmae.config import Config, replace
from pmae.data.images import Splits
from pmae.derive import resolve
from pmae.errors import UserError
from pmae.spaces import base
from pmae.system import keep_freed_memory
from pmae.train import loop, setup, step
from pmae.train.environment import pick_device

SOURCE = Path(pmae.__file__).parent
MODULES = {"fcntl", "grp", "msvcrt", "pwd", "resource", "termios", "winreg"}
NAMES = {
    "os": {"fork", "getuid", "geteuid", "killpg", "setsid", "sched_getaffinity", "sysconf", "mkfifo", "uname"},
    "signal": {"SIGKILL", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM", "alarm", "pause", "setitimer"},
}


def test_what_not_every_system_has_is_named_in_one_place() -> None:
    found = []
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                found += [(file.name, alias.name) for alias in node.names if alias.name in MODULES]
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                found += [(file.name, node.attr)] if node.attr in NAMES.get(node.value.id, ()) else []
    assert {file for file, _ in found} == {"system.py"}


def keeping() -> None:
    """Prints the page faults of twenty steps before and after freed memory is kept."""

    def step() -> torch.Tensor:
        return torch.ones(2**24).add(1).sum()  # 64 MB, above what the allocator keeps by itself

    def faults() -> int:
        import resource

        for _ in range(10):  # until every block has found its place
            step()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(20):
            step()
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    torch.set_num_threads(1)
    given_back = faults()
    keep_freed_memory()
    print(given_back, faults(), flush=True)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other allocators")
def test_memory_that_a_step_frees_is_there_for_the_next_one(tmp_path: Path) -> None:
    process = started(keeping, said=str(tmp_path / "said"))
    process.join(120)
    said = (tmp_path / "said").read_text()
    assert process.exitcode == 0, said
    given_back, kept = map(int, said.split())
    # A block whose place a smaller one has taken is made anew: now and then one, not two at every step. Where torch or
    # the system brings another allocator than glibc's, nothing may be given back in the first place.
    assert kept < max(1000, given_back / 8)


def test_the_gpu_of_a_mac_is_a_choice_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(UserError, match="must be a device of this machine, got 'mps'"):
        pick_device("mps")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert pick_device("mps").type == "mps"
    with pytest.raises(UserError, match="auto, cpu, cuda, cuda:N or mps"):
        pick_device("mps:1")


class NoFloat64(TorchDispatchMode):
    """Refuses what a device without float64 would refuse."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        wide = [each for each in tree_leaves(found) if isinstance(each, torch.Tensor) and each.dtype == torch.float64]
        assert not wide, f"{func} made float64"
        return found


@pytest.mark.parametrize("space", [{}, {"space__name": "cosine", "space__grouped": True}], ids=["pca", "grouped"])
def test_steps_need_no_float64_where_a_device_has_none(
    space: dict[str, Any], tiny: Config, toy: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = resolve(replace(tiny, train__epochs=1, **space), 128, (3, 16, 16), gpu=False)[0]
    plain = loop.pretrain(config, toy, tmp_path / "plain", quiet=True)
    for module in (loop, step, base):
        monkeypatch.setattr(module, "lacks_float64", lambda device: True)
    epoch = loop.Pretraining._epoch

    def without(*given: Any) -> None:
        with NoFloat64():
            epoch(*given)

    monkeypatch.setattr(loop.Pretraining, "_epoch", without)
    other = loop.pretrain(config, toy, tmp_path / "other", quiet=True)
    weights = [(run.checkpoint() / "encoder.safetensors").read_bytes() for run in (plain, other)]
    assert weights[0] == weights[1]
    assert other.results["pretrain"]["held_out_r2"] == plain.results["pretrain"]["held_out_r2"]
    monkeypatch.setattr(setup, "lacks_float64", lambda device: True)
    learned = resolve(replace(tiny, space__name="learned"), 128, (3, 16, 16), gpu=False)[0]
    with pytest.raises(UserError, match=r"train.device must be one with float64, as cpu, for the space 'learned'"):
        loop.pretrain(learned, toy, tmp_path / "learned", quiet=True)
    assert not (tmp_path / "learned").exists()


@pytest.mark.usefixtures("no_figures")
def test_no_global_state_is_left_changed(tiny: Config, tmp_path: Path) -> None:
    def state() -> list[Any]:
        handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
        numbers = [torch.get_num_threads(), torch.get_float32_matmul_precision(), torch.get_default_dtype()]
        cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
        flags = [cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic, matmul.allow_tf32, matplotlib.get_backend()]
        seeds = [torch.get_rng_state().tolist(), str(np.random.get_state())]
        return [*handlers, *numbers, *flags, *seeds, sys.stdout, os.getcwd(), torch.is_grad_enabled()]

    images = np.random.default_rng(0).integers(0, 255, (40, 16, 16), dtype=np.uint8)
    np.save(tmp_path / "images.npy", images)
    before = state()
    run = pmae.pretrain(replace(tiny, train__epochs=1), images, tmp_path / "run", quiet=True)
    pmae.embed(run, tmp_path / "images.npy", tmp_path / "features.npz", device="cpu")
    pmae.export(run, "torch", tmp_path / "exported")
    changed = [n for n, (one, other) in enumerate(zip(before, state(), strict=True)) if one != other]
    assert changed == []
