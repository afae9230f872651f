"""Augmentation against torchvision, given the same boxes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import RandomResizedCrop
from torchvision.transforms.v2 import functional as F

from pmae.config import AugmentConfig
from pmae.data.augment import Boxes, Standardize, crop, draw_boxes

CPU = torch.device("cpu")


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 20, 36), (5, 64, 48)])
def test_crop_and_flip_equal_torchvision(shape: tuple[int, int, int], interpolation: str) -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(40, *shape, generator=generator)
    boxes = draw_boxes(40, shape[1], shape[2], AugmentConfig(), generator, CPU)
    ours = crop(images, boxes, interpolation)  # type: ignore[arg-type]
    for image, found, *box, flip in zip(images, ours, *boxes, strict=True):
        top, left, height, width = (int(v) for v in box)
        mode = InterpolationMode(interpolation)
        theirs = F.resized_crop(image, top, left, height, width, list(shape[1:]), mode, antialias=True)
        theirs = F.horizontal_flip(theirs) if flip else theirs
        torch.testing.assert_close(found, theirs, atol=2e-5, rtol=1e-4)


def test_boxes_are_distributed_as_torchvisions() -> None:
    config, size = AugmentConfig(), (48, 40)
    boxes = draw_boxes(4000, *size, config, torch.Generator().manual_seed(0), CPU)
    torch.manual_seed(0)
    reference = RandomResizedCrop(size, scale=config.crop_scale)
    image = torch.zeros(1, *size)
    params = [reference.make_params([image]) for _ in range(4000)]
    for ours, name in zip(boxes[:4], ("top", "left", "height", "width"), strict=True):
        theirs = torch.tensor([float(p[name]) for p in params])
        for quantile in (0.1, 0.5, 0.9):
            assert float(ours.quantile(quantile)) == pytest.approx(float(theirs.quantile(quantile)), abs=1.5)
    assert float(boxes.flip.float().mean()) == pytest.approx(0.5, abs=0.04)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 90), st.integers(1, 90), st.floats(0.01, 1.0), st.integers(0, 2**31))
def test_boxes_stay_inside_any_image(height: int, width: int, low: float, seed: int) -> None:
    config = AugmentConfig(crop_scale=(low, 1.0))
    boxes = draw_boxes(16, height, width, config, torch.Generator().manual_seed(seed), CPU)
    assert bool(((boxes.height >= 1) & (boxes.top >= 0) & (boxes.top + boxes.height <= height)).all())
    assert bool(((boxes.width >= 1) & (boxes.left >= 0) & (boxes.left + boxes.width <= width)).all())
    out = crop(torch.rand(16, 1, height, width), boxes)
    assert bool(torch.isfinite(out).all())


def test_the_whole_image_is_left_as_it_is() -> None:
    images = torch.randint(0, 60_000, (4, 2, 9, 7), dtype=torch.int32)
    whole = draw_boxes(4, 9, 7, AugmentConfig(crop=False, flip=False), torch.Generator(), CPU)
    torch.testing.assert_close(crop(images, whole), images.float(), rtol=1e-6, atol=1e-2)
    mirrored = crop(images, whole._replace(flip=torch.ones(4, dtype=torch.bool)))
    torch.testing.assert_close(mirrored, images.flip(3).float(), rtol=1e-6, atol=1e-2)


def test_the_same_noise_gives_the_same_boxes() -> None:
    draws = [draw_boxes(8, 32, 32, AugmentConfig(), torch.Generator().manual_seed(7), CPU) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*draws, strict=True))
    assert isinstance(draws[0], Boxes)


def test_standardize_and_back() -> None:
    standardize = Standardize(torch.full((3, 1, 1), 5.0), torch.full((3, 1, 1), 2.0))
    x = torch.randint(0, 255, (2, 3, 4, 4), dtype=torch.uint8)
    torch.testing.assert_close(standardize.invert(standardize(x)), x.float())
