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
from pmae.config import Config, replace
from pmae.data.images import Splits
from pmae.derive import resolve
from pmae.evaluate.protocols import only, preset
from pmae.runs import Run
from pmae.train.loop import pretrain

COMMAND = ("pretrain", "--data", "images.npy", "--data.layout", "NCHW", "--epochs", "2", "--device", "cpu")
SIZES = (("width", 16), ("depth", 1), ("heads", 2))
SMALL = ["--patch-size=4", *(f"--{part}.{key}={n}" for part in ("encoder", "decoder") for key, n in SIZES)]


def digests(run: Path) -> dict[str, str]:
    """What every file of tensors holds, as a checksum."""
    files = sorted(run.rglob("*.safetensors"))
    return {path.relative_to(run).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_two_processes_agree_in_every_file(toy: Splits, tmp_path: Path) -> None:
    np.save(tmp_path / "images.npy", toy.train.images)
    for name, salt in (("a", "1"), ("b", "2")):
        # Another salt orders every set of strings otherwise.
        environment = {**os.environ, "PYTHONHASHSEED": salt, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pmae", *COMMAND, *SMALL, "--out", name]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    first, second = digests(tmp_path / "a"), digests(tmp_path / "b")
    assert len(first) >= 5
    assert first == second
    assert Run(tmp_path / "a").results == Run(tmp_path / "b").results


@pytest.mark.parametrize("space", ["pca", "pixels", "cosine"])
def test_the_random_state_of_the_caller_neither_matters_nor_changes(
    tiny: Config, toy: Splits, tmp_path: Path, space: str
) -> None:
    small = replace(tiny, train__epochs=1, space__name=space, masking__ratio="uniform")
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


def test_scores_repeat(tiny: Config, toy: Splits, tmp_path: Path) -> None:
    config = resolve(replace(tiny, train__epochs=1), len(toy.train), toy.train.shape)[0]
    run = pretrain(config, toy, tmp_path / "run", quiet=True)
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        protocols = only(preset("plain"), ["linear", "knn"])
        api.evaluate(run.path, protocols, toy, baselines=False, device="cpu")
        suites = run.results["evaluation"].values()
        found.append(
            [(entry["protocol"], entry["pooling"], entry["metrics"]) for s in suites for entry in s["results"]]
        )
    assert found[0] == found[1]
    assert len(found[0]) >= 2
