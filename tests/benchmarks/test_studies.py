"""Every run of every study is a command that the program takes, and what is done is not done again."""

import argparse
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
from benchmarks.studies import STUDIES, Study
from benchmarks.studies.__main__ import commands, main, pretraining

from pmae import api
from pmae.cli import parsed
from pmae.config import Config, replace
from pmae.data.images import Splits
from pmae.derive import resolve
from pmae.errors import UserError
from pmae.runs import Run
from pmae.sweep.find import finished


@pytest.mark.parametrize("name", STUDIES)
def test_no_two_runs_of_a_study_are_the_same(name: str) -> None:
    study = STUDIES[name]
    shape = (3, 224, 224) if "224" in study.shared else (3, 32, 32)
    found = {}
    for run in study.runs:
        options = argparse.Namespace(data="somewhere", root="data", seed=3, seeds=[3], out="runs", epochs=50)
        settings = parsed("pretrain", pretraining(study, run, options)[2:]).configured()
        found[run], _ = resolve(settings, 9000, shape)
        assert (found[run].train.epochs, found[run].train.seed) == (50, 3)
    assert len(set(found.values())) == len(found)


@pytest.mark.usefixtures("no_figures")
def test_a_finished_run_is_left_and_a_begun_one_goes_on(tmp_path: Path, tiny: Config, toy: Splits) -> None:
    study = STUDIES["contrast"]
    first, second, *_ = study.runs
    options = argparse.Namespace(data="cifar10", root="data", seed=0, seeds=[0], out=str(tmp_path), epochs=None)
    assert [command[1] for command in commands(study, first, options)] == ["pretrain", "evaluate"]
    api.pretrain(replace(tiny, train__epochs=1), toy, out=tmp_path / first)
    assert [command[1] for command in commands(study, first, options)] == ["evaluate"]
    (tmp_path / first / "results.json").unlink()
    assert next(iter(commands(study, first, options)))[2:] == ["--out", str(tmp_path / first), "--resume"]
    assert "--no-baselines" in list(commands(study, second, options))[-1]


def test_a_study_to_choose_by_leaves_the_test_images_alone() -> None:
    options = argparse.Namespace(data="photographs/", root="data", seed=0, seeds=[0], out="runs", epochs=None)
    assert [command[1] for command in commands(STUDIES["steps"], "local", options)] == ["pretrain"]


@pytest.fixture
def tiny_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments that run a study of three: one waits for another's encoder, one is refused."""
    np.save(tmp_path / "images.npy", np.random.default_rng(0).integers(0, 255, (40, 8, 8, 3), dtype=np.uint8))
    runs = {"first": "", "second": "--encoder.weights {out}/first", "refused": "--optim.base-lr -1"}
    sizes = "--encoder.width 16 --encoder.depth 1 --encoder.heads 2 --decoder.width 16 --decoder.depth 1"
    shared = f"--patch-size 4 --epochs 1 --decoder.heads 2 --train.device cpu {sizes}"
    monkeypatch.setitem(STUDIES, "tiny", Study("?", runs, shared, ""))
    return ["studies", "tiny", "--data", str(tmp_path / "images.npy"), "--out", str(tmp_path / "out"), "--run"]


def test_several_run_at_a_time_and_what_fails_leaves_the_others_alone(
    tiny_study: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [*tiny_study, "--jobs", "2"])
    with pytest.raises(
        UserError, match=r"not all runs .*: refused \(exit code must be 0 of pmae pretrain .*, got 2\)$"
    ):
        main()
    first, second = (Run(tmp_path / "out" / name) for name in ("first", "second"))
    assert finished(first)
    assert finished(second)
    assert str(second.config.encoder.weights) == str(first.path)
    assert "must be above 0, got -1" in (tmp_path / "out" / "refused.log").read_text()


def test_every_seed_has_a_folder_and_goes_on_from_its_own_runs(
    tiny_study: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [*tiny_study[:2], "first", "second", *tiny_study[2:-1], "--seeds", "0", "5"]  # printed, not run
    monkeypatch.setattr(sys, "argv", argv)
    main()
    made = [parsed("pretrain", shlex.split(line)[2:]) for line in capsys.readouterr().out.splitlines()]
    found = [(Path(each.out).parent.name, each.configured().train.seed) for each in made]
    assert found == [("seed0", 0), ("seed0", 0), ("seed5", 5), ("seed5", 5)]
    bases = [Path(weights).parent.name for each in made if (weights := each.configured().encoder.weights)]
    assert bases == ["seed0", "seed5"]


def test_nothing_begins_when_the_time_is_up(
    tiny_study: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [*tiny_study, "--minutes", "1e-9"])
    with pytest.raises(UserError, match=r"first \(the time was up\); second \(first came to none\)"):
        main()
    assert not list((tmp_path / "out").iterdir())
