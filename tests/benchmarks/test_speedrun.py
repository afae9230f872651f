"""The speedrun on embedded images: it looks, stops at its target or at the end, and scores the test images once."""

import json
from pathlib import Path

import pytest
from benchmarks.speedrun import FRONTIER, main

from pmae.config import Config, replace
from pmae.runs import Run


def test_it_runs_to_its_end_and_writes_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--tiny", "--target", "1", "--out", str(tmp_path / "run")]) == 0
    found, run = json.loads((tmp_path / "run" / "speedrun.json").read_text()), Run(tmp_path / "run")
    assert found["reached"] is None
    assert [(look["epoch"], look["images"]) for look in found["looks"]] == [(1, 192), (2, 384)]
    assert [look["linear"] for look in found["looks"]] == [line["linear"] for line in run.metrics() if "linear" in line]
    assert found["test"].keys() == {"linear", "knn"}
    page, said = (tmp_path / "run" / "speedrun.md").read_text(), capsys.readouterr().out
    assert page.startswith("# Speedrun: 100% not reached\n")
    assert "objective.contrastive" in said
    assert f"{found['test']['linear']:.1%}" in page
    assert main(["--tiny", "--out", str(tmp_path / "run")]) == 2  # the folder is taken


def test_it_stops_at_its_target(tmp_path: Path) -> None:
    assert main(["--tiny", "--target", "0.01", "--out", str(tmp_path / "run")]) == 0
    found = json.loads((tmp_path / "run" / "speedrun.json").read_text())
    assert found["reached"] == found["looks"][0]
    assert len(found["looks"]) == 1
    assert Run(tmp_path / "run").checkpoint().name == "epoch_0001"


def test_its_settings_are_settings_and_mistakes_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert replace(Config(), **FRONTIER).objective.local_views == 2
    assert main(["--target", "2"]) == 2
    assert "speedrun: error: target must be an accuracy in (0, 1], got 2.0" in capsys.readouterr().err
