"""Runs in processes of their own: the same runs as in turn, and what becomes of one that fails or is killed."""

import os
import signal
import time
from pathlib import Path

import pytest

from pmae.cli import main
from pmae.config import Config, replace
from pmae.config_file import with_settings
from pmae.errors import UserError
from pmae.runs import Run
from pmae.sweep.workers import beside

SETTINGS = [
    *("encoder.width=16", "encoder.depth=1", "encoder.heads=2", "decoder.width=16", "decoder.depth=1"),
    *("decoder.heads=2", "train.batch_size=16", "train.precision=float32"),
]


def small(**changes: object) -> Config:
    config = with_settings(Config(), dict(text.split("=") for text in SETTINGS))  # type: ignore[arg-type]
    return replace(config, data__source="digits", train__device="cpu", train__epochs=1, **changes)


def test_runs_at_once_are_those_of_one_after_another(root: Path, tmp_path: Path) -> None:
    for folder, flags in (("turn", []), ("once", ["--at-once", "2"])):
        command = ["sweep", "ratio", "--data", "dermamnist", "--ratios", "0.1", "0.3", "0.5", "--epochs", "1"]
        command += ["--root", str(root), "--out", str(tmp_path / folder), "--device", "cpu", *flags, "--set", *SETTINGS]
        assert main(command) == 0
    turn, once = ({path.name: Run(path) for path in (tmp_path / f / "runs").iterdir()} for f in ("turn", "once"))
    assert len(turn) == 3
    assert turn.keys() == once.keys()
    for name, run in turn.items():
        expected = run.results["pretrain"]["held_out_r2"]
        assert once[name].results["pretrain"]["held_out_r2"] == pytest.approx(expected, abs=1e-4)


def test_a_process_stays_for_the_next_run_also_after_a_mistake(tmp_path: Path) -> None:
    with beside(1) as workers:
        workers.begin(tmp_path / "wrong", small(encoder__patch_size=3), None)
        assert not workers.free()
        with pytest.raises(UserError, match=r"encoder\.patch_size must be a divisor"):
            workers.wait()
        assert workers.free()
        (worker,) = workers._idle
        workers.begin(tmp_path / "right", small(), None)
        assert workers.wait() == tmp_path / "right"
        assert workers._idle == [worker]
    assert not worker.process.is_alive()
    assert Run(tmp_path / "right").results["pretrain"]["epoch"] == 1


def test_a_run_that_was_killed_goes_on_in_a_new_process(tmp_path: Path) -> None:
    path, config = tmp_path / "a", small(train__checkpoint_every=1)
    with beside(1) as workers:
        workers.begin(path, replace(config, train__epochs=500), None)
        until = time.monotonic() + 100
        while not list(path.glob("checkpoints/epoch_*")) and time.monotonic() < until:
            time.sleep(0.05)
        pid = workers._busy[path].process.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(UserError, match="killed by signal 9"):
            workers.wait()
        assert workers.free()
        workers.begin(path, replace(config, train__epochs=500), 3)
        assert workers.wait() == path
    assert Run(path).results["pretrain"]["epoch"] >= 3


@pytest.mark.parametrize(
    ("flags", "said"), [(["--at-once", "0"], "at least 1"), (["--at-once", "2", "--ray", "local"], "without --ray")]
)
def test_a_wrong_number_is_one_line(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "ratio", "--ratios", "0.1", "--data", "digits", *flags]) == 2
    assert said in capsys.readouterr().err
