"""What happens around a run: readers that go away, terminals that close, folders that are moved, other images."""

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from pmae import api
from pmae.cli import main
from pmae.config import Config, replace
from pmae.data.images import ImageSet, Splits
from pmae.derive import resolve
from pmae.errors import Interrupted, UserError
from pmae.files import write_json
from pmae.runs import Run
from pmae.train.loop import Pretraining, pretrain
from pmae.train.setup import locked

SMALL = (
    "--epochs 3 --batch-size 16 --encoder.width 16 --encoder.depth 1 --encoder.heads 2 --patch-size 4 --decoder small"
)
SMALL += " --decoder.width 16 --decoder.depth 1 --decoder.heads 2 --device cpu --train.log-every 1 --probe.every 100"

WITHOUT_FIGURES = "-c 'import sys; from pmae import api, cli; api.save_figures = lambda run: []; sys.exit(cli.main())'"


@pytest.fixture(scope="module")
def array(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "images.npy"
    np.save(path, np.random.default_rng(0).integers(0, 255, (60, 8, 8), dtype=np.uint8))
    return path


def shell(command: str, array: Path, out: Path, program: str = WITHOUT_FIGURES) -> subprocess.CompletedProcess[str]:
    """`pmae pretrain` on small images with something around it; the exit code is that of the training."""
    training = f"{sys.executable} {program} pretrain --data {array} --out {out} {SMALL}"
    script = f"set -o pipefail; {command.format(training)}"
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("command", ["{} 2>&- | head -1", "{} >&- 2>/dev/full", "{} > /dev/full 2>&-"])
def test_a_reader_that_goes_away_does_not_end_training(command: str, array: Path, tmp_path: Path) -> None:
    done = shell(command, array, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    run = Run(tmp_path / "run")
    assert run.results["pretrain"]["epoch"] == 3
    assert [line["step"] for line in run.metrics() if "loss" in line] == list(range(1, 10))


def test_an_error_is_told_by_its_exit_code_though_nobody_can_read_it(array: Path, tmp_path: Path) -> None:
    assert shell("{} --epochs 0 >&- 2>&-", array, tmp_path / "run", "-m pmae").returncode == 2
    assert not (tmp_path / "run").exists()


def stop_at(step: int, number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real signal to this process while a step is taken."""
    original = Pretraining.inputs

    def inputs(self: Pretraining, *arguments: object) -> object:
        if self.step == step:
            os.kill(os.getpid(), number)
        return original(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Pretraining, "inputs", inputs)


@pytest.fixture
def config(tiny: Config, toy: Splits) -> Config:
    return resolve(replace(tiny, train__epochs=2), len(toy.train), toy.train.shape)[0]


def test_a_terminal_that_closes_saves_and_leaves(
    config: Config, toy: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGHUP)
    stop_at(4, signal.SIGHUP, monkeypatch)
    with pytest.raises(Interrupted) as stop:
        pretrain(config, toy, tmp_path / "run", quiet=True)
    assert stop.value.code == 129
    assert Run(tmp_path / "run").checkpoint().name == "epoch_0001_step_000001"
    assert signal.getsignal(signal.SIGHUP) is before


def test_under_nohup_a_run_goes_on(
    config: Config, toy: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop_at(4, signal.SIGHUP, monkeypatch)
    try:
        assert pretrain(config, toy, tmp_path / "run", quiet=True).results["pretrain"]["epoch"] == 2
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_disk_too_full_to_hold_a_folder_is_one_sentence(
    config: Config, toy: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "truncate", full)  # as the lock is about to name its holder
    with pytest.raises(UserError, match="the disk is full"):
        pretrain(config, toy, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.parametrize("what", ["renamed", "deleted", "replaced"])
def test_a_folder_that_is_moved_while_it_trains_is_one_sentence(
    config: Config, toy: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    out, original = tmp_path / "run", Pretraining.inputs

    def inputs(self: Pretraining, *arguments: object) -> object:
        if self.step == 5:
            out.rename(tmp_path / "other")
            if what == "deleted":
                shutil.rmtree(tmp_path / "other")
            if what == "replaced":
                out.mkdir()
                (out / "mine.txt").write_text("mine")
        return original(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Pretraining, "inputs", inputs)
    with pytest.raises(UserError, match=r"out must be left where it is .* renamed, deleted or replaced, .*run'"):
        pretrain(config, toy, out, quiet=True)
    if what == "replaced":
        assert [path.name for path in out.rglob("*")] == ["mine.txt"]
    else:
        assert not out.exists()
    if what == "renamed":
        monkeypatch.setattr(Pretraining, "inputs", original)
        done = pretrain(config, toy, tmp_path / "other", resume=True, quiet=True)
        assert done.results["pretrain"]["epoch"] == 2


def test_other_images_of_the_same_shapes_are_refused_and_old_folders_accepted(
    config: Config, toy: Splits, tmp_path: Path
) -> None:
    run = pretrain(config, toy, tmp_path / "run", quiet=True)
    others = Splits(toy.name, ImageSet(toy.train.images + 1, toy.train.labels, toy.train.classes), None, toy.test)
    with pytest.raises(UserError, match="data must be the images that the run began with, got others"):
        pretrain(config, others, run.path, resume=True, quiet=True)
    environment = run.environment
    del environment["data"]["fingerprint"], environment["threads"]
    write_json(run.path / "environment.json", environment)
    assert pretrain(config, others, run.path, resume=True, quiet=True).results["pretrain"]["epoch"] == 2


def test_another_number_of_threads_is_told_at_resume(
    config: Config, toy: Splits, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = torch.get_num_threads()
    run = pretrain(config, toy, tmp_path / "run", quiet=True)
    assert run.environment["threads"] == threads
    torch.set_num_threads(threads + 1)
    try:
        pretrain(config, toy, run.path, resume=True)
    finally:
        torch.set_num_threads(threads)
    said = f"the run began with {threads} threads and goes on with {threads + 1}: results agree to rounding"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("value", [0.0, 7.0, 1e-310])
def test_images_that_do_not_vary_leave_no_folder(config: Config, tmp_path: Path, value: float) -> None:
    images = ImageSet(np.full((64, 1, 16, 16), value))
    with pytest.raises(UserError, match="images that vary"):
        api.pretrain(replace(config, encoder__patch_size=4), Splits("flat", images), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_paths_and_seeds_that_nothing_can_take_are_one_sentence(
    array: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    wrong = {
        ("--out", "x" * 300): "out must be a path of names of at most 255 bytes, got 'one of 300'",
        ("--out", "x/" * 2500): "out must be a path of at most 3,900 bytes",
        ("--out", "dangling"): "out must be a path whose links lead somewhere, got 'dangling'",
        ("--out", "dangling/run"): "out must be a path whose links lead somewhere, got 'dangling'",
        ("--out", ""): "out must be a path on this machine, got ''",
        ("--config", ""): "config must be a path on this machine, got ''",
        ("--seed", str(2**64)): "--seed must be below 2**63, got a number of 65 bits",
    }
    for arguments, message in wrong.items():
        assert main(["pretrain", "--data", str(array), *arguments]) == 2
        said = capsys.readouterr().err.splitlines()
        assert len(said) == 1
        assert message in said[0]
    assert [path.name for path in tmp_path.iterdir()] == ["dangling"]


@pytest.mark.usefixtures("no_figures")
def test_a_tilde_is_ones_home(
    array: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert main(["pretrain", "--data", str(array), "--out=~/runs/a", *SMALL.split(), "--epochs", "1"]) == 0
    assert (tmp_path / "runs" / "a" / "config.json").exists()
    assert not (tmp_path / "~").exists()


def test_where_the_system_has_no_locks_a_folder_is_taken_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with pytest.warns(UserWarning, match="cannot be locked: start no second process on it"), locked(tmp_path):
        assert (tmp_path / ".lock").exists()
    assert not list(tmp_path.iterdir())
