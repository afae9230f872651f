"""The demo, one epoch of it, and that it replaces nothing but itself."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from pmae.config import Config, replace
from pmae.data.images import Splits
from pmae.data.named import load_photos
from pmae.demo import demo
from pmae.derive import resolve
from pmae.errors import UserError
from pmae.standing import scores_of
from pmae.train.loop import pretrain


def few_photos() -> Splits:
    """Every twelfth crop, and of its pixels every other one in both directions: minutes less to fit and to train."""
    photos = load_photos()
    assert photos.test is not None
    parts = [part.take(np.arange(0, len(part), 12)) for part in (photos.train, photos.test)]
    train, test = (dataclasses.replace(part, images=part.images[:, :, ::2, ::2].copy()) for part in parts)
    return Splits(photos.name, train, None, test)


def test_the_demo_shows_its_table_and_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pmae.demo.load_photos", few_photos)
    run = demo(tmp_path / "demo", epochs=1)
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("raw pixels", "pca features", "random weights", "PMAE", "report.html"))
    labels = ("pmae epoch 1", "raw pixels", "pca features", "random weights")
    assert {(score.label, score.preset) for score in scores_of(run.evaluations)} == {
        (label, "demo") for label in labels
    }
    assert "Did pretraining help" in (run.path / "report.html").read_text()
    assert {path.name for path in (run.path / "figures").glob("*.png")} >= {"accuracy-test.png", "masks.png"}


def test_the_demo_does_not_replace_another_run(tiny: Config, toy: Splits, tmp_path: Path) -> None:
    config, _ = resolve(replace(tiny, train__epochs=1), len(toy.train), toy.train.shape)
    run = pretrain(config, toy, tmp_path / "mine", quiet=True)
    with pytest.raises(UserError, match="must be a new folder or an earlier demo"):
        demo(run.path, epochs=1)
    own = pretrain(config, dataclasses.replace(toy, name="photos"), tmp_path / "own", quiet=True)
    with pytest.raises(UserError, match="must be a new folder or an earlier demo"):
        demo(own.path, epochs=1)
    assert run.checkpoint().exists()
    assert own.checkpoint().exists(), "a run on the same photographs that is no demo"


def test_a_demo_of_no_epochs_is_refused_and_leaves_the_old_one(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    with pytest.raises(UserError, match="epochs must be at least 1, got 0"):
        demo(tmp_path / "demo", epochs=0)
