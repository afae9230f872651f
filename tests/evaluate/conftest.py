"""Small data with structure, and an encoder small enough for a laptop's core."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from pmae.config import EncoderConfig
from pmae.data.augment import Standardize
from pmae.data.batches import Batches, fit_standardize
from pmae.data.images import ImageSet, Splits
from pmae.models.encoder import Encoder, build_encoder

CPU = torch.device("cpu")


def draw_pictures(count: int, seed: int, shape: tuple[int, int, int] = (2, 8, 12), classes: int = 3) -> ImageSet:
    """uint8 images whose class is the place of a bright band, under noise."""
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % classes
    images = rng.normal(100, 20, size=(count, *shape))
    for row in range(2):
        images[np.arange(count), :, 2 * labels + row] += 60
    return ImageSet(images.clip(0, 255).astype(np.uint8), labels, tuple(f"class {c}" for c in range(classes)))


@pytest.fixture
def pictures() -> Callable[..., ImageSet]:
    return draw_pictures


@pytest.fixture
def splits() -> Splits:
    return Splits("pictures", draw_pictures(160, 0), val=draw_pictures(30, 1), test=draw_pictures(60, 2))


@pytest.fixture
def standardize(splits: Splits) -> Standardize:
    return fit_standardize(Batches(splits.train.images, CPU), "channel")


@pytest.fixture
def encoder() -> Encoder:
    torch.manual_seed(0)
    return build_encoder(EncoderConfig(patch_size=4, width=16, depth=2, heads=2), (2, 8, 12))
