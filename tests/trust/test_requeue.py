"""The script of docs/clusters.md under a scheduler that stops it: requeued, it ends with the weights of a whole run."""

import contextlib
import os
import re
import stat
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from tests.commands import forked

from pmae import api
from pmae.config import Config, DecoderConfig, EncoderConfig, TrainConfig
from pmae.config_file import to_dict
from pmae.files import write_json
from pmae.runs import Run, read_config

PAGE = Path(__file__).parents[2] / "docs" / "clusters.md"
SRUN = '#!/bin/bash\necho "$@"\nread code\nexit $code\n'
"""A step of a job: says what is to be run, is told how that ended."""
SCONTROL = '#!/bin/bash\necho "$@" >> requeued\n'


def scheduler(folder: Path) -> Path:
    """The page's script, and programs under the names that it calls."""
    script = next(block for block in re.findall(r"```text\n(.*?)```", PAGE.read_text(), re.DOTALL) if "sbatch" in block)
    settings = "--config config.json --data images.npy"
    assert "--data digits" in script
    (folder / "train.sbatch").write_text(
        script.replace("--data digits", '$([ -n "$resume" ] || echo ' + settings + ")")
    )
    (folder / "bin").mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(stat.S_IRWXU)
    return folder


def submit(folder: Path, number: int, after: int) -> int:
    """One start of the job, warned by a signal after so many lines of metrics, or left alone."""
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "SLURM_JOB_ID": "7"}
    pipe = subprocess.PIPE
    job = subprocess.Popen(["bash", "train.sbatch"], cwd=folder, env=environment, stdin=pipe, stdout=pipe, text=True)
    assert job.stdout is not None
    program, *arguments = job.stdout.readline().split()
    assert program == "pmae"
    code = step(folder, arguments, number, after)
    job.communicate(f"{code}\n")
    assert job.returncode == code
    assert code in (0, 128 + number), (folder / "said").read_text()
    return code


def step(folder: Path, arguments: list[str], number: int, after: int) -> int:
    """The exit code of a command in this folder that is sent a signal when it has written so many lines of metrics."""
    with contextlib.chdir(folder):
        process = forked(arguments, "said", figures=False)
    metrics = folder / "runs" / "slurm" / "metrics.jsonl"
    most = after + (count(metrics) if number else 0)
    while number and process.is_alive():
        time.sleep(0.01)
        if count(metrics) > most:
            os.kill(process.pid or 0, number)
            process.join(30)  # the deadline: a scheduler kills what is still there
            process.kill()
            break
    process.join()
    code = process.exitcode
    assert code is not None
    return code if code >= 0 else 128 - code


def count(metrics: Path) -> int:
    return len(metrics.read_bytes().splitlines()) if metrics.exists() else 0


def begin(folder: Path, epochs: int) -> None:
    images = np.random.default_rng(0).integers(0, 255, (64, 8, 8), dtype=np.uint8)
    np.save(folder / "images.npy", images)
    config = Config(
        encoder=EncoderConfig(patch_size=4, width=16, depth=1, heads=2),
        decoder=DecoderConfig("small", width=16, depth=1, heads=2),
        train=TrainConfig(epochs=epochs, batch_size=8, device="cpu", log_every=1, checkpoint_every=epochs),
    )
    write_json(folder / "config.json", to_dict(config))


def whole(folder: Path) -> Run:
    config = read_config(folder / "config.json")
    return api.pretrain(config, np.load(folder / "images.npy"), folder / "whole", quiet=True, figures=False)


def weights(run: Run) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in run.checkpoint().glob("*.safetensors")}


def lines(run: Run) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in run.metrics() if "loss" in line]


def test_a_job_that_is_warned_saves_is_requeued_and_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    begin(scheduler(tmp_path), 20)
    assert submit(tmp_path, 10, 9) == 138
    assert submit(tmp_path, 0, 0) == 0
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"
    one, other = whole(tmp_path), Run(tmp_path / "runs" / "slurm")
    assert lines(one) == lines(other)
    assert weights(one) == weights(other)


@pytest.mark.slow
def test_twenty_requeues_lose_nothing(tmp_path: Path) -> None:
    begin(scheduler(tmp_path), 60)
    codes = [submit(tmp_path, (10, 15)[n % 2], 3 + 7 * n % 11) for n in range(20)]
    assert codes == [138, 143] * 10
    assert submit(tmp_path, 0, 0) == 0
    one, other = whole(tmp_path), Run(tmp_path / "runs" / "slurm")
    assert lines(one) == lines(other)
    assert weights(one) == weights(other)
