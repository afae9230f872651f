"""Epochs from minutes: the arithmetic, a run whose length a trial settles, and what is refused."""

import os
import re
import signal
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from pmae import api
from pmae.budget import Pace
from pmae.cli import main
from pmae.config import Config, replace
from pmae.data.images import Splits
from pmae.errors import UserError
from pmae.plugins import TABLES
from pmae.runs import Run

SMALL = [
    *("--encoder.width", "16", "--encoder.depth", "1", "--encoder.heads", "2"),
    *("--decoder.width", "16", "--decoder.depth", "1", "--decoder.heads", "2"),
    *("--device", "cpu", "--train.precision", "float32"),
]


@pytest.fixture
def trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def array(tmp_path: Path) -> Path:
    np.save(tmp_path / "images.npy", np.random.default_rng(0).integers(0, 255, (60, 16, 16, 3), dtype=np.uint8))
    return tmp_path / "images.npy"


def test_a_run_is_saved_and_looked_at_ten_times_or_a_few_more() -> None:
    pace = Pace(fixed=10, epoch=4, save=0.5, look=1.5)
    assert pace.seconds(1) == 10 + 4 + 2
    assert pace.seconds(19) == 10 + 19 * 4 + 19 * 2
    assert pace.seconds(20) == 10 + 20 * 4 + 10 * 2
    assert pace.seconds(25) == 10 + 25 * 4 + 13 * 2  # after every other epoch and the last
    assert pace.seconds(100, save_every=1) == 10 + 400 + 100 * 0.5 + 10 * 1.5
    assert pace.seconds(100, look_every=200) == 10 + 400 + 10 * 0.5 + 1.5


def test_the_most_epochs_are_those_of_a_search_over_all() -> None:
    pace = Pace(fixed=10, epoch=4, save=0.5, look=1.5)
    assert [pace.most_epochs(seconds) for seconds in (0, 15.9, 16, 109.9, 110, 430)] == [0, 0, 1, 16, 20, 100]
    for every in [(None, None), (1, None), (None, 3), (7, 1)]:
        for seconds in np.linspace(0, 300, 61):
            fits = [n for n in range(1, 100) if pace.seconds(n, *every) <= seconds]
            assert pace.most_epochs(seconds, *every) == max(fits, default=0)


@pytest.mark.usefixtures("no_figures")
def test_minutes_make_an_ordinary_run_that_its_epochs_repeat(
    array: Path, tmp_path: Path, trials: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    callbacks = set(TABLES["callback"])
    given = ["pretrain", "--data", str(array), *SMALL]
    assert main([*given, "--minutes", "0.1", "--out", str(tmp_path / "run")]) == 0
    printed, run = capsys.readouterr().out, Run(tmp_path / "run")
    epochs = run.config.train.epochs or 0
    assert epochs >= 1
    assert run.checkpoint().name == f"epoch_{epochs:04d}"
    assert run.results["pretrain"]["epoch"] == epochs
    assert run.config.probe.every == run.config.train.checkpoint_every == max(1, epochs // 10)
    assert f"<- {epochs:,} epoch" in printed
    assert "into 0.1 minutes on this machine" in printed
    assert not list(trials.iterdir())
    assert set(TABLES["callback"]) == callbacks
    again = api.pretrain(run.config, out=tmp_path / "again", until=1, quiet=True, figures=False)
    assert again.config == run.config
    first = [line["loss"] for line in again.metrics() if "loss" in line]
    assert first == [line["loss"] for line in run.metrics() if "loss" in line][: len(first)]


def test_minutes_win_over_the_epochs_of_settings(tiny: Config, toy: Splits, tmp_path: Path, trials: Path) -> None:
    config = replace(tiny, train__epochs=10**6)
    run = api.pretrain(config, toy, tmp_path / "run", minutes=0.1, quiet=True, figures=False)
    assert 1 <= (run.config.train.epochs or 0) < 10**6
    assert run.config.train.checkpoint_every == tiny.train.checkpoint_every
    assert run.config.train.callbacks == ()
    assert not list(trials.iterdir())


@pytest.mark.usefixtures("no_figures")
def test_large_patches_first_are_left_out_where_there_is_no_time_for_them(
    array: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paces = {8: Pace(500, 25, 0, 0), 4: Pace(50, 100, 0, 0)}
    monkeypatch.setattr("pmae.budget.measure", lambda config, *_: paces[config.encoder.patch_size])
    given = ["pretrain", "--data", str(array), *SMALL, "--patch-size", "4", "--objective.contrastive-weight", "1"]

    def told(*minutes: str) -> str:
        code = main([*given, "--minutes", *minutes, "--out", str(tmp_path / "-".join(minutes))])
        captured = capsys.readouterr()
        assert code == (2 if captured.err else 0)
        return captured.out + captured.err

    # Ten minutes without their reserve of 5% are 570 s; both stages take 750, besides what comes before them.
    assert "encoder.first_patch_size      0   <- large patches first would take at least 13." in told("10")
    run = Run(tmp_path / "10")
    assert (run.config.train.epochs, run.config.encoder.first_patch_size) == (5, 0)
    assert not (run.path / "first").exists()
    assert "encoder.first_patch_size      8   <- large patches" in told("15")
    assert Run(tmp_path / "15" / "first").config.train.epochs == 4 * (Run(tmp_path / "15").config.train.epochs or 0)
    # Whoever asks for them hears how long they take, and whoever has no time for one stage how long that takes.
    asked = "what one epoch takes here with large patches first (encoder.first_patch_size 0: without), got 10"
    said = told("10", "--encoder.first-patch-size", "8")
    assert "minutes must be at least 13." in said
    assert asked in said
    assert re.search(r"minutes must be at least 2\.\d, what one epoch takes here, got 2", told("2"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--minutes", "0"], "--minutes must be a number above 0, got 0.0"),
        (["--minutes", "nan"], "--minutes must be a number above 0, got nan"),
        (["--minutes", "inf"], "--minutes must be a number above 0, got inf"),
        (["--minutes", "soon"], "--minutes must be a number, got 'soon'"),
        (["--minutes", "3", "--epochs", "2"], "--minutes must be left out where --epochs is given, got 3"),
        (["--minutes=3", "--train.epochs=2"], "--minutes must be left out where --epochs is given, got 3"),
        (["--minutes", "0.001"], "what one epoch takes here, got 0.001"),
        (["--minutes", "0.001", "--encoder.first-patch-size", "8"], "first (encoder.first_patch_size 0: without), got"),
    ],
)
def test_minutes_that_settle_nothing_are_one_error_and_leave_nothing(
    arguments: list[str], message: str, array: Path, tmp_path: Path, trials: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pretrain", "--data", str(array), "--out", str(tmp_path / "run"), *arguments, *SMALL]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert not list(trials.iterdir())


def test_a_run_that_goes_on_has_its_length(
    tiny: Config, toy: Splits, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    api.pretrain(replace(tiny, train__epochs=1), toy, tmp_path / "run", quiet=True, figures=False)
    assert main(["pretrain", "--out", str(tmp_path / "run"), "--resume", "--minutes", "3"]) == 2
    assert "--minutes must be left out to resume a run, whose length was settled" in capsys.readouterr().err


def test_several_processes_are_told_to_give_epochs(
    tiny: Config, toy: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="minutes must be left out with several processes"):
        api.pretrain(tiny, toy, tmp_path / "run", minutes=3)
    assert not (tmp_path / "run").exists()


def test_a_trial_that_is_interrupted_leaves_nothing(
    array: Path, tmp_path: Path, trials: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt() -> None:
        while not list(trials.glob("*/run/metrics.jsonl")):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    assert main(["pretrain", "--data", str(array), "--out", str(tmp_path / "run"), "--minutes", "60", *SMALL]) == 130
    assert capsys.readouterr().err == "pmae: stopped\n"
    assert not (tmp_path / "run").exists()
    assert not list(trials.iterdir())


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGTERM that a program could answer")
def test_what_is_fitted_for_a_trial_goes_when_the_program_is_ended(array: Path, tmp_path: Path, trials: Path) -> None:
    def end() -> None:
        while not list(trials.glob("pmae-fit-*")):
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end, daemon=True).start()
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Ray leaves a handler of its own
    with pytest.raises(SystemExit) as stopped:
        main(["pretrain", "--data", str(array), "--out", str(tmp_path / "run"), "--minutes", "60", *SMALL])
    signal.signal(signal.SIGTERM, before)
    assert stopped.value.code == 143
    assert not (tmp_path / "run").exists()
    assert not list(trials.iterdir())
