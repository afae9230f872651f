"""`pmae embed`: it reads as the run did, refuses in one line, and its memory does not grow with the images."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.commands import one_heap, started

from pmae.cli import main
from pmae.config import Config, DecoderConfig, EncoderConfig, TrainConfig, replace
from pmae.derive import resolve
from pmae.pretraining import in_memory
from pmae.runs import Run
from pmae.train import loop
from pmae.train.checkpoint import load_encoder

SHAPE = (8, 12, 3)
TINY = Config(
    encoder=EncoderConfig(patch_size=4, width=16, depth=1, heads=2),
    decoder=DecoderConfig("small", width=16, depth=1, heads=2),
    train=TrainConfig(epochs=1, batch_size=16, device="cpu"),
)


def pixels(count: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, *shape), dtype=np.uint8)


def train(folder: Path, images: np.ndarray, config: Config = TINY) -> Run:
    splits = in_memory(images, config.data)
    config, _ = resolve(config, len(images), splits.train.shape)
    return loop.pretrain(config, splits, folder / "run", quiet=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(tmp_path_factory.mktemp("embed"), pixels(48, *SHAPE))


def write_images(folder: Path, names: list[str], *shape: int) -> None:
    for name, image in zip(names, pixels(len(names), *shape), strict=True):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / name)


def left_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def peaks(run: Path, folders: list[str]) -> None:
    """Embeds one folder after another and prints the most memory that the process has had by then."""
    one_heap()
    for folder in folders:
        assert cli(run, "--data", folder, "-o", f"{folder}.npz") == 0
        print(next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line), flush=True)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read where Linux tells it")
def test_more_images_take_no_more_memory(tmp_path: Path) -> None:
    """1,500 further images of 28 kB are 41 MB; the peak may grow by what directory entries and rounding take."""
    # In pixel space, because the principal components of 27,648 pixels are a matter of minutes.
    config = replace(TINY, space__name="pixels", encoder__patch_size=32)
    run = train(tmp_path, pixels(16, 96, 96, 3), config)
    for index, image in enumerate(pixels(10, 96, 96, 3)):
        Image.fromarray(image).save(tmp_path / f"{index}.bmp")
    for count in (900, 2_400):
        (tmp_path / str(count)).mkdir()
        for number in range(count):
            os.link(tmp_path / f"{number % 10}.bmp", tmp_path / str(count) / f"{number:06d}.bmp")
    folders = [str(tmp_path / str(count)) for count in (900, 2_400)]
    process = started(peaks, run.path, folders, said=str(tmp_path / "said"))
    process.join(120)
    said = (tmp_path / "said").read_text()
    assert process.exitcode == 0, said
    few, many = (int(line.split()[1]) for line in said.splitlines() if "VmHWM" in line)
    assert many - few < 25_000, f"{few:,} kB for 900 images and {many:,} kB for 2,400"
    found = np.load(tmp_path / "2400.npz")
    assert found["features"].shape == (2_400, 16)
    np.testing.assert_allclose(found["features"][:10], found["features"][-10:], atol=1e-6)


def cli(*arguments: object) -> int:
    return main(["embed", *map(str, arguments), "--device", "cpu"])


@pytest.mark.parametrize("settings", [{"data__resize": 8, "data__channels": 3}, {}])
def test_the_command_reads_as_the_run_did(
    settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the settings do not say it, as files of one size and kind need none: the encoder's shape does."""
    run = train(tmp_path, pixels(16, 8, 8, 3), replace(TINY, **settings))
    write_images(tmp_path / "in", ["x/1.png"], 20, 30, 3)
    write_images(tmp_path / "in", ["y/2.png"], 20, 30)
    out = tmp_path / "out.csv"
    assert cli(run.path, "--data", tmp_path / "in", "--labels", "folders", "-o", out, "--batch-size", 1) == 0
    assert capsys.readouterr().out == f"{out}: mean features of 2 images\n"
    header, *lines = out.read_text().splitlines()
    assert header.startswith("name,label,class,mean0,")
    assert [line.split(",")[:3] for line in lines] == [["x/1.png", "0", "x"], ["y/2.png", "1", "y"]]
    files = [Image.open(tmp_path / "in" / name).convert("RGB") for name in ("x/1.png", "y/2.png")]
    centre = (5, 0, 25, 20)
    images = np.stack([np.asarray(file.resize((8, 8), Image.Resampling.BICUBIC, centre)) for file in files])
    _, encoder, standardize = load_encoder(run)
    with torch.no_grad():
        expected = encoder.features(standardize(torch.from_numpy(images.transpose(0, 3, 1, 2))))["mean"].numpy()
    np.testing.assert_allclose(np.array([line.split(",")[3:] for line in lines], np.float32), expected, atol=1e-6)
    np.save(tmp_path / "in.npy", pixels(3, 8, 8, 3))
    assert cli(run.path, "--data", tmp_path / "in.npy", "-o", tmp_path / "out.npz", "--pooling", "patches") == 0
    assert np.load(tmp_path / "out.npz")["features"].shape == (3, 4, 16)


def test_one_image_is_embedded_and_no_data_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(tmp_path, pixels(16, 8, 8, 3), TINY)
    write_images(tmp_path / "in", ["a.png", "b.png"], 20, 30, 3)
    one, out = tmp_path / "in" / "b.png", tmp_path / "one.npz"
    assert cli(run.path, "--data", tmp_path / "in", "-o", tmp_path / "both.npz") == 0
    assert cli(run.path, "--data", one, "-o", out) == 0
    assert capsys.readouterr().out.endswith("mean features of 1 image\n")
    both, found = np.load(tmp_path / "both.npz"), np.load(out)
    np.testing.assert_array_equal(found["features"], both["features"][1:])
    assert found["name"].tolist() == ["b.png"]
    assert cli(run.path, "--data", one, "--labels", "folders", "-o", out) == 2
    assert "--labels is for folders of image files" in capsys.readouterr().err
    before = left_in(tmp_path)
    for command in (
        ["pretrain", "--out", tmp_path / "new"],
        ["evaluate", run.path],
        ["finetune", run.path, "--out", tmp_path / "new"],
    ):
        assert main([*map(str, command), "--data", str(one)]) == 2
        error = capsys.readouterr().err
        assert f"--data must be a set of images, such as a folder, got one image, {str(one)!r}" in error, command
    assert left_in(tmp_path) == before


def test_mistakes_get_one_line_and_write_nothing(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "grey.npy", pixels(4, *SHAPE[:2]))
    np.save(tmp_path / "right.npy", pixels(4, *SHAPE))
    write_images(tmp_path / "small", ["1.png"], 8, 8, 3)
    (tmp_path / "void").mkdir()
    right, out = ["--data", tmp_path / "right.npy"], tmp_path / "new" / "out.npz"
    before = left_in(tmp_path)
    cases: dict[str, list[object]] = {
        "3 channels of 8x12, got 1 channel of 8x12; ": ["--data", tmp_path / "grey.npy", "-o", out],
        "got 1 channel of 8x8": ["--data", "digits", "-o", out],
        "got 3 channels of 8x8; give images of that shape": [
            "--data",
            tmp_path / "small",
            "-o",
            out,
        ],
        "holds no images": ["--data", tmp_path / "void", "-o", out],
        "there is no file or folder": ["--data", tmp_path / "gone.npy", "-o", out],
        "--resize is for folders": [*right, "-o", out, "--resize", 16],
        "--resize must be at least 1, got 0": [*right, "-o", out, "--resize", 0],
        "-o must end in .npz, .csv, .parquet": [*right, "-o", tmp_path / "out.txt"],
        "-o must end in .npz to hold several": [*right, "-o", tmp_path / "out.csv", "--pooling", "patches"],
        "-o must be a file, got the folder": [*right, "-o", tmp_path / "folder.csv"],
        "pooling: unknown name 'max'": [*right, "-o", out, "--pooling", "max"],
        "--batch-size must be at least 1": [*right, "-o", out, "--batch-size", 0],
    }
    (tmp_path / "folder.csv").mkdir()
    for message, arguments in cases.items():
        assert cli(run.path, *arguments) == 2, message
        error = capsys.readouterr().err
        assert error.count("\n") == 1, error
        assert message in error
    assert left_in(tmp_path) == before | {"folder.csv"}


UNITS = {
    "embed": ("--out", "out.npz", "--batch-size", "4"),
    "evaluate": ("--protocols", "knn", "--no-baselines"),
    "finetune": ("--out", "classifier", "--method", "linear"),
}


@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize("command", UNITS)
def test_other_units_are_warned_of_once(
    command: str, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("in.npz", train_images=pixels(20, *SHAPE) / np.float32(255), train_labels=np.arange(20) % 2)
    assert main([command, str(run.path), "--data", "in.npz", *UNITS[command], "--device", "cpu"]) == 0
    assert capsys.readouterr().err.count("images are float32 and the run was trained on uint8") == 1
