"""Small material for the explorer: smooth images that are not square, and runs with untrained weights on them."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from pmae.app.material import Material
from pmae.config import Config, DecoderConfig, EncoderConfig, SpaceConfig
from pmae.data.batches import Batches, Standardized, fit_standardize
from pmae.data.images import ImageSet, Splits
from pmae.derive import resolve
from pmae.method import build_method
from pmae.runs import Run
from pmae.train.trained import TrainedModel, write_trained

SHAPE = (3, 8, 12)


@pytest.fixture(scope="session")
def splits() -> Splits:
    """64 training and 32 test images in two classes."""
    rng = np.random.default_rng(0)
    coarse = np.kron(rng.normal(size=(96, 3, 2, 3)), np.ones((1, 1, 4, 4)))
    images = ((coarse + 0.2 * rng.normal(size=(96, *SHAPE))) * 30 + 128).clip(0, 255).astype(np.uint8)
    labels, classes = np.arange(96) % 2, ("even", "odd")
    return Splits("toy", ImageSet(images[:64], labels[:64], classes), None, ImageSet(images[64:], labels[64:], classes))


@pytest.fixture(scope="session")
def make_run(splits: Splits, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """A function that writes a run in a space: everything is there but the training."""

    def make(space: str) -> Run:
        wanted = Config(
            space=SpaceConfig(space),
            encoder=EncoderConfig(patch_size=4, width=32, depth=2, heads=4),
            decoder=DecoderConfig("small", width=32, depth=1, heads=4),
        )
        config, _ = resolve(wanted, len(splits.train), SHAPE)
        batches = Batches(splits.train.images, torch.device("cpu"))
        standardize, model = fit_standardize(batches, "channel"), build_method(config, SHAPE)
        model.space.fit(Standardized(batches, standardize))
        environment = {"data": {"name": "toy", "shape": list(SHAPE), "dtype": "uint8", "counts": {"train": 24}}}
        path: Path = tmp_path_factory.mktemp("runs") / space
        return write_trained(path, TrainedModel(config, environment, model, standardize, [], {}))

    return make


@pytest.fixture(scope="session")
def run(make_run: Callable[[str], Run]) -> Run:
    """A PMAE."""
    return make_run("pca")


@pytest.fixture(scope="session")
def material(splits: Splits) -> Material:
    """Without a run."""
    return Material(splits)


@pytest.fixture(scope="session")
def trained(splits: Splits, run: Run) -> Material:
    """With the PMAE."""
    return Material(splits, run)
