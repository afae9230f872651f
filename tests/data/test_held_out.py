"""What is held out where a set brings nothing of its own: a fixed part that training and fitting never see."""

import numpy as np
import pytest

from pmae.data import images as held_out
from pmae.data.images import ImageSet, Splits, with_held_out


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
    monkeypatch.setattr(held_out, "LARGEST", train.images.nbytes - 1)
    large = Splits("x", train)
    assert with_held_out(large) is large
