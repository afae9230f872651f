"""From nothing to a table: runs are made once, found again, continued when stopped, and set beside the published."""

import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.sweep.conftest import SMALL

from pmae import api
from pmae.cli import main
from pmae.errors import Interrupted
from pmae.paper.runner import reproduce
from pmae.paper.tables import DATASETS, ITEMS, Item, Row, RunChoices, spec_of, specs_of
from pmae.runs import Run
from pmae.standing import scores_of
from pmae.sweep.find import finished
from pmae.sweep.scoring import Scoring

Store = Callable[..., Run]
KINDS = (("oracle", "0.3"), ("random", "random"))


def paper(*arguments: object) -> int:
    return main(["paper", *map(str, arguments)])


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def files_below(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_the_main_table_is_run_once_and_found_again(
    root: Path, tmp_path: Path, forbid_work: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["--datasets", "dermamnist", "--epochs", 1, "--ratios", 0.2, 0.6, "--root", root, *SMALL]
    assert paper("main", *common, "--out", tmp_path) == 0
    made = sorted(path.name.rpartition("-")[0] for path in (tmp_path / "runs").iterdir())
    assert made == sorted(
        f"dermamnist-{name}-seed0"
        for name in ("mae-0.2", "mae-0.6", "mae-0.75", "mae-random", "pmae-0.2", "pmae-0.6", "pmae-random")
    )
    before = files_below(tmp_path / "runs")
    table = (tmp_path / "main.md").read_text()
    forbid_work()
    capsys.readouterr()
    assert paper("main", *common, "--out", tmp_path) == 0
    printed = capsys.readouterr().out
    assert "pretrains" not in printed
    assert "| linear probe | MAE, 75% of patches |" in printed
    assert files_below(tmp_path / "runs") == before
    assert (tmp_path / "main.md").read_text() == table
    assert "is not the file that MedMNIST published" in table


def test_the_comparison_sets_ours_beside_the_published(root: Path, tmp_path: Path) -> None:
    common = ["--datasets", "bloodmnist", "--epochs", 1, "--ratios", 0.3, "--root", root, *SMALL]
    assert paper("main", *common, "--out", tmp_path, "--protocols", "linear", "--seeds", 0, 1) == 0
    found = rows(tmp_path / "main-comparison.csv")
    assert [float(row["published"]) for row in found] == [73.4, 78.6, 95.5, 83.2, 90.0]
    for row in found:
        names = row["runs"].split()
        assert len(names) == 2
        values = []
        for name in names:
            (evaluation,) = Run(tmp_path / "runs" / name).evaluations
            wanted = ("linear", "cls", "test")
            (score,) = [s for s in evaluation.scores if (s.protocol, s.pooling, s.split) == wanted]
            values.append(score.accuracy.value)
        assert float(row["ours"]) == pytest.approx(np.mean(values))
        assert float(row["difference"]) == pytest.approx(np.mean(values) - float(row["published"]))
        assert float(row["spread"]) == pytest.approx(np.std(values, ddof=1))
        assert row["spread over"] == "2 runs"
        assert row["preset"] == "paper, 2 epochs"


def test_a_killed_command_goes_on_where_it_was(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["--datasets", "dermamnist", "--epochs", 3, "--ratios", 0.5, "--root", root, *SMALL, "--out", tmp_path]
    from pmae.train import checkpoint

    save, saved = checkpoint.save, []

    def save_then_die(*arguments: object) -> Path:
        saved.append(save(*arguments))  # type: ignore[arg-type]
        if len(saved) == 5:
            # The second run has two of its three checkpoints; nothing else of it gets to the disk.
            raise KeyboardInterrupt
        return saved[-1]

    monkeypatch.setattr(checkpoint, "save", save_then_die)
    assert paper("knn", *common) == 130
    assert [finished(Run(path)) for path in sorted((tmp_path / "runs").iterdir())].count(True) == 1
    monkeypatch.setattr(checkpoint, "save", save)
    first = {path.name: path.stat().st_mtime_ns for path in saved[:3]}
    capsys.readouterr()
    assert paper("knn", *common) == 0
    printed = capsys.readouterr().out
    assert printed.count("goes on in") == 1
    assert {path.name: path.stat().st_mtime_ns for path in saved[:3]} == first
    assert all(finished(Run(path)) for path in (tmp_path / "runs").iterdir())
    assert all(row["ours"] for row in rows(tmp_path / "knn-comparison.csv"))


def test_a_run_is_evaluated_before_the_next_one_begins(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    common = [
        "--datasets",
        "dermamnist",
        "--epochs",
        1,
        "--ratios",
        0.2,
        0.5,
        "--root",
        root,
        *SMALL,
        "--out",
        tmp_path,
    ]
    whole, trained = api.pretrain, []

    def die(*arguments: object, **named: object) -> Run:
        if len(trained) == 2:
            raise KeyboardInterrupt
        trained.append(whole(*arguments, **named))  # type: ignore[arg-type]
        return trained[-1]

    monkeypatch.setattr(api, "pretrain", die)
    assert paper("spread", *common) == 130
    # The second one too: its evaluation came before the third run was to begin.
    found = [[(e.method, e.epoch, e.preset) for e in run.evaluations] for run in trained]
    assert found == [[("mae", 1, "paper, 2 epochs")]] * 2
    monkeypatch.setattr(api, "pretrain", whole)
    capsys.readouterr()
    assert paper("spread", *common) == 0
    printed = capsys.readouterr().out
    assert (printed.count("pretrains in"), printed.count("linear [paper, 2 epochs]")) == (2, 2)


def test_presets_and_poolings_are_told_apart(root: Path, tmp_path: Path) -> None:
    common = ["--datasets", "bloodmnist", "--epochs", 1, "--ratios", 0.3, "--root", root, *SMALL, "--out", tmp_path]
    for pooling in ("cls", "mean"):
        assert paper("ratio", "spread", *common, "--preset", "paper", "strong", "--pooling", pooling) == 0
        runs = {path.name: scores_of(Run(path).evaluations) for path in (tmp_path / "runs").iterdir()}
        found = rows(tmp_path / "ratio-cells-comparison.csv")
        # Three methods at one ratio and two random ones: linear in three presets, k-NN once.
        assert len(found) == 5 * (3 + 1)
        for row in found:
            kind = {"linear probe": "linear", "k-NN": "knn"}[row["protocol"]]
            wanted = (row["preset"], kind, pooling, "test")
            (score,) = [s for s in runs[row["runs"]] if (s.preset, s.protocol, s.pooling, s.split) == wanted]
            assert float(row["ours"]) == pytest.approx(score.accuracy.value)
            assert row["features"] == pooling
    grid = rows(tmp_path / "ratio-grid.csv")
    shown = [(row["protocol"], row["preset"].partition(",")[0]) for row in grid[::3]]
    assert shown == [
        *(("linear probe", name) for name in ("paper", "strong", "plain")),
        ("k-NN", "paper"),
    ]
    by_cell = {(r["protocol"], r["preset"], r["method"], r["hidden"]): r["ours"] for r in found}
    for row in (row for row in grid if row["method"] == "PMAE"):
        there = [by_cell[row["protocol"], row["preset"], f"PMAE, {kind} ratio", hidden] for kind, hidden in KINDS]
        assert [float(row["30%"]), float(row["random"])] == pytest.approx([float(value) for value in there])
    spread = [row["preset"].partition(",")[0] for row in rows(tmp_path / "spread-comparison.csv")]
    assert spread == ["paper", "paper", "strong", "strong"]


def test_all_five_data_sets_load_from_their_standard_files(root: Path, tmp_path: Path) -> None:
    item = Item("five", "All five", "none", "table", (Row("mae", 0.75),), protocols=("knn",))
    small = tuple((name, value) for name, _, value in (text.partition("=") for text in SMALL[1:10]))
    page, _ = reproduce(
        item, RunChoices(epochs=1, settings=small, root=str(root), device="cpu"), Scoring(tmp_path, head_epochs=1)
    )
    assert page.tables[0].header[2:] == ["CIFAR-10", "TinyImageNet", "DermaMNIST", "BloodMNIST", "PathMNIST"]
    (row,) = page.tables[0].rows
    assert all("(" in str(cell) and not str(cell).startswith("–") for cell in row[2:])
    counts = {
        Run(path).config.data.source: Run(path).environment["data"]["counts"] for path in (tmp_path / "runs").iterdir()
    }
    assert set(counts) == set(DATASETS)
    # What everybody tests on is the test split, also where its files call it validation.
    assert counts["tinyimagenet"] == {"train": 30, "test": 10}
    assert counts["cifar10"] == {"train": 50, "test": 10}
    assert counts["pathmnist"] == {"train": 48, "val": 20, "test": 24}


def test_the_oracle_is_chosen_on_validation_images_never_on_test(
    store: Store, tmp_path: Path, forbid_work: Callable[[], None]
) -> None:
    item, chosen = ITEMS["main"], RunChoices(datasets=("bloodmnist",), epochs=9)
    for ratio, validation, test in ((0.2, 0.80, 0.70), (0.3, 0.85, 0.60), (0.4, 0.75, 0.90)):
        store(
            tmp_path / "kept",
            spec_of(item, Row("pmae", "oracle"), "bloodmnist", ratio, 0, chosen),
            {9: test},
            validation,
        )
    forbid_work()
    common = ["--datasets", "bloodmnist", "--epochs", 9, "--runs", tmp_path / "kept", "--only-found"]
    assert paper("main", *common, "--out", tmp_path / "out") == 0
    (row,) = [r for r in rows(tmp_path / "out/main-comparison.csv") if r["ours"]]
    assert (row["protocol"], row["method"], row["hidden"]) == ("linear probe", "PMAE, oracle ratio", "0.3")
    assert float(row["ours"]) == pytest.approx(60)
    assert row["note"] == "best of 3 of 9 ratios on validation images (85.0%)"
    text = (tmp_path / "out/main.md").read_text()
    assert "| linear probe | PMAE, oracle ratio | 60.0 (95.5) |" in text
    assert "| linear probe | MAE, oracle ratio | – (78.6) |" in text
    assert "(14 of 15 cells)" in text
    assert "- bloodmnist: made up" in text


def pictures(folder: Path) -> dict[str, np.ndarray]:
    """The PNG files in a folder, each with something drawn on white."""
    found = {path.stem: np.asarray(Image.open(path).convert("L")) for path in folder.glob("*.png")}
    assert all(picture.max() == 255 and (picture < 128).mean() > 0.002 for picture in found.values())
    assert all((folder / f"{name}.svg").stat().st_size > 1000 for name in found)
    return found


def test_curves_and_bars_from_stored_results(store: Store, tmp_path: Path, forbid_work: Callable[[], None]) -> None:
    chosen = RunChoices(datasets=("cifar10", "bloodmnist"), epochs=8)
    for number, spec in enumerate(specs_of(ITEMS["ratio"], chosen)):
        ratio = spec.config.masking.masked_patches or spec.config.masking.masked_variance or 0
        ends = {epoch: 0.5 + 0.02 * epoch - 0.3 * ratio + 0.01 * (number % 3) for epoch in (2, 4, 8)}
        store(tmp_path / "kept", spec, ends, 0.9 - ratio)
    forbid_work()
    common = [
        "--datasets",
        *chosen.datasets,
        "--epochs",
        8,
        "--runs",
        tmp_path / "kept",
        "--only-found",
        "--out",
        tmp_path,
    ]
    assert paper("ratio", "epochs", "spread", "time", *common) == 0
    assert set(pictures(tmp_path)) == {"ratio", "epochs", "spread", "time"}
    best = [row for row in rows(tmp_path / "ratio-comparison.csv") if row["preset"] == "paper"]
    assert {row["best ratio by validation"] for row in best} == {"0.1"}
    assert [row["published best"] for row in best] == ["50.7", "59.0", "55.1", "78.6", "95.5", "91.0"]
    spread = rows(tmp_path / "spread-comparison.csv")
    values = [100 * (0.66 - 0.3 * r / 10 + 0.01 * ((r - 1) % 3)) for r in range(1, 10)]
    assert float(spread[0]["mean accuracy"]) == pytest.approx(np.mean(values))
    assert float(spread[0]["standard error"]) == pytest.approx(np.std(values, ddof=1) / 3, abs=0.006)
    curves = rows(tmp_path / "epochs-comparison.csv")
    assert [(row["of epochs"], row["epochs of PMAE scored"]) for row in curves] == [("8", "3"), ("8", "3")]
    minutes = [float(row["minutes for 800 epochs"]) for row in rows(tmp_path / "time-comparison.csv")]
    assert minutes[0] == pytest.approx(800 * (12_000 // 512) * 512 / 5000 / 60)


def test_a_stopped_command_says_that_it_goes_on(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*arguments: object, **named: object) -> Run:
        raise Interrupted("runs/a", 2)

    monkeypatch.setattr(api, "pretrain", stop)
    assert paper("knn", "--datasets", "dermamnist", "--root", root, *SMALL, "--out", tmp_path) == 130
    assert capsys.readouterr().err == "pmae: stopped and saved; the same command again goes on from there\n"


def test_pictures_come_from_short_runs(root: Path, tmp_path: Path) -> None:
    common = ["--datasets", "dermamnist", "--root", root, *SMALL, "--out", tmp_path]
    assert paper("masks", "spectrum", "examples", *common) == 0
    assert len(list((tmp_path / "runs").iterdir())) == 4
    wanted = {"mask-designs-dermamnist", "masks-dermamnist", "spectrum-dermamnist", "spectrum-parts-dermamnist"}
    assert set(pictures(tmp_path)) == wanted | {"examples"}
    assert paper("reconstructions", *common, "--epochs", 1) == 0
    assert {"reconstructions-dermamnist-mae", "reconstructions-dermamnist-pmae"} < set(pictures(tmp_path))
    # Hidden patches are 75% there: the same run serves the masks and the reconstructions of MAE.
    assert len(list((tmp_path / "runs").iterdir())) == 5


def test_settings_and_drawings_need_no_run(tmp_path: Path, forbid_work: Callable[[], None]) -> None:
    forbid_work()
    assert paper("settings", "overview", "--out", tmp_path) == 0
    found = {(row["part"], row["setting"]): row for row in rows(tmp_path / "settings-comparison.csv")}
    assert found["pretraining", "rate"]["published"] == found["pretraining", "rate"]["ours"] == "0.0003"
    # The text counts steps where its code counts epochs; that is all in which the recipe and the preset differ from it.
    differ = {key for key, row in found.items() if row["same"] == "no"}
    assert differ == {("probes", "warm-up"), ("fine-tuning", "warm-up")}
    assert {row["same"] for row in found.values()} == {"yes", "no"}
    assert "method.py" in (tmp_path / "overview.md").read_text()
