"""Sweeps: a grid becomes runs, the best is chosen on validation images, and nothing is run twice."""

import csv
import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pmae.cli import main
from pmae.config import replace
from pmae.config_file import with_settings
from pmae.data.sets import load_settled
from pmae.errors import UserError
from pmae.evaluate import probes
from pmae.files import write_json
from pmae.paper.recipes import recipe
from pmae.runs import Run
from pmae.sweep import find
from pmae.sweep.find import validation
from pmae.sweep.grid import Trial, grid_specs, parse_grid, sweep_plot, trial_of, verdict

SMALL = [
    *("--set", "encoder.width=16", "encoder.depth=1", "encoder.heads=2", "decoder.width=16", "decoder.depth=1"),
    *("decoder.heads=2", "train.batch_size=16", "optim.warmup_epochs=0", "--device", "cpu"),
]


def sweep(*arguments: object) -> int:
    return main(["sweep", *map(str, arguments), *SMALL])


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_seeds_and_epochs_are_checked(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["ratio", "--data", "dermamnist", "--ratios", 0.1, "--root", root, "--out", tmp_path / "out"]
    assert sweep(*command, "--seeds", 1, 1) == 2
    assert "seeds must be at least one number, no two alike" in capsys.readouterr().err
    assert sweep(*command, "--epochs", 0) == 2
    assert "epochs must be at least 1, got 0" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_ratio_sweep_finds_the_best_by_validation_and_is_not_repeated(
    root: Path,
    tmp_path: Path,
    forbid_work: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["ratio", "--data", "dermamnist", "--ratios", 0.1, 0.5, "--epochs", 1, "--root", root, "--out", tmp_path]
    assert sweep(*command) == 0
    runs = [Run(path) for path in sorted((tmp_path / "runs").iterdir())]
    assert sorted(run.config.masking.masked_variance or 0 for run in runs) == [0.1, 0.5]
    best = max(validation(run) or 0 for run in runs)
    (said,) = [line for line in capsys.readouterr().out.splitlines() if "best by validation" in line]
    for run in runs:  # so short that they may tie
        assert (f"masking.masked_variance={run.config.masking.masked_variance} " in said) == (validation(run) == best)
    found = rows(tmp_path / "sweep.csv")
    assert [row["masking.masked_variance"] for row in found] == ["0.1", "0.5"]
    by_name = {run.path.name: run for run in runs}
    assert [float(row["validation %"]) for row in found] == [validation(by_name[row["runs"]]) for row in found]
    assert np.asarray(Image.open(tmp_path / "sweep.png").convert("L")).min() < 128
    forbid_work()
    for cached in (find.splits, find._fingerprint):  # as in another process
        cached.cache_clear()
    read: list[object] = []
    monkeypatch.setattr(find, "load", read.append)
    assert sweep(*command) == 0
    said = capsys.readouterr().out
    assert "pretrains" not in said
    assert "runs of all these settings are there; the images are not read again" in said
    assert read == []


def test_several_settings_make_a_grid_over_seeds() -> None:
    grid = parse_grid(["encoder.patch_size", "2", "4", "8", "space.name", "pca", "cosine"], recipe("ours"))
    assert grid == {"encoder.patch_size": ["2", "4", "8"], "space.name": ["pca", "cosine"]}
    planned = grid_specs(recipe("ours"), grid, [0, 5])
    assert len(planned) == 6
    made = [
        (s.config.encoder.patch_size, s.config.space.name, s.config.train.seed) for _, specs in planned for s in specs
    ]
    assert made == [(p, s, seed) for p in (2, 4, 8) for s in ("pca", "cosine") for seed in (0, 5)]
    assert len({spec.folder for _, specs in planned for spec in specs}) == 12


def test_ratio_means_patches_where_patches_are_hidden() -> None:
    assert parse_grid(["ratio", "0.5"], recipe("mae")) == {"masking.masked_patches": ["0.5"]}
    assert parse_grid(["ratio", "0.5"], recipe("paper")) == {"masking.masked_variance": ["0.5"]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["2", "4"], "a sweep must begin with a setting"),
        (["encoder.patch_size"], "encoder.patch_size must be followed by its values"),
        (["encoder.patch_size", "4", "4"], "no two alike"),
        (["encoder.patch_sise", "4"], "did you mean 'encoder.patch_size'"),
        (["encoder.patch_size", "four"], "encoder.patch_size must be a whole number, got 'four'"),
        (["ratio", "0.5", "1.5"], "masking.masked_variance must be a share between 0 and 1"),
        (["ratio", "0.5", "--set", "train.seed=3"], "train.seed must be given by --seeds, got '3'"),
        (["ratio", "0.5", "--set", "train.epochs=3"], "train.epochs must be given by --epochs, got '3'"),
        (["ratio", "0.5", "--set", "data.source=photos"], "data.source must be given by --data, got 'photos'"),
        (
            ["ratio", "0.5", "--set", "masking.masked_variance=0.3"],
            "masking.masked_variance must be left out of --set, for the grid has its values, got '0.3'",
        ),
        (
            ["ratio", "0.1", "0.5", "--set", "masking.ratio_schedule=uniform"],
            "masking.masked_variance must be left unset (None) where it is drawn from masking.ratio_range",
        ),
        (["ratio", "0.1", "0.5", "--recipe", "simclr"], "left unset (None) where nothing is hidden"),
        (
            ["space.wavelet", "db2", "db3"],
            "space.wavelet must be left unset unless space.name is 'wavelet' (it is 'pca'), got 'db3'",
        ),
        (["space.rotate_towards", "hard", "easy"], "space.rotate_towards must be left unset unless space.name is"),
        (["space.keep_rest", "false", "true"], "space.keep_rest must be left unset unless space.name is 'kernel_pca'"),
        (["ratio", "0.5", "--data", "dermamist"], "did you mean 'dermamnist'"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep(*arguments, "--out", tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def save_set(path: Path, images: np.ndarray) -> None:
    labels = np.arange(len(images)) % 2
    np.savez(path, train_images=images[:40], train_labels=labels[:40], test_images=images[40:], test_labels=labels[40:])


def test_runs_of_other_images_are_not_set_beside_new_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw, file = np.random.default_rng(0), tmp_path / "set.npz"
    command = ["--data", file, "--epochs", 1, "--out", tmp_path / "out"]
    save_set(file, draw.integers(0, 255, (60, 8, 8, 1), dtype=np.uint8))
    assert sweep("ratio", 0.2, *command) == 0
    save_set(file, draw.integers(0, 255, (60, 8, 8, 1), dtype=np.uint8))
    for cached in (find.splits, find._fingerprint):  # as in another process
        cached.cache_clear()
    capsys.readouterr()
    assert sweep("ratio", 0.2, 0.4, *command) == 2
    said = capsys.readouterr()
    assert "data must be the images of the runs that are reused" in said.err
    assert "pretrains" not in said.out
    assert sweep("ratio", 0.2, 0.4, *command[:-1], tmp_path / "anew") == 0
    capsys.readouterr()
    both = ["--runs", tmp_path / "anew/runs", tmp_path / "out/runs"]
    for run in (tmp_path / "anew/runs").glob("*0.2*"):
        shutil.rmtree(run)
    capsys.readouterr()
    assert sweep("ratio", 0.2, 0.4, *command[:-1], tmp_path / "neither", *both) == 2
    assert "data must be the images of the runs that are reused" in capsys.readouterr().err


def test_a_setting_that_these_images_cannot_have_is_told_before_any_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_set(tmp_path / "set.npz", np.zeros((60, 8, 8, 1), np.uint8))
    command = ["encoder.patch_size", 4, 3, "--data", tmp_path / "set.npz", "--epochs", 1, "--out", tmp_path / "out"]
    assert sweep(*command) == 2
    assert "encoder.patch_size must be a divisor of the image's sides (8x8), got 3" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_runs_on_vectors_and_from_weights_are_found_again(tmp_path: Path, forbid_work: Callable[[], None]) -> None:
    save_set(tmp_path / "set.npz", np.random.default_rng(0).normal(size=(60, 24)).astype(np.float32))
    common = ["ratio", 0.2, "--data", tmp_path / "set.npz", "--epochs", 1]
    assert sweep(*common, "--out", tmp_path / "vectors") == 0
    (weights,) = (tmp_path / "vectors/runs").iterdir()
    start = replace(recipe("ours"), data__source=str(tmp_path / "set.npz"), encoder__weights=str(weights))
    assert main(["sweep", *map(str, common), "--set", f"encoder.weights={weights}", "--out", str(tmp_path / "on")]) == 0
    forbid_work()
    assert sweep(*common, "--out", tmp_path / "again", "--runs", tmp_path / "vectors/runs") == 0
    wanted = replace(start, masking__masked_variance=0.2, train__epochs=1)
    assert len(find.RunIndex([tmp_path / "on/runs"]).find(wanted)) == 1


def test_large_files_become_what_pretraining_makes_of_them(tmp_path: Path) -> None:
    for number in range(4):
        Image.fromarray(np.full((300, 300), number, np.uint8)).save(tmp_path / f"{number}.png")
    base = replace(recipe("masking"), data__source=str(tmp_path))
    ((_, (spec,)),) = grid_specs(base, {"masking.masked_variance": ["0.2"]}, [0])
    assert spec.config.data == load_settled(base.data)[0]
    assert spec.config.data.resize == 224


def test_without_labels_there_is_no_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "x.npy", np.random.default_rng(0).integers(0, 255, (40, 16, 16, 1), dtype=np.uint8))
    assert sweep("ratio", 0.2, 0.4, "--data", tmp_path / "x.npy", "--epochs", 1, "--out", tmp_path / "out") == 0
    assert "has no labels" in capsys.readouterr().out
    assert not (tmp_path / "out/sweep.png").exists()
    assert all(row["R2"] for row in rows(tmp_path / "out/sweep.csv"))


def test_runs_that_were_scored_on_other_images_are_not_reused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = np.random.default_rng(0).integers(0, 255, (60, 8, 8, 1), dtype=np.uint8)
    np.save(tmp_path / "x.npy", images)
    save_set(tmp_path / "labelled.npz", images)
    command = ["ratio", 0.2, 0.4, "--data", tmp_path / "x.npy", "--epochs", 1, "--out", tmp_path / "out"]
    assert sweep(*command) == 0
    assert "Give a small labelled set with --set probe.data=NAME" in capsys.readouterr().out
    assert sweep(*command, "--set", f"probe.data={tmp_path / 'labelled.npz'}") == 0
    assert all(row["validation %"] for row in rows(tmp_path / "out/sweep.csv"))


def test_seeds_of_a_combination_are_averaged(store: Callable[..., Run], tmp_path: Path) -> None:
    ((_, specs),) = grid_specs(recipe("ours"), {"data.source": ["bloodmnist"]}, [0, 1, 2])
    scores = (0.5, 0.6, 0.85)
    runs = [store(tmp_path, spec, {}, value) for spec, value in zip(specs, scores, strict=True)]
    trial = trial_of({"data.source": "bloodmnist"}, runs)
    assert trial.validation == pytest.approx(65)
    assert trial.std == pytest.approx(100 * np.std(scores, ddof=1))
    assert trial.speed == 5000


def test_the_plot_orders_numbers_and_keeps_names_apart() -> None:
    def trial(name: str, value: float) -> Trial:
        return Trial({"space.name": name, "decoder.depth": "1"}, value)

    trials = [trial("pca", 60.0), trial("wavelet", 70.0), trial("cosine", 50.0)]
    drawing = sweep_plot(trials)
    (axes,) = drawing.figure.axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["pca", "wavelet", "cosine"]
    assert verdict(trials) == "The best by validation is space.name=wavelet, decoder.depth=1 (70.0%)."
    ring = axes.lines[-1]
    assert (list(ring.get_xdata()), list(ring.get_ydata())) == ([1.0], [70.0])


def test_settings_that_tie_are_all_named() -> None:
    trials = [Trial({"a.b": str(v)}, v) for v in (80.0, 75.0, 80.0)]
    trials[2] = dataclasses.replace(trials[2], settings={"a.b": "other"})
    assert verdict(trials) == "Tied for the best by validation: a.b=80.0 and a.b=other (80.0%)."
    (axes,) = sweep_plot(trials).figure.axes
    rings = [line for line in axes.lines if line.get_markersize() == 12]
    assert [list(ring.get_xdata()) for ring in rings] == [[0.0], [2.0]]


def test_a_lead_that_may_be_chance_is_called_so(store: Callable[..., Run], tmp_path: Path) -> None:
    trials = [Trial({"a.b": str(value)}, value, images=10_000) for value in (80.0, 79.5, 78.0, 70.0)]
    # 1.96 standard errors of the difference of two shares of 0.8.
    margin = 1.96 * 100 * (2 * 0.8 * 0.2 / 10_000) ** 0.5
    said = f"On 10,000 validation images less than {margin:.1f} points may be chance: 1 of 3 others is that close."
    assert said in verdict(trials)
    assert "0 of 1 other is that close." in verdict([trials[0], trials[3]])
    # With 400 images of 400 right the share is at least 0.9905 (Clopper and Pearson), so a point may be chance.
    assert "less than 1.0 points" in verdict([Trial({"a.b": str(v)}, v, images=400) for v in (100.0, 90.0)])
    for name, images in (("bloodmnist", 1000), ("cifar10", 2400)):
        ((_, specs),) = grid_specs(recipe("ours"), {"data.source": [name]}, [0])
        run = store(tmp_path, specs[0], {}, 0.5)
        if name == "bloodmnist":  # with a val split of its own, of which a CPU scores a thousand
            environment = {"device": "CPU, 1 threads"}
            environment["data"] = run.environment["data"] | {"counts": {"train": 12_000, "val": 1712}}
            write_json(run.path / "environment.json", environment)
        assert trial_of({}, [run]).images == images
    other = replace(recipe("ours"), probe__data="digits")
    ((_, specs),) = grid_specs(other, {"data.source": ["cifar10"]}, [0])
    assert trial_of({}, [store(tmp_path / "other", specs[0], {}, 0.5)]).images is None


def test_a_lead_is_judged_by_the_images_that_were_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images, scored = np.random.default_rng(0).integers(0, 255, (100, 8, 8, 1), dtype=np.uint8), list[int]()
    np.savez(tmp_path / "set.npz", images=images, labels=np.arange(100) % 2)
    plain = probes.probe_accuracies
    monkeypatch.setattr(probes, "probe_accuracies", lambda *x: (scored.append(len(x[2])), plain(*x))[1])
    assert sweep("ratio", 0.2, "--data", tmp_path / "set.npz", "--epochs", 1, "--out", tmp_path / "out") == 0
    (run,) = (tmp_path / "out/runs").iterdir()
    assert find.validation_images(Run(run)) == scored[-1]


def test_a_setting_of_text_is_read_as_its_type() -> None:
    base = recipe("ours")
    changed = with_settings(base, {"augment.crop_scale": "[0.5, 1.0]", "augment.flip": "false", "data.source": "7"})
    assert (changed.augment.crop_scale, changed.augment.flip, changed.data.source) == ((0.5, 1.0), False, "7")
    assert with_settings(recipe("paper"), {"optim.warmup_steps": "none"}).optim.warmup_steps is None
    with pytest.raises(UserError, match=r"did you mean 'augment\.flip'"):
        with_settings(base, {"augment.flop": "1"})
