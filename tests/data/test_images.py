"""The part held out where a set brings none, and the checksum that tells whether a set is still the one it was."""

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pmae.config import DataConfig
from pmae.data import sets
from pmae.data.images import ImageSet, Splits, fingerprint
from pmae.data.sets import load, with_held_out

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (30, 3, 8, 8), dtype=np.uint8)
BASE = ImageSet(PIXELS, np.arange(30) % 3, ("a", "b", "c"), tuple(f"{i}.png" for i in range(30)))


def numbered(count: int, **more: object) -> ImageSet:
    """Images that all of their pixels number."""
    return ImageSet(np.arange(count, dtype=np.uint16)[:, None, None, None].repeat(4, 2), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(("count", "held"), [(20, 2), (220, 22), (3000, 300), (20_000, 1000)])
def test_a_tenth_is_held_out_and_nothing_is_lost(count: int, held: int) -> None:
    splits = with_held_out(Splits("x", numbered(count, labels=np.arange(count) % 3)))
    assert splits.val is not None
    assert (len(splits.train), len(splits.val)) == (count - held, held)
    kept, out = (part.images[:, 0, 0, 0] for part in (splits.train, splits.val))
    assert sorted([*kept, *out]) == list(range(count))
    assert splits.train.labels is not None
    np.testing.assert_array_equal(splits.train.labels, kept % 3)
    assert splits.val.labels is None
    assert list(splits.val.names) == [f"#{number}" for number in out]
    assert f"{held} of the {count} images are held out as val" in splits.notes[-1]


def test_the_choice_is_spread_and_always_the_same() -> None:
    first, again = (with_held_out(Splits("x", numbered(1000))).val for _ in range(2))
    assert first is not None
    assert again is not None
    assert first.names == again.names
    assert 300 < first.images.mean() < 700
    named = with_held_out(Splits("x", numbered(100, names=tuple(f"{n}.png" for n in range(100))))).val
    assert named is not None
    assert named.names == tuple(f"{n}.png" for n in named.images[:, 0, 0, 0])


def test_sets_with_a_part_of_their_own_or_too_few_or_too_many_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    train, other = numbered(40), numbered(2)
    alone = [Splits("x", train, other), Splits("x", train, None, other), Splits("x", numbered(19))]
    assert all(with_held_out(splits) is splits for splits in alone)
    monkeypatch.setattr(sets, "LARGEST", train.images.nbytes - 1)
    large = Splits("x", train)
    assert with_held_out(large) is large


def changed(position: int) -> np.ndarray:
    pixels = PIXELS.copy()
    pixels[position] += 1
    return pixels


def test_the_same_images_have_the_same_one_whatever_they_are_called() -> None:
    copy = replace(BASE, images=np.asfortranarray(PIXELS))
    assert fingerprint(Splits("one", BASE)) == fingerprint(Splits("two", copy))
    assert fingerprint(BASE) == fingerprint(replace(BASE, names=BASE.names))


@pytest.mark.parametrize(
    "other",
    [
        replace(BASE, images=changed(0)),
        replace(BASE, images=changed(29)),
        replace(BASE, images=PIXELS.astype(np.float32)),
        replace(BASE, images=PIXELS.reshape(30, 3, 4, 16)),
        replace(BASE, labels=np.arange(30) % 2),
        replace(BASE, names=tuple(f"{i}.jpg" for i in range(30))),
        replace(BASE, images=PIXELS[::-1]),
        BASE.take(np.arange(29)),
    ],
)
def test_anything_else_has_another(other: ImageSet) -> None:
    assert fingerprint(other) != fingerprint(BASE)
    assert fingerprint(Splits("x", BASE, val=other)) != fingerprint(Splits("x", BASE, test=other))


def test_folders_mapped_files_and_tables_on_the_disk(tmp_path: Path) -> None:
    for folder, add in (("a", 0), ("b", 0), ("c", 1)):
        (tmp_path / folder).mkdir()
        for i, pixels in enumerate(PIXELS):
            Image.fromarray(pixels.transpose(1, 2, 0) + np.uint8(add)).save(tmp_path / folder / f"{i}.png")
        np.save(tmp_path / f"{folder}.npy", PIXELS + np.uint8(add))
    for kind in ("{}", "{}.npy"):
        a, b, c = (fingerprint(load(DataConfig(str(tmp_path / kind.format(name))))) for name in "abc")
        assert a == b != c


def test_it_is_quick_for_many_images() -> None:
    names = tuple(f"folder/{i:07d}.png" for i in range(100_000))
    many = ImageSet(np.zeros((100_000, 3, 32, 32), np.uint8), names=names)
    began = time.perf_counter()
    fingerprint(many)
    assert time.perf_counter() - began < 5
