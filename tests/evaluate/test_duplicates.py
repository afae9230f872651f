"""Duplicates between splits, exact and near."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from pmae.data.images import ImageSet
from pmae.errors import UserError
from pmae.evaluate import duplicates as module
from pmae.evaluate.duplicates import duplicates, require_apart, thumbnail
from pmae.results import DuplicatePair, Duplicates

Pictures = Callable[..., ImageSet]
CPU = torch.device("cpu")


def scenes(count: int, seed: int, side: int = 32) -> np.ndarray:
    """Images of coarse random blobs, no two alike."""
    coarse = torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
    smooth = torch.nn.functional.interpolate(coarse, side, mode="bicubic")
    return (128 + 40 * smooth).clip(0, 255).numpy().astype(np.uint8)


def test_bytes_that_are_the_same_are_counted_and_named(pictures: Pictures) -> None:
    train, test = pictures(20, 0), pictures(10, 1)
    images = np.array(test.images)
    images[[3, 7]] = train.images[[5, 5]]
    names = tuple(f"{n}.png" for n in range(10))
    found = duplicates(train, {"test": ImageSet(images, test.labels, names=names)}, CPU)["test"]
    assert found.count == 2
    assert found.pairs == (DuplicatePair("#5", "3.png"), DuplicatePair("#5", "7.png"))
    assert duplicates(train, {"test": test}, CPU)["test"].count == 0


def test_a_published_set_with_a_few_copies_is_scored_and_one_with_more_is_refused() -> None:
    train, test = scenes(50, 0), scenes(200, 1)
    test[:2] = train[:2]  # one in a hundred
    held_out = {"test": ImageSet(test)}
    require_apart(duplicates(ImageSet(train), held_out, CPU), held_out)
    test[2] = train[2]
    with pytest.raises(
        UserError, match=r"^test must be of images that are not trained on, got 3 of 200 .*'#0' and '#0'"
    ):
        require_apart(duplicates(ImageSet(train), held_out, CPU), held_out)


def test_a_brighter_noisy_or_blurred_copy_is_nearly_the_same_and_another_scene_is_not() -> None:
    train, test = scenes(300, 0), scenes(100, 1)
    noise = np.random.default_rng(0).normal(0, 2, test[0].shape)
    test[0] = (train[7] * 0.8 + 30).astype(np.uint8)
    test[1] = (train[8] + noise).clip(0, 255).astype(np.uint8)
    test[2] = np.mean([np.roll(train[9], shift, axis=2) for shift in (-1, 0, 1)], axis=0).astype(np.uint8)
    test[3] = train[10]
    found = duplicates(ImageSet(train), {"val": ImageSet(test), "test": ImageSet(scenes(100, 2))}, CPU)
    pairs = tuple(DuplicatePair(f"#{7 + n}", f"#{n}") for n in range(3))
    assert found["val"] == Duplicates(1, (DuplicatePair("#10", "#3"),), 3, 100, pairs)
    assert found["test"] == Duplicates(0, (), 0, 100)


def test_thumbnails_are_correlations_without_broad_light() -> None:
    x = torch.rand(4, 3, 24, 40, generator=torch.Generator().manual_seed(0))
    found = thumbnail(x)
    assert found.shape == (4, 256)
    torch.testing.assert_close(found.norm(dim=1), torch.ones(4))
    torch.testing.assert_close(thumbnail(5 * x + 3), found)
    assert not bool(thumbnail(torch.full((2, 1, 16, 16), 7.0)).any())


def test_very_many_pairs_are_thinned_evenly_and_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COMPARED", 50 * 10)
    train = scenes(50, 0)
    copies = (train[:25] * 0.9 + 5).astype(np.uint8)
    found = duplicates(ImageSet(train), {"test": ImageSet(copies)}, CPU)["test"]
    assert found.near == found.near_of == 9
    assert found.near_pairs[1] == DuplicatePair("#3", "#3")


def test_signals_and_tiny_images_are_compared_by_their_bytes_alone() -> None:
    signals = ImageSet(np.random.default_rng(0).normal(size=(9, 2, 1, 64)).astype(np.float32))
    assert duplicates(signals, {"test": signals}, CPU)["test"].near is None
    small = ImageSet(scenes(5, 0, side=6))
    found = duplicates(small, {"test": small}, CPU)["test"]
    assert (found.count, found.near) == (5, None)
