"""What is taken from run folders that are there, what is said of what is not, and what is refused before any run."""

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.sweep.conftest import SMALL

from pmae.cli import main
from pmae.paper.runner import reproduce
from pmae.paper.tables import ITEMS, Item, Row, RunChoices, spec_of, specs_of
from pmae.runs import Run
from pmae.sweep.scoring import Scoring

RESULTS = Path(__file__).parents[2] / "results" / "runs"
Store = Callable[..., Run]


def paper(*arguments: object) -> int:
    return main(["paper", *map(str, arguments)])


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_a_run_without_checkpoints_serves_the_search_but_not_a_missing_evaluation(
    root: Path, store: Store, tmp_path: Path
) -> None:
    chosen = RunChoices(datasets=("dermamnist",), epochs=1, settings=tuple(s.split("=") for s in SMALL[1:10]))  # type: ignore[misc]
    spec = spec_of(ITEMS["knn"], Row("mae", 0.75), "dermamnist", 0.75, 0, chosen)
    store(tmp_path / "kept", spec, {1: 0.7}, 0.8)
    item = Item("one", "One", "none", "table", (Row("mae", 0.75),), ("dermamnist",), ("linear",))
    here = {"root": str(root), "device": "cpu", "epochs": 1, "settings": chosen.settings}
    scoring = Scoring(tmp_path / "a", (tmp_path / "kept",))
    reproduce(item, RunChoices(**here), scoring)  # type: ignore[arg-type]
    assert not (tmp_path / "a/runs").exists()
    other = Item("one", "One", "none", "table", (Row("mae", 0.75),), ("dermamnist",), ("knn",))
    reproduce(other, RunChoices(**here), scoring)  # type: ignore[arg-type]
    assert len(list((tmp_path / "a/runs").iterdir())) == 1


def test_published_results_of_the_repository_build_a_table(
    tmp_path: Path, forbid_work: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    forbid_work()
    settings = ["--recipe", "masking", "--epochs", 100, "--set", "encoder.patch_size=8", "train.batch_size=512"]
    assert paper("main", *settings, "--runs", RESULTS, "--only-found", "--out", tmp_path) == 0
    found = {(r["data"], r["protocol"], r["method"]): r for r in rows(tmp_path / "main-comparison.csv")}
    results = json.loads((RESULTS / "bloodmnist-pmae-100" / "results.json").read_text())["evaluation"]
    entries = results["pmae epoch 100 [paper]"]["results"]
    (ours,) = [e for e in entries if (e["protocol"], e["pooling"], e["split"]) == ("linear", "cls", "test")]
    row = found["BloodMNIST", "linear probe", "PMAE, oracle ratio"]
    assert float(row["ours"]) == pytest.approx(100 * ours["metrics"]["accuracy"]["value"])
    assert (row["published"], row["runs"]) == ("95.5", "bloodmnist-pmae-100")
    assert found["PathMNIST", "linear probe", "MAE, 75% of patches"]["ours"] == ""
    copies = "- bloodmnist: 6 images of test can be found byte for byte in the training part as well"
    assert capsys.readouterr().out.count(copies) == 1


def test_where_no_run_is_found_the_nearest_is_named(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = spec_of(ITEMS["spread"], Row("pmae", "every"), "bloodmnist", 0.4, 0, RunChoices(epochs=9))
    run = store(tmp_path / "kept", spec, {9: 0.5}, 0.6)
    common = ["--runs", tmp_path / "kept", "--only-found", "--out", tmp_path / "out", "--datasets"]
    assert paper("spread", "ratio", "--epochs", 8, *common, "bloodmnist") == 0
    hint = f"- nearest to bloodmnist-pmae-0.4-seed0 is the run {run.path.name}: it has train.epochs=9; --recipe,"
    assert capsys.readouterr().out.count(hint) == 2
    assert hint in (tmp_path / "out/spread.md").read_text()
    # Without a number there is nothing to draw, and no row of dashes.
    assert list((tmp_path / "out").glob("*.png")) == []
    assert rows(tmp_path / "out/spread-comparison.csv") == rows(tmp_path / "out/ratio-grid.csv") == []
    assert paper("spread", "--epochs", 9, *common, "pathmnist") == 0
    assert "no run on pathmnist was found in" in capsys.readouterr().out


def test_notes_say_what_a_found_run_lacks_and_what_an_oracle_rests_on(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = spec_of(ITEMS["main"], Row("pmae", "oracle"), "bloodmnist", 0.4, 0, RunChoices(epochs=9))
    store(tmp_path / "kept", spec, {9: 0.5}, 0.6, preset="strong")
    common = ["--datasets", "bloodmnist", "--epochs", 9, "--runs", tmp_path / "kept", "--only-found", "--out", tmp_path]
    assert paper("main", *common, "--preset", "strong") == 0
    notes = capsys.readouterr().out
    assert "- BloodMNIST, PMAE, oracle ratio: 0.4, the only one of 9 ratios that was found; no search" in notes
    assert "- 1 of 1 runs have no mlp, finetune under the preset strong; other presets they have: none" in notes
    assert "- bloodmnist: published of validation images, ours of test images" in notes
    assert paper("main", *common) == 0
    assert "no linear, mlp, finetune under the preset paper; other presets they have: strong" in capsys.readouterr().out
    assert paper("spread", *common, "--preset", "strong") == 0
    (row,) = rows(tmp_path / "spread-comparison.csv")
    assert (row["method"], row["ratios"], row["standard error"]) == ("PMAE", "1", "")


def test_results_without_pictures_are_no_pictures(
    root: Path, store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = [text.partition("=")[::2] for text in SMALL[1:10]]
    chosen = RunChoices(datasets=("dermamnist",), settings=tuple(small))
    for spec in specs_of(ITEMS["examples"], chosen):
        store(tmp_path / "kept", spec, {1: 0.5}, 0.6)
    common = ["--datasets", "dermamnist", "--root", root, *SMALL, "--runs", tmp_path / "kept", "--out", tmp_path]
    assert paper("examples", *common, "--only-found") == 0
    assert "- 1 of 1 runs have no sample pictures" in capsys.readouterr().out
    assert not (tmp_path / "examples.png").exists()
    assert paper("examples", *common) == 0
    assert (tmp_path / "examples.png").exists()


def test_all_data_are_looked_for_before_anything_runs(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    some = tmp_path / "some"
    some.mkdir()
    (some / "dermamnist_64.npz").symlink_to(root / "dermamnist_64.npz")
    for missing in ("pathmnist", "tinyimagenet", "cifar10"):
        common = ["--datasets", "dermamnist", missing, "--epochs", 1, "--root", some, *SMALL, "--out", tmp_path / "out"]
        assert paper("knn", *common) == 2
        said = capsys.readouterr()
        assert f"data.source '{missing}': found no" in said.err
        assert (said.out, said.err.count("\n")) == ("", 1)
    assert not (tmp_path / "out").exists()


def test_a_run_folder_is_not_a_folder_of_runs(store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = store(tmp_path, spec_of(ITEMS["main"], Row("mae", 0.75), "cifar10", 0.75, 0, RunChoices()), {}, 0.5)
    assert paper("main", "--only-found", "--runs", run.path, "--out", tmp_path / "out") == 2
    assert "--runs must be folders that hold run folders" in capsys.readouterr().err


def test_the_ledger_counts_what_was_scored_at_which_length(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for epochs, seed, ratio, scores in ((800, 0, 0.2, {"mlp": 0.6}), (800, 1, 0.4, {}), (200, 0, 0.2, {})):
        chosen = RunChoices(epochs=epochs)
        spec = spec_of(ITEMS["main"], Row("pmae", "oracle"), "bloodmnist", ratio, seed, chosen)
        store(tmp_path / "kept", spec, {epochs: 0.5}, 0.6, **scores)
    stopped = spec_of(ITEMS["main"], Row("mae", 0.75), "bloodmnist", 0.75, 0, RunChoices())
    store(tmp_path / "kept", stopped, {800: 0.5}, 0.6).add_results(pretrain={"epoch": 400})
    assert paper("status", "--runs", tmp_path / "kept", "--out", tmp_path / "out") == 0
    printed = capsys.readouterr().out
    assert "| linear probe | PMAE, oracle ratio | – | – | – | 2 at 800, 1 at 200 | – |" in printed
    assert "| MLP probe | PMAE, oracle ratio | – | – | – | 1 at 800 | – |" in printed
    assert "| linear probe | MAE, 75% of patches | – | – | – | – | – |" in printed
    assert "2 of 75 found, 2 at 800 epochs." in printed
    assert not (tmp_path / "out").exists()


def test_the_ledger_of_the_published_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert paper("status", "--runs", RESULTS, "--out", tmp_path / "out") == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| fine-tuning | MAE, 75%")]
    assert row.split(" | ")[2:] == ["1 at 800", "–", "1 at 800", "1 at 800", "– |"]
