"""Distortions against torchvision and closed forms, for any number of channels, any bit depth and any shape."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional as F

from pmae.evaluate.augment import (
    CHOSEN,
    ERASED,
    LARGEST,
    MIXUP_ALPHA,
    Magnitudes,
    draw_mix,
    geometric,
    magnitudes_of,
    mix_images,
    mixed_loss,
    photometric,
    random_erasing,
)

SHAPES = [(3, 32, 32), (1, 20, 36), (7, 64, 48), (2, 1, 50)]


def draw_rand_augment(count: int, seed: int) -> Tensor:
    return torch.rand(2, len(LARGEST), count, generator=torch.Generator().manual_seed(seed))


def draw_erasing(count: int) -> Tensor:
    return torch.rand(5, count, generator=torch.Generator().manual_seed(0))


def amounts(count: int, **given: list[float]) -> Magnitudes:
    zero = torch.zeros(count)
    return {name: torch.tensor(given[name]) if name in given else zero for name in LARGEST}


def random_images(count: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.rand(count, *shape, generator=torch.Generator().manual_seed(seed))


def within_a_rim(images: Tensor) -> Tensor:
    """Black near the edges, so that what lies outside does not matter."""
    height, width = images.shape[-2:]
    rim = torch.zeros_like(images)
    rows, columns = slice(height // 3, -(height // 3)), slice(width // 3, -(width // 3))
    rim[..., rows, columns] = images[..., rows, columns]
    return rim


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.float16, torch.float32])
def test_nothing_happens_to_an_image_that_draws_nothing(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    images = (200 * random_images(4, *shape)).to(dtype)
    none = amounts(4)
    torch.testing.assert_close(geometric(images, none), images.float(), atol=0.02, rtol=0)
    assert torch.equal(photometric(images.float(), none), images.float())
    assert torch.equal(random_erasing(images.float(), 0.0, draw_erasing(4)), images.float())


@pytest.mark.parametrize(("height", "width"), [(32, 32), (24, 42)])
@pytest.mark.parametrize("name", ["rotation", "shear_x", "shear_y", "shift_x", "shift_y"])
def test_moves_equal_torchvision(name: str, height: int, width: int) -> None:
    images = within_a_rim(random_images(5, 2, height, width))
    sizes = [-0.31, -0.1, 0.0, 0.2, 0.29]
    found = geometric(images, amounts(5, **{name: sizes}))
    for image, ours, size in zip(images, found, sizes, strict=True):
        # torchvision says where a pixel goes, in degrees; we say where it comes from.
        theirs: dict[str, object] = {"angle": 0.0, "translate": [0, 0], "scale": 1.0, "shear": [0.0, 0.0]}
        if name == "rotation":
            theirs["angle"] = -math.degrees(size)
        elif name.startswith("shear"):
            slope = math.degrees(math.atan(size))
            theirs["shear"] = [slope, 0.0] if name == "shear_x" else [0.0, slope]
        else:
            pixels = -round(size * (width if name == "shift_x" else height))
            theirs["translate"] = [pixels, 0] if name == "shift_x" else [0, pixels]
        expected = F.affine(image, **theirs, interpolation=InterpolationMode.BILINEAR)  # type: ignore[arg-type]
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)


def test_a_shift_keeps_every_pixel_sharp_and_mirrors_the_edge() -> None:
    images = random_images(2, 3, 10, 20)
    found = geometric(images, amounts(2, shift_x=[0.1, -0.1]))
    torch.testing.assert_close(found[0], torch.cat([images[0, :, :, 2:], images[0, :, :, -2:].flip(2)], 2))
    torch.testing.assert_close(found[1], torch.cat([images[1, :, :, :2].flip(2), images[1, :, :, :-2]], 2))


def test_contrast_and_sharpness_equal_torchvision_and_brightness_is_a_shift() -> None:
    images = 0.4 + 0.2 * random_images(4, 1, 12, 15)
    sizes = [-0.9, -0.2, 0.4, 0.9]
    contrast = photometric(images, amounts(4, contrast=sizes))
    sharpness = photometric(images, amounts(4, sharpness=sizes))
    for image, ours, sharper, size in zip(images, contrast, sharpness, sizes, strict=True):
        torch.testing.assert_close(ours, F.adjust_contrast(image, 1 + size), atol=1e-5, rtol=0)
        # torchvision's blur gives the middle five times the weight of each neighbour, ours the same.
        theirs = F.adjust_sharpness(image, max(0.0, 1 + size * 13 / 9)) if size > -9 / 13 else None
        if theirs is not None:
            torch.testing.assert_close(sharper[..., 1:-1, 1:-1], theirs[..., 1:-1, 1:-1], atol=1e-5, rtol=0)
    brightness = photometric(images, amounts(4, brightness=sizes))
    assert torch.allclose(brightness - images, torch.tensor(sizes)[:, None, None, None], atol=1e-6)


@pytest.mark.parametrize("channels", [2, 3, 7])
def test_saturation_keeps_the_mean_over_channels_and_scales_what_tells_them_apart(channels: int) -> None:
    images = random_images(3, channels, 6, 8)
    found = photometric(images, amounts(3, saturation=[-0.5, 0.0, 0.8]))
    torch.testing.assert_close(found.mean(1), images.mean(1))
    factor = torch.tensor([0.5, 1.0, 1.8])[:, None, None]
    torch.testing.assert_close(found.std(1), factor * images.std(1))
    grey = images[:, :1].expand(-1, channels, -1, -1)
    torch.testing.assert_close(photometric(grey, amounts(3, saturation=[-0.5, 0.0, 0.8])), grey)


def test_bit_depth_does_not_matter() -> None:
    images = (250 * random_images(6, 3, 16, 16)).to(torch.uint8)
    deep = images.to(torch.int32) * 257
    drawn = magnitudes_of(draw_rand_augment(6, 1), 1.0)
    shallow, other = (
        photometric((geometric(x, drawn) - unit * 120) / (unit * 60), drawn)
        for x, unit in ((images, 1.0), (deep, 257.0))
    )
    torch.testing.assert_close(shallow, other, atol=1e-4, rtol=1e-4)


def test_an_image_draws_two_operations_of_uniform_amounts_within_the_strength() -> None:
    drawn = torch.stack(list(magnitudes_of(draw_rand_augment(9000, 0), 0.5).values()))
    assert bool(((drawn != 0).sum(0) == CHOSEN).all())
    for amount, most in zip(drawn, LARGEST.values(), strict=True):
        chosen = amount[amount != 0]
        assert len(chosen) / 9000 == pytest.approx(CHOSEN / len(LARGEST), abs=0.02)
        assert float(chosen.abs().max()) <= 0.5 * most
        for quantile in (0.25, 0.5, 0.75):
            assert float(chosen.quantile(quantile)) == pytest.approx((quantile - 0.5) * most, abs=0.05 * most)
    again = torch.stack(list(magnitudes_of(draw_rand_augment(9000, 0), 0.5).values()))
    assert torch.equal(drawn, again)


@pytest.mark.parametrize("shape", SHAPES)
def test_blanks_are_boxes_of_the_stated_size_in_the_stated_share_of_images(shape: tuple[int, int, int]) -> None:
    x = torch.ones(4000, *shape)
    blanked = random_erasing(x, 0.3, draw_erasing(len(x))) == 0
    assert torch.equal(blanked.all(1), blanked.any(1))
    mask = blanked[:, 0]
    rows, columns = mask.any(2), mask.any(1)
    assert torch.equal(mask, rows[:, :, None] & columns[:, None, :])
    for side in (rows, columns):
        assert bool(((side[:, 1:] != side[:, :-1]).sum(1) <= 2).all())
    touched = mask.any((1, 2))
    assert float(touched.float().mean()) == pytest.approx(0.3, abs=0.03)
    assert float(mask[touched].float().mean()) == pytest.approx(sum(ERASED) / 2, rel=0.1)
    assert torch.equal(random_erasing(x, 0.3, draw_erasing(len(x))) == 0, blanked)


CLASSES = 5


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(8, 2, 10, 14, generator=draw), torch.randint(0, CLASSES, (8,), generator=draw)


def own(kept: float = 1.0, box: tuple[int, int, int, int] | None = None) -> torch.Tensor:
    """The map of a blend that keeps so much, or of a pasted box (top, bottom, left, right)."""
    weights = torch.full((10, 14), kept)
    if box:
        top, bottom, left, right = box
        weights[top:bottom, left:right] = 0
    return weights


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("kept", "box"), [(0.3, None), (1 - 15 / 140, (2, 5, 1, 6)), (1.0, (3, 3, 0, 4))])
def test_images_and_loss_equal_torchvisions(
    kept: float, box: tuple[int, int, int, int] | None, smoothing: float
) -> None:
    x, labels = batch()
    params = {"labels": labels, "batch_size": len(x), "lam": kept, "lam_adjusted": kept}
    reference: v2.Transform = v2.MixUp(num_classes=CLASSES)
    weights = own(1.0 if box else kept, box)
    if box:
        top, bottom, left, right = box
        reference, params["box"] = v2.CutMix(num_classes=CLASSES), (left, top, right, bottom)  # type: ignore[assignment]
    theirs, targets = reference.transform(x, params), reference.transform(labels, params)
    torch.testing.assert_close(mix_images(x, weights), theirs)
    logits = torch.randn(8, CLASSES, generator=torch.Generator().manual_seed(3))
    expected = torch.nn.functional.cross_entropy(logits, targets, label_smoothing=smoothing)
    torch.testing.assert_close(mixed_loss(logits, labels, weights, smoothing), expected)


def test_a_batch_left_alone_has_its_images_and_the_plain_loss() -> None:
    x, labels = batch()
    assert torch.equal(mix_images(x, own()), x)
    logits = torch.randn(8, CLASSES)
    assert torch.equal(mixed_loss(logits, labels, own(), 0.0), torch.nn.functional.cross_entropy(logits, labels))


def test_mixing_leaves_the_given_images_alone() -> None:
    x, _ = batch()
    before = x.clone()
    for weights in (own(0.3), own(box=(0, 5, 0, 14))):
        mix_images(x, weights)
    assert torch.equal(x, before)


def test_shares_and_weights_follow_their_distributions() -> None:
    draw = np.random.default_rng(0)
    drawn = [draw_mix(32, 48, 0.3, 0.5, draw) for _ in range(4000)]
    blended = [float(weights[0, 0]) for weights in drawn if len(np.unique(weights)) == 1 and 0 < weights[0, 0] < 1]
    pasted = [weights for weights in drawn if len(np.unique(weights)) == 2]
    untouched = sum((weights == 1).all() for weights in drawn)
    assert len(blended) / 4000 == pytest.approx(0.3, abs=0.03)
    # A box of less than two pixels a side is none, which is so for some of the pasted ones.
    assert (len(pasted) + untouched) / 4000 == pytest.approx(0.7, abs=0.03)
    assert stats.kstest(blended, stats.beta(MIXUP_ALPHA, MIXUP_ALPHA).cdf).pvalue > 0.01
    for weights in pasted:
        rows, columns = np.nonzero(weights == 0)
        top, bottom, left, right = rows.min(), rows.max() + 1, columns.min(), columns.max() + 1
        assert (weights[top:bottom, left:right] == 0).all()
        assert set(np.unique(weights)) == {0, 1}
    torch.manual_seed(0)
    reference = v2.CutMix(num_classes=CLASSES)
    x = torch.zeros(2, 1, 32, 48)
    theirs = [reference.make_params([x])["lam_adjusted"] for _ in range(2000)]
    kept = [float(draw_mix(32, 48, 0.0, 1.0, draw).mean()) for _ in range(2000)]
    assert stats.ks_2samp(kept, theirs).pvalue > 0.01


def test_a_signal_gets_a_stretch_and_chances_of_nothing_give_nothing() -> None:
    draw = np.random.default_rng(0)
    lengths = [int((draw_mix(1, 100, 0.0, 1.0, draw) == 0).sum()) for _ in range(2000)]
    assert np.mean(lengths) > 30
    assert all((draw_mix(8, 8, 0.0, 0.0, draw) == 1).all() for _ in range(50))
