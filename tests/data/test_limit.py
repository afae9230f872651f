"""`data.max_images`: what is drawn, what stays whole, what is recorded, and what is refused."""

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import pmae
from pmae.cli import main
from pmae.config import Config, DataConfig, replace
from pmae.data.sets import load
from pmae.runs import Run

SIZES = {"encoder": (16, 1, 2), "decoder": (16, 1, 2)}
SETTINGS = [
    (f"{net}.{name}", value)
    for net, sizes in SIZES.items()
    for name, value in zip(("width", "depth", "heads"), sizes, strict=True)
]
SMALL = [*(word for name, value in SETTINGS for word in (f"--{name}", str(value))), "--device", "cpu", "--epochs", "1"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Forty training images and ten test images of each of two classes, sorted by class."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 40), ("test", 10)):
        for number in range(2 * count):
            path = tmp_path / "set" / split / "ab"[number // count] / f"{number:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 255, (8, 8, 3), dtype=np.uint8)).save(path)
    return tmp_path / "set"


def pretrain(*words: object) -> int:
    return main(["pretrain", *map(str, words), *SMALL])


@pytest.mark.usefixtures("no_figures")
def test_some_files_are_trained_on_and_no_other_is_opened(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    some, more = (load(DataConfig(str(folder), labels="folders", max_images=n)) for n in (30, 50))
    assert set(some.train.names) < set(more.train.names)
    assert some.train.labels is not None
    assert min(np.bincount(some.train.labels)) >= 8  # sorted by class, the first thirty would be of one
    assert some.test is not None
    assert len(some.test) == 20
    for path in (folder / "train").rglob("*.png"):
        if str(path.relative_to(folder)) not in some.train.names:
            path.write_bytes(b"no image")
    given = ("--data", folder, "--data.labels", "folders", "--data.max-images", 30, "--data.max-unreadable", 0)
    out = tmp_path / "run"
    assert pretrain(*given, "--out", out) == 0
    assert "30 of the 80 training images are used (data.max_images), drawn by a fixed rule" in capsys.readouterr().out
    run = Run(out)
    assert run.config.data.max_images == 30
    assert run.environment["data"]["counts"] == {"train": 30, "test": 20}
    # The run's own images are these; other seeds have the same, and another number is another run.
    assert main(["evaluate", str(out), "--protocols", "knn", "--no-baselines", "--device", "cpu"]) == 0
    assert pretrain(*given, "--seed", 1, "--out", tmp_path / "other") == 0
    data = [Run(tmp_path / name).environment["data"]["fingerprint"] for name in ("run", "other")]
    assert data[0] == data[1]
    capsys.readouterr()
    assert pretrain("--out", out, "--resume", "--data.max-images", 20) == 2
    assert "--data.max-images must stay 30 when a run is resumed, got 20" in capsys.readouterr().err


@pytest.mark.usefixtures("no_figures")
def test_other_images_are_embedded_whole(folder: Path, tmp_path: Path) -> None:
    assert pretrain("--data", folder, "--data.max-images", 30, "--out", tmp_path / "run") == 0
    out = tmp_path / "all.npz"
    assert main(["embed", str(tmp_path / "run"), "--data", str(folder), "-o", str(out), "--device", "cpu"]) == 0
    assert len(np.load(out)["features"]) == 100


@pytest.mark.usefixtures("no_figures")
def test_images_of_an_array_keep_their_numbers(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 255, (60, 8, 8, 3), dtype=np.uint8)
    np.save(tmp_path / "x.npy", images)
    drawn = load(DataConfig(str(tmp_path / "x.npy"), max_images=40)).train
    places = [int(name.removeprefix("#")) for name in drawn.names]
    np.testing.assert_array_equal(np.asarray(drawn.images), images[places].transpose(0, 3, 1, 2))
    assert pretrain("--data", tmp_path / "x.npy", "--data.max-images", 40, "--out", tmp_path / "run") == 0
    run = Run(tmp_path / "run")
    assert run.environment["data"]["counts"] == {"train": 36, "val": 4}
    assert set(run.results["held_out"]) < set(drawn.names)
    config = replace(Config(), data__max_images=40, train__epochs=1, train__device="cpu")
    config = replace(config, **{name.replace(".", "__"): value for name, value in SETTINGS})
    again = pmae.pretrain(config, images, tmp_path / "again", quiet=True)
    assert again.results["held_out"] == run.results["held_out"]


@pytest.mark.usefixtures("no_figures")
def test_each_number_is_a_run_of_its_own_in_a_sweep(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["sweep", "data.max_images", "20", "40", "--data", str(folder), "--out", str(tmp_path / "out")]
    words += ["--epochs", "1", "--device", "cpu", "--set", *(f"{name}={value}" for name, value in SETTINGS)]
    assert main(words) == 0
    runs = [Run(path.parent) for path in (tmp_path / "out" / "runs").glob("*/config.json")]
    assert sorted(run.environment["data"]["counts"]["train"] for run in runs) == [20, 40]
    capsys.readouterr()
    assert main(words) == 0
    assert "pretrains" not in capsys.readouterr().out


def test_too_few_too_many_and_shards_are_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with tarfile.open(tmp_path / "shard.tar", "w") as tar:
        for path in sorted((folder / "train").rglob("*.png")):
            header = tarfile.TarInfo(path.name)
            header.size = path.stat().st_size
            tar.addfile(header, io.BytesIO(path.read_bytes()))
    for source, number, message in (
        (folder, 1, "--data.max-images must be at least 2, got 1"),
        (folder, 81, "--data.max-images must be at most the number of training images (80), got 81"),
        (tmp_path / "shard.tar", 20, "--data.max-images must be left unset for shards, got 20"),
    ):
        assert pretrain("--data", source, "--data.max-images", number, "--out", tmp_path / "run") == 2
        error = capsys.readouterr().err
        assert (error.count("\n"), message in error) == (1, True), error
        assert not (tmp_path / "run").exists()
