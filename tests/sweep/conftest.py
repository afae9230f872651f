"""The paper's five data sets in their standard files, in small; and stored results without checkpoints."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from pmae.derive import resolve
from pmae.runs import Run, create_run
from pmae.sweep.find import RunSpec

SMALL = [
    *("--set", "encoder.width=16", "encoder.depth=1", "encoder.heads=2", "decoder.width=16", "decoder.depth=1"),
    *("decoder.heads=2", "train.batch_size=16", "optim.warmup_steps=1", "train.precision=float32"),
    *("--device", "cpu", "--head-epochs", "2"),
]
"""Options of `pmae paper` that make a run take a moment."""


def shaded(count: int, side: int, classes: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(N, side, side, 3) uint8 coarse noise, brighter by class, and the class numbers."""
    rng, labels = np.random.default_rng(seed), np.arange(count) % classes
    coarse = np.kron(rng.normal(size=(count, side // 4, side // 4, 3)), np.ones((1, 4, 4, 1)))
    return (40 * coarse + 90 + 20 * labels[:, None, None, None]).clip(0, 255).astype(np.uint8), labels


def write_medmnist(path: Path, seed: int) -> None:
    saved: dict[str, Any] = {}
    for number, (split, count) in enumerate((("train", 48), ("val", 20), ("test", 24))):
        images, labels = shaded(count, 16, 4, 3 * seed + number)
        saved |= {f"{split}_images": images, f"{split}_labels": labels.astype(np.uint8)[:, None]}
    np.savez(path, **saved)


def write_cifar10(folder: Path) -> None:
    folder.mkdir()
    for number, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        images, labels = shaded(10, 32, 10, number)
        planes = images.transpose(0, 3, 1, 2).reshape(10, -1)
        (folder / f"{name}.bin").write_bytes(np.concatenate([labels[:, None], planes], 1).astype(np.uint8).tobytes())


def write_tinyimagenet(tree: Path) -> None:
    lines = []
    for wnid in ("n01", "n02"):
        (tree / "train" / wnid / "images").mkdir(parents=True)
    (tree / "val" / "images").mkdir(parents=True)
    images, labels = shaded(40, 16, 2, 0)
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        wnid, held_out = f"n0{label + 1}", number >= 30
        file = (
            tree / "val/images" / f"{number}.JPEG" if held_out else tree / "train" / wnid / "images" / f"{number}.JPEG"
        )
        Image.fromarray(image).save(file)
        lines += [f"{file.name}\t{wnid}\t0\t0\t9\t9\n"] if held_out else []
    (tree / "val" / "val_annotations.txt").write_text("".join(lines))


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with all five sets as they are published, only smaller."""
    folder = tmp_path_factory.mktemp("data")
    for seed, name in enumerate(("dermamnist", "bloodmnist", "pathmnist")):
        write_medmnist(folder / f"{name}_64.npz", seed)
    write_cifar10(folder / "cifar-10-batches-bin")
    write_tinyimagenet(folder / "tiny-imagenet-200")
    return folder


@pytest.fixture(autouse=True)
def no_figures_of_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures in each run folder have tests of their own, and take longer than these runs."""
    monkeypatch.setattr("pmae.api.save_figures", lambda run: [])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small are slower on two threads, which wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def forbid_work(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A function after which pretraining or evaluating anything is an error."""

    def forbid() -> None:
        def refuse(*arguments: object, **named: object) -> None:
            raise AssertionError("nothing was to be run")

        monkeypatch.setattr("pmae.api.pretrain", refuse)
        monkeypatch.setattr("pmae.api.evaluate", refuse)

    return forbid


def entry(protocol: str, split: str, value: float, std: float | None = None) -> dict[str, Any]:
    metric = {"value": value, "low": value - 0.01, "high": value + 0.01, "std": std}
    metrics = dict.fromkeys(("accuracy", "balanced_accuracy", "macro_auc", "macro_f1"), metric)
    return {
        "protocol": protocol,
        "pooling": "cls",
        "split": split,
        "images": 100,
        "metrics": metrics,
        "runs": [{"seed": 0}],
    }


@pytest.fixture
def store() -> Callable[..., Run]:
    """A function that writes what a published run folder holds: settings, environment and results, no checkpoints."""

    def write(
        folder: Path, spec: RunSpec, linear: dict[int, float], validation: float, preset: str = "paper", **other: float
    ) -> Run:
        data = {"name": spec.config.data.source, "shape": [3, 64, 64], "dtype": "uint8", "counts": {"train": 12_000}}
        config, _ = resolve(spec.config, 12_000, (3, 64, 64))
        environment = {"device": "a card", "data": data | {"classes": ["a", "b"], "notes": ["made up"]}}
        run = create_run(folder / spec.folder, config, environment)
        described = {"name": data["name"], "classes": ["a", "b"]}
        method = "mae" if config.space.name == "pixels" else "pmae"
        evaluation = {
            f"{method} epoch {epoch} [{preset}]": {
                "data": described,
                "preset": preset,
                "results": [entry("linear", "test", value), *(entry(k, "test", v) for k, v in other.items())],
            }
            for epoch, value in linear.items()
        }
        run.add_results(pretrain={"epoch": config.train.epochs, "linear": validation}, evaluation=evaluation)
        (run.path / "metrics.jsonl").write_text('{"epoch": 1.0, "step": 9, "loss": 1.0, "images_per_second": 5000.0}\n')
        return run

    return write
