"""Runs are found by what they learned from, not by their names or where they were made."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pmae import api
from pmae.config import Config, replace
from pmae.data.images import Splits
from pmae.runs import Run, learned_on
from pmae.sweep.find import RunIndex, RunSpec, finished, validation

Store = Callable[..., Run]


@pytest.fixture
def wanted() -> Config:
    return replace(Config(), data__source="bloodmnist", train__epochs=9)


def test_a_run_is_found_by_its_settings(store: Store, wanted: Config, tmp_path: Path) -> None:
    run = store(tmp_path, RunSpec("any name", wanted), {9: 0.5}, 0.6)
    index = RunIndex([tmp_path / "nowhere", tmp_path])
    assert [found.path for found in index.find(wanted)] == [run.path]
    # What is derived from the data may be given; where and how a run is made does not matter.
    given = replace(wanted, encoder__patch_size=8, masking__masked_variance=0.2, train__device="cpu", data__root="x")
    assert [found.path for found in index.find(given)] == [run.path]
    for change in ({"train__seed": 1}, {"train__epochs": 10}, {"encoder__patch_size": 4}, {"data__source": "cifar10"}):
        assert index.find(replace(wanted, **change)) == []
    # Impossible on that run's data, so no run has these settings.
    assert index.find(replace(wanted, train__batch_size=13_000)) == []


def test_a_run_that_went_on_with_the_same_images_is_found(tiny: Config, toy: Splits, tmp_path: Path) -> None:
    np.savez(tmp_path / "toy.npz", train_images=toy.train.images)
    first = replace(tiny, data__source=str(tmp_path / "toy.npz"), train__epochs=1)
    before = api.pretrain(first, out=tmp_path / "runs/first", quiet=True)
    then = replace(first, encoder__weights=str(before.path))
    run = api.pretrain(then, out=tmp_path / "runs/then", quiet=True)
    assert (run.config.optim.encoder_rate, run.config.optim.layer_decay) == (1.0, 1.0)
    assert [found.path for found in RunIndex([tmp_path / "runs"]).find(then)] == [run.path]
    known = before.environment["data"]["fingerprint"]
    assert learned_on(str(before.path), known)
    (before.path / "environment.json").write_text("{")
    assert not learned_on(str(before.path), known)  # and no error: the run that went on can be read


def test_any_length_and_seed_will_do_if_asked(store: Store, wanted: Config, tmp_path: Path) -> None:
    for epochs in (3, 30):
        store(tmp_path, RunSpec("a", replace(wanted, train__epochs=epochs, train__seed=2)), {epochs: 0.5}, 0.6)
    assert RunIndex([tmp_path]).find(wanted) == []
    assert [run.config.train.epochs for run in RunIndex([tmp_path]).find(wanted, any_length=True)] == [30, 3]


def test_finished_runs_come_first(store: Store, wanted: Config, tmp_path: Path) -> None:
    stopped = store(tmp_path / "a", RunSpec("a", wanted), {}, 0.6)
    whole = store(tmp_path / "b", RunSpec("a", wanted), {9: 0.5}, 0.6)
    stopped.add_results(pretrain={"epoch": 4})
    assert [finished(run) for run in (stopped, whole)] == [False, True]
    assert [run.path for run in RunIndex([tmp_path / "a", tmp_path / "b"]).find(wanted)] == [whole.path, stopped.path]
    # With checkpoints there, pretraining has not ended before its pictures are written.
    folder = whole.path / "checkpoints" / "epoch_0009"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text('{"epoch": 9, "step": 1}')
    assert not finished(whole)


def test_validation_is_what_pretraining_ended_with(store: Store, wanted: Config, tmp_path: Path) -> None:
    run = store(tmp_path, RunSpec("a", wanted), {9: 0.5}, 0.625)
    assert validation(run) == 62.5
    run.add_results(pretrain={"epoch": 9})
    assert validation(run) is None


def test_a_folder_that_cannot_be_read_is_named_and_passed_over(store: Store, wanted: Config, tmp_path: Path) -> None:
    run = store(tmp_path, RunSpec("a", wanted), {9: 0.5}, 0.6)
    other = store(tmp_path, RunSpec("b", wanted), {9: 0.5}, 0.6)
    settings = json.loads((other.path / "config.json").read_text())
    (other.path / "config.json").write_text(json.dumps(settings | {"tomorrow": {"setting": 1}}))
    with pytest.warns(UserWarning, match=f"{other.path.name} cannot be read and is passed over.*tomorrow"):
        assert [found.path for found in RunIndex([tmp_path]).find(wanted)] == [run.path]


def test_folders_of_runs_differ_with_what_counts(wanted: Config) -> None:
    name = RunSpec("a", wanted).folder
    assert name.startswith("a-")
    assert RunSpec("a", replace(wanted, train__device="cpu", data__root="elsewhere")).folder == name
    assert RunSpec("a", replace(wanted, train__seed=1)).folder != name
