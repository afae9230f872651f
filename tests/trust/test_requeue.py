"""The script of docs/clusters.md under a scheduler that stops it: requeued, it ends with the weights of a whole run."""

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pmae import api
from pmae.config import Config, DecoderConfig, EncoderConfig, TrainConfig
from pmae.config_file import to_dict
from pmae.files import write_json
from pmae.runs import Run, read_config

PAGE = Path(__file__).parents[2] / "docs" / "clusters.md"
SRUN = """#!{python}
# Runs a command as a step of a job; sends it a signal when it has written so many lines of metrics.
import os, pathlib, random, signal, subprocess, sys, time
without_figures = "import sys; from pmae import api, cli; api.save_figures = lambda run: []; sys.exit(cli.main())"
process = subprocess.Popen([sys.executable, "-c", without_figures, *sys.argv[2:]])
metrics, count = pathlib.Path("runs/slurm/metrics.jsonl"), lambda: len(metrics.read_bytes().splitlines())
begun, number = (count() if metrics.exists() else 0), int(os.environ["WARNING_SIGNAL"])
while process.poll() is None and number:
    time.sleep(0.01)
    if metrics.exists() and count() > begun + int(os.environ["AFTER_LINES"]):
        process.send_signal(number)
        try:
            process.wait(30)  # the deadline: a scheduler kills what is still there
        except subprocess.TimeoutExpired:
            process.kill()
        break
sys.exit(process.wait() if process.wait() >= 0 else 128 - process.wait())
"""
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
    for name, text in (("srun", SRUN.format(python=sys.executable)), ("scontrol", SCONTROL)):
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(stat.S_IRWXU)
    return folder


def submit(folder: Path, number: int, after: int) -> int:
    """One start of the job, warned by a signal after so many lines of metrics, or left alone."""
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    variables = {"PATH": path, "SLURM_JOB_ID": "7", "WARNING_SIGNAL": str(number), "AFTER_LINES": str(after)}
    command = ["bash", "train.sbatch"]
    done = subprocess.run(command, cwd=folder, env={**os.environ, **variables}, capture_output=True, text=True)
    assert done.returncode in (0, 128 + number), done.stderr
    return done.returncode


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
