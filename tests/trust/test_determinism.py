"""The same seed gives the same bits on the CPU, whatever else happened in the process or differs between two."""

import hashlib
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from pmae import api
from pmae.cli import main
from pmae.config import Config, TrainConfig, replace
from pmae.data.images import Splits
from pmae.derive import resolve
from pmae.errors import UserError
from pmae.evaluate.protocols import only, preset
from pmae.runs import Run
from pmae.train.environment import same_bits
from pmae.train.loop import pretrain
from pmae.train.step import Plain

COMMAND = ("pretrain", "--data", "images.npy", "--data.layout", "NCHW", "--epochs", "2", "--device", "cpu")
WITHOUT_FIGURES = "import sys; from pmae import api, cli; api.save_figures = print; sys.exit(cli.main())"
SIZES = (("width", 16), ("depth", 1), ("heads", 2))
SMALL = ["--patch-size=4", *(f"--{part}.{key}={n}" for part in ("encoder", "decoder") for key, n in SIZES)]


def digests(run: Path) -> dict[str, str]:
    """What every file of tensors holds, as a checksum."""
    files = sorted(run.rglob("*.safetensors"))
    return {path.relative_to(run).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.usefixtures("no_figures")
def test_two_processes_agree_in_every_file(toy: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This one, whatever ran in it before, and a fresh one."""
    # On a CPU without bfloat16, torch multiplies otherwise from here on.
    torch.nn.functional.linear(*torch.ones(2, 64, 64).bfloat16())
    np.save(tmp_path / "images.npy", toy.train.images)
    monkeypatch.chdir(tmp_path)
    assert main([*COMMAND, *SMALL, "--out", "a"]) == 0
    # Another salt orders every set of strings otherwise.
    salt = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    environment = {**os.environ, "PYTHONHASHSEED": salt, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    command = [sys.executable, "-c", WITHOUT_FIGURES, *COMMAND, *SMALL, "--out", "b"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, second = digests(tmp_path / "a"), digests(tmp_path / "b")
    assert len(first) >= 5
    assert first == second
    assert Run(tmp_path / "a").results == Run(tmp_path / "b").results


@pytest.mark.parametrize("space", ["pca", "pixels", "cosine"])
def test_the_random_state_of_the_caller_neither_matters_nor_changes(
    tiny: Config, toy: Splits, tmp_path: Path, space: str
) -> None:
    small = replace(tiny, train__epochs=1, space__name=space, masking__ratio_schedule="uniform")
    config = resolve(small, len(toy.train), toy.train.shape)[0]
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed), np.random.seed(seed), random.seed(seed)
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
        found.append(digests(pretrain(config, toy, tmp_path / str(seed), quiet=True).path))
        assert torch.equal(torch.get_rng_state(), before[0])
        assert random.getstate() == before[1]
        assert np.random.get_state()[1].tolist() == before[2]  # type: ignore[index]
    assert found[0] == found[1]


def test_deterministic_kernels_are_asked_for_while_training_and_no_longer(
    tiny: Config, toy: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = resolve(replace(tiny, train__epochs=1), len(toy.train), toy.train.shape)[0]
    plain = digests(pretrain(config, toy, tmp_path / "plain", quiet=True).path)
    measure, asked = Plain.measure, []

    def note(*arguments: object) -> object:
        asked.append(torch.are_deterministic_algorithms_enabled() and torch.backends.cudnn.deterministic)
        return measure(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Plain, "measure", note)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    run = pretrain(replace(config, train__deterministic=True), toy, tmp_path / "asked", quiet=True)
    assert asked == [True] * 4
    assert not torch.are_deterministic_algorithms_enabled()
    # A CPU computes the same bits anyway.
    assert digests(run.path) == plain


def test_what_has_no_deterministic_kernel_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    words = r"train\.deterministic must be off for these settings on this device: put_ does not have a deterministic"
    with pytest.raises(UserError, match=words), same_bits(True):
        torch.zeros(4).put_(torch.tensor([1]), torch.ones(1))
    assert not torch.are_deterministic_algorithms_enabled()
    with pytest.raises(UserError, match=r"train\.engine must be plain or auto where train\.deterministic is on"):
        TrainConfig(deterministic=True, engine="graph")


@pytest.mark.usefixtures("no_figures")
def test_scores_repeat(tiny: Config, toy: Splits, tmp_path: Path) -> None:
    config = resolve(replace(tiny, train__epochs=1), len(toy.train), toy.train.shape)[0]
    run = pretrain(config, toy, tmp_path / "run", quiet=True)
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        protocols = only(preset("plain"), ["linear", "knn"])
        api.evaluate(run.path, protocols, toy, baselines=False, device="cpu")
        found.append([(score.protocol, score.pooling, score.metrics) for score in run.evaluations[-1].scores])
    assert found[0] == found[1]
    assert len(found[0]) >= 2
