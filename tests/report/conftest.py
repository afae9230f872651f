"""Small synthetic run folders, written with the package's own functions."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from pmae.config import Config, replace
from pmae.runs import Run, create_run
from pmae.standing import scores_of


def _suite(accuracy: dict[str, float], data: str = "bloodmnist", half: float = 0.02, **more: Any) -> dict[str, Any]:
    """One evaluated representation: `accuracy` by "protocol/pooling/split"; intervals reach `half` to each side."""
    classes = more.pop("classes", ["round", "square"])
    entries = []
    for key, value in accuracy.items():
        protocol, pooling, split = key.split("/")
        metric = {"value": value, "low": value - half, "high": value + half, "std": None}
        right = round(50 * value)
        entries.append(
            {
                "protocol": protocol,
                "pooling": pooling,
                "split": split,
                "images": 100,
                "metrics": {"accuracy": metric, "balanced_accuracy": metric, "macro_auc": None, "macro_f1": metric},
                "chosen_on": "fixed by the preset",
                "runs": [{"seed": 0, "chosen": {}, "metrics": {"accuracy": metric}}],
                "per_class": [{"class": c, "precision": value, "recall": None, "support": 50} for c in classes],
                "confusion": [[right, 50 - right], [50 - right, right]],
                "notes": [],
            }
        )
    described = {"name": data, "classes": classes, "train": 400, "val": None, "test": 100, "notes": []}
    described |= {"duplicates": {"test": {"count": 0, "pairs": []}}, "majority": {"test": 0.5, "val": 0.5}}
    base = {"format": 1, "data": described, "preset": "paper", "settings": {}, "seeds": [0], "features": {}}
    return base | {"results": entries, "seconds": {"probes": 2.5}, "notes": []} | more


def write_metrics(run: Run, epochs: int, spectral: bool, probes: bool = True) -> None:
    """A training line twice an epoch and the signals after it."""
    lines = []
    for epoch in range(epochs):
        for half in (1, 2):
            step = 10 * epoch + 5 * half
            lines.append({"epoch": step / 10, "step": step, "loss": 2 / step, "r2": 1 - 9 / step, "masked_share": 0.2})
            lines[-1] |= {"lr": 1e-3, "images_per_second": 100.0}
        signals: dict[str, float] = {"epoch": epoch + 1.0, "step": 10 * epoch + 10, "held_out_r2": 0.1 * epoch}
        signals |= {"r2_band_0_50": 0.2 * epoch, "r2_band_50_80": 0.0} if spectral else {}
        lines.append(signals | ({"knn": 0.5, "linear": 0.6, "effective_rank": 8.0} if probes else {}))
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_samples(run: Run, shape: tuple[int, int, int], dtype: str, space: str) -> dict[str, np.ndarray]:
    """Pictures of noise with an exact orthonormal basis, of which a fifth of the components is hidden."""
    rng, size = np.random.default_rng(0), int(np.prod(shape))
    scale = {"uint8": 40.0, "uint16": 9000.0}.get(dtype, 0.2)
    x = rng.normal(size=(8, *shape))
    basis = np.linalg.qr(rng.normal(size=(size, size)))[0]
    if space == "pca":
        hidden = (rng.random((8, size)) < 0.2).astype(np.float64)
        target = ((x.reshape(8, -1) @ basis.T * hidden) @ basis).reshape(x.shape)
    else:
        hidden = np.kron(rng.random((8, 1, shape[1] // 2, shape[2] // 2)) < 0.75, np.ones((1, 1, 2, 2)))
        target = x * hidden
    tensors = {"original": 3 * scale + scale * x, "visible": 3 * scale + scale * (x - target)}
    tensors |= {"target": target, "prediction": 0.5 * target}
    fitted = {
        "standardize.mean": np.full((shape[0], 1, 1), 3 * scale),
        "standardize.std": np.full((shape[0], 1, 1), scale),
    }
    if space == "pca":
        variance = 1.0 / np.arange(1, size + 1) ** 2
        tensors |= {"hidden": hidden, "variance": variance, "top": x, "middle": 0.1 * x, "bottom": 0.01 * x}
        fitted |= {"space.components": basis, "space.variance": variance}
    for name, found in (("samples", tensors), ("fitted", fitted)):
        save_file({key: value.astype(np.float32) for key, value in found.items()}, run.path / f"{name}.safetensors")
    return {"hidden": hidden, **tensors}


@pytest.fixture(scope="session")
def suite() -> Callable[..., dict[str, Any]]:
    """A function that makes one evaluated representation."""
    return _suite


def _write_run(
    folder: Path,
    name: str = "toy",
    shape: tuple[int, int, int] = (3, 8, 8),
    dtype: str = "uint8",
    space: str = "pca",
    epochs: int = 3,
    evaluation: dict[str, Any] | None = None,
    features: bool = False,
    pictures: bool = True,
    data: dict[str, Any] | None = None,
    **settings: Any,
) -> Run:
    config = replace(Config(), train__epochs=3, train__batch_size=20, space__name=space, **settings)
    described = {"name": "bloodmnist", "shape": list(shape), "dtype": dtype, "counts": {"train": 400, "test": 100}}
    described |= {"classes": ["round", "square"], "notes": []} | (data or {})
    packages = {"pmae": "0.1.0", "torch": "2.11.0"}
    environment = {"python": "3.11.9", "packages": packages, "device": "CPU", "commit": "abc", "data": described}
    run = create_run(folder / name, config, environment)
    write_metrics(run, epochs, spectral=space == "pca")
    (run.path / "checkpoints" / "epoch_0003").mkdir(parents=True)
    (run.path / "checkpoints" / "epoch_0003" / "state.json").write_text('{"epoch": 3, "step": 30}')
    if pictures:
        write_samples(run, shape, dtype, space)
    if evaluation is not None:
        run.add_results(evaluation=evaluation)
    if features:
        write_features(run, shape)
    return run


def write_features(run: Run, shape: tuple[int, int, int]) -> None:
    """Twenty images on a map: of the first scores, every fifth answer is wrong."""
    rng, labels = np.random.default_rng(0), np.arange(20) % 2
    values = {"features": rng.normal(size=(20, 6)).astype(np.float32), "labels": labels, "places": np.arange(20)}
    values["pictures"] = rng.integers(0, 255, (20, *shape), dtype=np.uint8)
    near = (np.arange(20)[:, None] + np.arange(1, 7)) % 20
    values |= {"neighbours": near.astype(np.int16), "random_neighbours": near[:, ::-1].astype(np.int16).copy()}
    save_file(values, run.path / "features.safetensors")
    truth = np.arange(100) % 2
    answers = np.stack([truth, np.where(np.arange(100) % 5 == 0, 1 - truth, truth)]).astype(np.int16)
    save_file({score.key: answers for score in scores_of(run.evaluations)}, run.path / "answers.safetensors")


@pytest.fixture(scope="session")
def write_run() -> Callable[..., Run]:
    """A function that writes a finished run into a folder; what it evaluates and how far it came can be changed."""
    return _write_run


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Run]:
    """The same into the folder of a test."""
    return partial(_write_run, tmp_path)
