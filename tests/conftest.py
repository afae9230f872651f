"""Small data and small settings that many tests share."""

import numpy as np
import pytest
import torch

from pmae.config import Config, DecoderConfig, EncoderConfig, OptimConfig, TrainConfig
from pmae.data.images import ImageSet, Splits

torch.set_num_threads(2)


def smooth_images(count: int, shape: tuple[int, int, int], seed: int = 0) -> np.ndarray:
    """uint8 images whose pixels are correlated: coarse noise blown up, plus a little fine noise."""
    rng = np.random.default_rng(seed)
    channels, height, width = shape
    coarse = rng.normal(size=(count, channels, height // 4, width // 4))
    fine = np.kron(coarse, np.ones((1, 1, 4, 4))) + 0.1 * rng.normal(size=(count, *shape))
    return (fine * 30 + 128).clip(0, 255).astype(np.uint8)


@pytest.fixture
def toy() -> Splits:
    """128 training and 32 test images of 16x16 in two classes that differ in brightness."""
    images = smooth_images(160, (3, 16, 16))
    labels = (images.mean((1, 2, 3)) > 128).astype(np.int64)
    classes = ("dark", "bright")
    return Splits(
        "toy", ImageSet(images[:128], labels[:128], classes), None, ImageSet(images[128:], labels[128:], classes)
    )


@pytest.fixture
def tiny() -> Config:
    """A model of two narrow blocks, three epochs of four steps."""
    return Config(
        encoder=EncoderConfig(patch_size=4, width=32, depth=2, heads=4),
        decoder=DecoderConfig("small", width=32, depth=1, heads=4),
        optim=OptimConfig(base_lr=4e-3, warmup_epochs=1.0),
        train=TrainConfig(epochs=3, batch_size=32, device="cpu", log_every=2, checkpoint_every=1, precision="float32"),
    )
