"""Striped pictures of three classes, in every form that labels come in, and a run that was never trained."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from pmae.cli import main
from pmae.config import Config, EncoderConfig
from pmae.files import write_json
from pmae.models import build_encoder
from pmae.runs import Run, create_run

CLASSES = ("across", "down", "slanted")
SIDE = 8


def stripes(labels: np.ndarray, seed: int = 0, tint: float = 25) -> np.ndarray:
    """uint8 images (N, 8, 8, 3) whose stripes run as the class says, tinted."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:SIDE, :SIDE]
    waves = np.stack([y, x, (x + y) * 0.7])[labels] + rng.uniform(0, 7, (len(labels), 1, 1))
    pixels = 128 + 60 * np.sin(waves)[..., None] + rng.normal(0, 12, (len(labels), SIDE, SIDE, 3))
    pixels += tint * np.eye(3)[labels][:, None, None]
    return pixels.clip(0, 255).astype(np.uint8)


def write_folder(folder: Path, per_class: int, seed: int = 0, tint: float = 25) -> Path:
    """PNG files in a folder for each class."""
    labels = np.repeat(np.arange(3), per_class)
    for number, (label, image) in enumerate(zip(labels, stripes(labels, seed, tint), strict=True)):
        path = folder / CLASSES[label] / f"{number:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    return folder


def write_table(path: Path, rows: list[dict[str, Any]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return path


def make_run(folder: Path, name: str = "vit_tiny", shape: tuple[int, int, int] = (3, SIDE, SIDE)) -> Run:
    """A run folder with random weights: features of random weights tell stripes apart."""
    torch.manual_seed(0)
    vit = name == "vit_tiny"
    sizes: dict[str, Any] = {"patch_size": 4, "width": 16, "depth": 2, "heads": 2, "first_patch_size": 0} if vit else {}
    config = Config(encoder=EncoderConfig(name, **sizes))
    data = {"name": "toy", "shape": list(shape), "dtype": "uint8", "counts": {"train": 64}, "notes": []}
    run = create_run(folder, config, {"data": data})
    levels = {"mean": 128.0, "std": 45.0}
    fitted = {f"standardize.{key}": torch.full((shape[0], 1, 1), value) for key, value in levels.items()}
    save_file(fitted, run.path / "fitted.safetensors")
    checkpoint = run.path / "checkpoints" / "epoch_0001"
    checkpoint.mkdir(parents=True)
    save_file(build_encoder(config.encoder, shape).net.state_dict(), checkpoint / "encoder.safetensors")
    write_json(checkpoint / "state.json", {"epoch": 1, "step": 1, "files": {}})
    return run


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture(scope="session")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("data") / "labelled", 20)


@pytest.fixture(scope="session")
def linear(run: Run, labelled: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished classifier, by the command line."""
    out = tmp_path_factory.mktemp("classifiers") / "linear"
    assert main(["finetune", str(run.path), "--data", str(labelled), "--method", "linear", "--out", str(out)]) == 0
    return out


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Runs a command; its exit code, and what it said."""

    def call(*words: object) -> tuple[int, str]:
        code = main([str(word) for word in words])
        said = capsys.readouterr()
        return code, said.err if code else said.out

    return call
