"""Masking spaces side by side: a table of runs that are made once, and figures of spaces that are only fitted."""

import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from sklearn.decomposition import PCA

from pmae.cli import main
from pmae.config import DataConfig
from pmae.errors import UserError
from pmae.files import write_json
from pmae.runs import Run
from pmae.spaces import SPACES
from pmae.sweep.space_figures import figures_page
from pmae.sweep.spaces import CHOSEN, SpaceGrid, scores_figure, space_label, space_settings, space_specs
from pmae.train.loop import Pretraining

from .conftest import SMALL, shaded


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A .npz file of 40 grey-brown images of 16x24, with labels."""
    images, labels = shaded(64, 16, 4, 0)
    wide = np.concatenate([images, images[:, :, :8]], 2)
    parts = {"train": slice(0, 40), "test": slice(40, 64)}
    saved = {f"{name}_images": wide[part] for name, part in parts.items()}
    np.savez(tmp_path / "set.npz", **saved, **{f"{name}_labels": labels[part] for name, part in parts.items()})
    return tmp_path / "set.npz"


def spaces(*arguments: object) -> int:
    return main(["spaces", *map(str, arguments)])


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_a_small_table_is_run_once_and_found_again(
    tmp_path: Path, files: Path, forbid_work: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = ["--spaces", "kernel_pca:landmarks=16", "pixels", "--ratios", 0.2, "--mae-ratios", 0.5, 0.75]
    common = ["table", "--data", files, *chosen, "--epochs", 1, *SMALL, "--out", tmp_path]
    assert spaces(*common) == 0
    made = sorted(path.name.rpartition("-")[0] for path in (tmp_path / "runs").iterdir())
    assert made == ["kernel_pca-landmarks=16-0.2-seed0", "pixels-0.5-seed0", "pixels-0.75-seed0"]
    found = rows(tmp_path / "spaces.csv")
    assert [(row["space"], row["ratio"]) for row in found] == [
        ("kernel_pca:landmarks=16", "0.2"), ("pixels", "0.5"), ("pixels", "0.75"),
    ]  # fmt: skip
    for row, path in zip(found, sorted((tmp_path / "runs").iterdir()), strict=True):
        _check_row(row, Run(path))
    assert found[0]["pre-image error"]
    assert not found[1]["pre-image error"]
    forbid_work()
    capsys.readouterr()
    assert spaces(*common) == 0
    assert "pretrains" not in capsys.readouterr().out
    assert rows(tmp_path / "spaces.csv") == found


def _check_row(row: dict[str, str], run: Run) -> None:
    """The row says what the run folder says."""
    ends = run.results["pretrain"]
    assert float(row["R2"].replace("−", "-")) == pytest.approx(ends["held_out_r2"], abs=6e-4)
    (evaluation,) = run.evaluations
    for kind, column in (("linear", "linear %"), ("knn", "k-NN %")):
        (score,) = [s for s in evaluation.scores if (s.protocol, s.pooling, s.split) == (kind, "mean", "test")]
        assert float(row[column]) == pytest.approx(score.accuracy.value)
    shares = [line["masked_share"] for line in run.metrics() if "masked_share" in line]
    assert float(row["hidden"]) == pytest.approx(np.mean(shares), abs=6e-4)
    logged = [line["images_per_second"] for line in run.metrics() if "images_per_second" in line]
    assert int(row["images/s"]) == round(np.median(logged))
    assert float(row["fit, s"]) == pytest.approx(run.environment["fit_seconds"], abs=6e-3)
    assert run.environment["fit_seconds"] > 0


def test_other_commands_find_the_runs_of_a_table(
    root: Path, tmp_path: Path, forbid_work: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """A sweep and a figure of the paper ask for the same settings in other words, and train nothing again."""
    files, heads = ["--root", root, *SMALL[:-2]], SMALL[-2:]
    chosen = ["--spaces", "pca", "pixels", "--ratios", 0.2, "--mae-ratios", 0.2, "--epochs", 1]
    assert spaces("table", "--data", "dermamnist", *chosen, *files, *heads, "--out", tmp_path / "a") == 0
    forbid_work()
    same = ["--epochs", 1, *files, "--set", "encoder.patch_size=8", "decoder.name=small", "--runs", tmp_path / "a/runs"]
    for recipe in ("masking", "mae_masking"):
        command = ["sweep", "ratio", 0.2, "--data", "dermamnist", "--recipe", recipe, *same, "--out", tmp_path / recipe]
        assert main([str(word) for word in command]) == 0
        assert len(rows(tmp_path / recipe / "sweep.csv")) == 1
    command = ["paper", "spread", "--datasets", "dermamnist", "--recipe", "masking", "--ratios", 0.2, *same, *heads]
    assert main([str(word) for word in [*command, "--preset", "strong", "--out", tmp_path / "c"]]) == 0
    assert [row["ratios"] for row in rows(tmp_path / "c/spread-comparison.csv")] == ["1", "1"]
    assert "pretrains" not in capsys.readouterr().out.partition("spaces-table.md")[2]


def test_the_length_that_a_table_tells_is_that_of_its_runs(tmp_path: Path, files: Path) -> None:
    asked = ["--data", files, "--spaces", "cosine", "--ratios", 0.2, "--epochs", 2]
    assert spaces("table", *asked, *SMALL, "--out", tmp_path) == 0
    assert "Epochs: 2, seeds: 1" in (tmp_path / "spaces-table.md").read_text()


def test_a_killed_table_goes_on_where_it_was(
    tmp_path: Path, files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["table", "--data", files, "--spaces", "pca", "cosine", "--ratios", 0.2, "--epochs", 2, *SMALL]
    before, steps = Pretraining.inputs, []

    def die(self: Pretraining, *arguments: object, **named: object) -> object:
        steps.append(self.step)
        if len(steps) == 7:  # of 2 steps an epoch and 4 a run: in the second run, after its first epoch
            raise KeyboardInterrupt
        return before(self, *arguments, **named)

    monkeypatch.setattr(Pretraining, "inputs", die)
    assert spaces(*common, "--out", tmp_path) == 130
    monkeypatch.setattr(Pretraining, "inputs", before)
    capsys.readouterr()
    assert spaces(*common, "--out", tmp_path) == 0
    printed = capsys.readouterr().out
    assert "pca-0.2-seed0" not in printed  # trained and evaluated before the second began
    assert "cosine-0.2-seed0: goes on" in printed
    found = rows(tmp_path / "spaces.csv")
    assert [row["space"] for row in found] == ["pca", "cosine"]
    # What is still to be scored, and can no longer be, is trained again from the checkpoint before.
    (path,) = (tmp_path / "runs").glob("cosine*")
    write_json(path / "results.json", {"pretrain": Run(path).results["pretrain"]})
    (path / "checkpoints/epoch_0002/encoder.safetensors").write_bytes(b"damaged")
    assert spaces(*common, "--out", tmp_path) == 0
    said = capsys.readouterr()
    assert "cosine-0.2-seed0: goes on" in said.out
    assert "epoch_0002 is damaged and the one before it is used" in said.err
    assert rows(tmp_path / "spaces.csv")[1]["linear %"] == found[1]["linear %"]


def test_images_without_labels_are_compared_by_r2_alone(tmp_path: Path) -> None:
    np.save(tmp_path / "images.npy", shaded(40, 16, 2, 0)[0])
    common = ["--data", tmp_path / "images.npy", "--spaces", "wavelet", "--ratios", 0.2, "--epochs", 1, *SMALL]
    assert spaces("table", *common, "--out", tmp_path) == 0
    (row,) = rows(tmp_path / "spaces.csv")
    assert row["R2"]
    assert (row["linear %"], row["k-NN %"]) == ("", "")


def test_only_found_leaves_gaps_and_runs_nothing(
    tmp_path: Path, files: Path, forbid_work: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    forbid_work()
    assert spaces("table", "--data", files, "--spaces", "pca", "--only-found", "--out", tmp_path, *SMALL) == 0
    assert "3 of 3 runs are not there yet" in capsys.readouterr().out
    assert [row["R2"] for row in rows(tmp_path / "spaces.csv")] == ["", "", ""]


def test_figures_have_a_row_a_space_and_a_column_a_picture(tmp_path: Path) -> None:
    """On the photographs that are embedded: files are written, and every label and title is there."""
    chosen = ("wavelet:levels=3", "cosine:grouped=true", "learned", "pixels")
    assert spaces("figures", "--spaces", *chosen, "--images", 64, "--out", tmp_path, "--device", "cpu") == 0
    for name in ("basis", "hidden", "spectra"):
        assert (tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
        assert "<svg" in (tmp_path / f"{name}.svg").read_text()
    page = figures_page(SpaceGrid(DataConfig(), chosen, device="cpu"), images=64)
    figures = {drawing.name: drawing.figure for drawing in page.drawings}
    shown = ["wavelet\n3", "cosine\ngrouped", "pixels\N{NO-BREAK SPACE}(MAE)\n50/75/90%"]
    side, gap = 32, 2
    for name, labels, columns in (("basis", shown[:2], 9), ("hidden", shown, 7)):
        (axes,) = figures[name].axes
        texts = [text.get_text() for text in axes.texts]
        assert texts[columns:] == labels
        height, width = axes.images[0].get_array().shape[:2]
        assert (height, width) == (len(labels) * (side + gap) - gap, columns * (side + gap) - gap)
    (axes,) = figures["spectra"].axes
    assert len(axes.lines) == 3
    assert all(line.get_ydata()[-1] == pytest.approx(100, abs=0.01) for line in axes.lines)
    (table,) = page.tables
    assert [row[0] for row in table.rows] == [space for space in chosen if space != "learned"]
    assert "64 of the 5,202 training images" in table.note
    assert "Not shown: learned" in table.note


def test_fitted_spaces_show_their_basis_and_hide_what_adds_up(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Basis images are scikit-learn's axes, and visible and hidden parts make the image, in every space."""
    seen: list = []
    monkeypatch.setattr("pmae.sweep.space_figures.spectra_figure", lambda made, said: seen.extend(made))
    monkeypatch.setattr("pmae.sweep.space_figures.hidden_figure", lambda *given: None)
    monkeypatch.setattr("pmae.sweep.space_figures.basis_figure", lambda *given: None)
    chosen = tuple(space for space in CHOSEN if space != "learned")
    chosen = tuple(space.replace("256", "8").replace("diffusion", "diffusion:landmarks=20") for space in chosen)
    figures_page(SpaceGrid(DataConfig(source=str(files)), chosen, device="cpu"), picture=1)
    with np.load(files) as stored:
        train, image = (stored[f"{part}_images"].astype(np.float64) for part in ("train", "test"))
    mean, std = train.mean((0, 1, 2)), train.std((0, 1, 2))
    standard = (np.moveaxis(train, 3, 1) - mean[:, None, None]) / std[:, None, None]
    reference = PCA(3).fit(standard.reshape(len(train), -1))
    for mine, axis in zip(seen[0].basis[:3], reference.components_, strict=True):
        assert abs(mine.ravel() @ axis) == pytest.approx(1, abs=1e-3)
    assert seen[0].share[:3] == pytest.approx(reference.explained_variance_ratio_, rel=1e-3)
    assert {one.space for one in seen} == set(chosen)
    # Of 16x24x3 numbers pretraining on a CPU keeps 512 leading components, and the rest as one more.
    assert len(seen[0].share) == 513
    for one in seen:
        whole = one.visible + one.hidden * std[:, None, None]
        assert np.allclose(whole, np.moveaxis(image[1], 2, 0), atol=0.05)
        assert (one.hidden**2).sum((1, 2, 3)).min() > 0


def test_signals_have_spectra_alone(tmp_path: Path) -> None:
    np.save(tmp_path / "signals.npy", np.random.default_rng(0).normal(size=(40, 2, 32)).astype(np.float32))
    data = DataConfig(source=str(tmp_path / "signals.npy"), layout="NCL")
    page = figures_page(SpaceGrid(data, ("cosine", "pixels"), device="cpu"))
    assert [drawing.name for drawing in page.drawings] == ["spectra"]


MISTAKES = {
    "an unknown space": (["--spaces", "pac"], "did you mean 'pca'"),
    "an unknown setting": (["--spaces", "pca:componets=3"], "space.components"),
    "a setting without a value": (["--spaces", "pca:256"], "name:setting=value"),
    "a setting of another space": (["--spaces", "cosine:landmarks=8"], "space.landmarks must be left unset"),
    "the same twice": (["--spaces", "pca", "pca"], "no two alike"),
    "a ratio": (["--spaces", "pca", "--ratios", "20"], "ratios must be different shares in (0, 1)"),
    "a ratio as a setting": (["--set", "masking.masked_variance=0.3"], "must be given by --ratios, got '0.3'"),
    "a seed as a setting": (["--set", "train.seed=3"], "train.seed must be given by --seeds, got '3'"),
    "a space as a setting": (["--set", "space.name=ica"], "space.name must be given by --spaces, got 'ica'"),
    "a part": (["tables"], "did you mean 'table'"),
    "too many levels": (["--spaces", "wavelet:levels=9"], "space.levels must be at most 5"),
    "a picture": (["figures", "--spaces", "pca", "--picture", "99999"], "picture must be the number of"),
    "too few images": (["figures", "--spaces", "pca", "--images", "1"], "images must be at least 2"),
    "nothing to show": (["figures", "--spaces", "learned", "--images", "9"], "fitted and not learned"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, told = MISTAKES[name]
    assert spaces(*arguments, "--out", tmp_path / "out", "--device", "cpu") == 2
    said = capsys.readouterr().err
    assert told in said
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_the_usual_grid_is_every_space_at_three_ratios_with_nothing_else_apart() -> None:
    specs = [spec for cell in space_specs(SpaceGrid(DataConfig())).values() for spec in cell]
    assert len(specs) == 39
    assert len({spec.folder for spec in specs}) == 39
    assert {spec.config.space.name for spec in specs} == set(SPACES)
    for room in ("data", "encoder", "decoder", "optim", "train", "augment"):
        assert len({getattr(spec.config, room) for spec in specs}) == 1
    assert {spec.config.masking.per for spec in specs} == {"image"}
    assert specs[0].config.encoder.patch_size == 8
    assert specs[0].config.train.epochs == 50
    # Of 8x8 pixels, which would be one patch, some are to be hidden too.
    assert SpaceGrid(DataConfig("digits")).config("pixels").encoder.patch_size == 2


@pytest.mark.usefixtures("registry")
def test_a_space_of_ones_own_has_options(tmp_path: Path, files: Path) -> None:
    made = [
        "@pmae.register('space', 'slower')",
        "class Slower(Cosine):",
        "    def __init__(self, shape, config, *, at=''):",
    ]
    lines = ["import pmae", "from pmae.spaces import Cosine", *made, "        super().__init__(shape, config)"]
    (tmp_path / "my_slower.py").write_text("\n".join(lines))
    own = "slower(at='a/b'):grouped=true"
    common = ["--data", files, "--spaces", "pca", own, "--ratios", 0.2, "--import", tmp_path / "my_slower.py"]
    assert spaces("table", *common, "--epochs", 1, *SMALL, "--out", tmp_path) == 0
    assert [row["space"] for row in rows(tmp_path / "spaces.csv")] == ["pca", own]
    assert spaces("figures", *common, "--out", tmp_path) == 0


def test_names_of_spaces() -> None:
    assert space_settings("kernel_pca:landmarks=9,gamma=0.1") == {
        "space.name": "kernel_pca", "space.landmarks": "9", "space.gamma": "0.1",
    }  # fmt: skip
    assert space_label("kernel_pca:landmarks=9,gamma=0.1") == "kernel\N{NO-BREAK SPACE}pca 9 gamma=0.1"
    assert space_label("wavelet:grouped=true") == "wavelet grouped"
    with pytest.raises(UserError, match="no_such"):
        space_settings("no_such")


def test_scores_stand_in_the_order_of_the_best_probe() -> None:
    rows = [
        ["pca", "0.1", "0.1", "0.5", 51.0, 45.0, 1000, "0.1", None],
        ["pca", "0.2", "0.2", "0.5", 53.0, 47.0, 1000, "0.1", None],
        ["wavelet", "0.1", "0.1", "0.5", 50.0, 41.0, 1000, "0.1", None],
        ["pixels", "0.75", "0.75", "0.5", 52.0, 46.0, 1000, "0.1", None],
        ["cosine", "0.1", "0.1", "0.5", None, None, 1000, "0.1", None],
    ]
    linear, knn = scores_figure(rows).figure.axes
    for panel in (linear, knn):
        assert [text.get_text() for text in panel.get_yticklabels()] == ["wavelet", "pixels (MAE)", "pca"]
    dots = [tuple(found.get_offsets().tolist()[0]) for found in linear.collections]
    assert dots == [(50.0, 0.0), (52.0, 1.0), (51.0, 2.0), (53.0, 2.0)]


def test_spaces_are_told_apart_from_the_first_on_the_same_images(
    tmp_path: Path, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = ["--spaces", "pca", "cosine", "pixels", "--ratios", 0.2, 0.4, "--mae-ratios", 0.5]
    assert spaces("table", "--data", files, *chosen, "--epochs", 1, *SMALL, "--out", tmp_path) == 0
    assert "Which spaces differ from the first by more than chance" in capsys.readouterr().out
    found, table = rows(tmp_path / "spaces-differences.csv"), rows(tmp_path / "spaces.csv")
    assert [(row["space"].split()[0], row["protocol"]) for row in found] == [
        (space, protocol) for space in ("cosine", "pixels") for protocol in ("linear probe", "k-NN")
    ]
    values = {f"{row['space']} {row['ratio']}": row for row in table}
    for row in found:
        column = {"linear probe": "linear %", "k-NN": "k-NN %"}[row["protocol"]]
        points = float(values[row["space"]][column]) - float(values[row["against"]][column])
        assert float(row["difference"]) == pytest.approx(points, abs=1e-5)
        assert float(row["low"]) <= points <= float(row["high"])
        assert row["how"] == "paired"
    # Ratios are chosen by the probe of validation images, never by the test images of the table.
    ends = {
        run.name.rpartition("-seed0")[0]: Run(run).results["pretrain"]["linear"]
        for run in (tmp_path / "runs").iterdir()
    }
    best = max((0.2, 0.4), key=lambda ratio: ends[f"pca-{ratio}"])
    assert {row["against"] for row in found} == {f"pca {best}"}
