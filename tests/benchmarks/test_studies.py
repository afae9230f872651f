"""Every run of every study is a command that the program takes, and what is done is not done again."""

import argparse
from pathlib import Path

import pytest
from benchmarks.studies import STUDIES, commands, pretraining

from pmae import api
from pmae.cli import parsed
from pmae.config import Config, replace
from pmae.data.images import Splits
from pmae.derive import resolve


@pytest.mark.parametrize("name", STUDIES)
def test_no_two_runs_of_a_study_are_the_same(name: str) -> None:
    study = STUDIES[name]
    shape = (3, 224, 224) if "224" in study.shared else (3, 32, 32)
    found = {}
    for run in study.runs:
        options = argparse.Namespace(data="somewhere", root="data", seed=3, out="runs", epochs=50)
        settings = parsed("pretrain", pretraining(study, run, options)[2:]).configured()
        found[run], _ = resolve(settings, 9000, shape)
        assert (found[run].train.epochs, found[run].train.seed) == (50, 3)
    assert len(set(found.values())) == len(found)


@pytest.mark.usefixtures("no_figures")
def test_a_finished_run_is_left_and_a_begun_one_goes_on(tmp_path: Path, tiny: Config, toy: Splits) -> None:
    study = STUDIES["contrast"]
    first, second, *_ = study.runs
    options = argparse.Namespace(data="cifar10", root="data", seed=0, out=str(tmp_path), epochs=None)
    assert [command[1] for command in commands(study, first, options)] == ["pretrain", "evaluate"]
    api.pretrain(replace(tiny, train__epochs=1), toy, out=tmp_path / first)
    assert [command[1] for command in commands(study, first, options)] == ["evaluate"]
    (tmp_path / first / "results.json").unlink()
    assert next(iter(commands(study, first, options)))[2:] == ["--out", str(tmp_path / first), "--resume"]
    assert "--no-baselines" in list(commands(study, second, options))[-1]


def test_a_study_to_choose_by_leaves_the_test_images_alone() -> None:
    options = argparse.Namespace(data="photographs/", root="data", seed=0, out="runs", epochs=None)
    assert [command[1] for command in commands(STUDIES["steps"], "local", options)] == ["pretrain"]
