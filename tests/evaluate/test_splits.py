from collections.abc import Callable

import numpy as np
import pytest

from pmae.data.images import ImageSet, Splits
from pmae.errors import UserError
from pmae.evaluate.features import complete, hold_out

Pictures = Callable[..., ImageSet]


def test_hold_out_takes_the_same_share_of_every_class_and_is_a_partition() -> None:
    labels = np.repeat([0, 1, 2], [100, 50, 10])
    kept, held = hold_out(labels, 0.2, seed=3)
    assert np.bincount(labels[held]).tolist() == [20, 10, 2]
    assert sorted([*kept, *held]) == list(range(160))
    again = hold_out(labels, 0.2, seed=3)
    assert (again[1] == held).all()
    assert (hold_out(labels, 0.2, seed=4)[1] != held).any()


def test_hold_out_leaves_every_class_in_train() -> None:
    labels = np.array([0, 1, 1, 2, 2, 2])
    for share in (0.01, 0.5, 0.99):
        kept, held = hold_out(labels, share)
        assert set(labels[kept]) == {0, 1, 2}
        assert set(labels[held]) == {1, 2}


@pytest.mark.parametrize("labels", [np.array([0, 1]), np.array([0]), np.empty(0, int)])
def test_nothing_to_hold_out_is_refused(labels: np.ndarray) -> None:
    with pytest.raises(UserError, match="at least two images"):
        hold_out(labels, 0.1)


def test_a_set_without_test_gets_one_and_says_so(pictures: Pictures) -> None:
    made = complete(Splits("mine", pictures(30, 0), notes=("first",)))
    assert made.test is not None
    assert (len(made.train), len(made.test)) == (24, 6)
    assert made.notes[0] == "first"
    assert "no test split" in made.notes[1]
    assert "6 images" in made.notes[1]


def test_splits_that_exist_are_kept_and_unlabelled_ones_named(pictures: Pictures) -> None:
    whole = Splits("mine", pictures(30, 0), pictures(9, 1), pictures(12, 2))
    assert complete(whole) == whole
    unlabelled = ImageSet(pictures(9, 1).images)
    made = complete(Splits("mine", pictures(30, 0), unlabelled, unlabelled))
    assert made.val is None
    assert made.test is not None
    assert made.test.labels is not None
    assert any("val split has no labels" in note for note in made.notes)
    with pytest.raises(UserError, match="must have labels"):
        complete(Splits("mine", unlabelled))


@pytest.mark.parametrize("share", [0.1, 0.2, 0.5])
def test_groups_are_held_out_whole_and_no_class_is_lost(share: float) -> None:
    rng = np.random.default_rng(1)
    groups = rng.integers(0, 150, 600)
    labels = np.where(rng.random(600) < 0.8, groups % 3, rng.integers(0, 3, 600))  # most of a group are of one class
    kept, held = hold_out(labels, share, 0, groups)
    assert sorted([*kept, *held]) == list(range(600))
    assert not set(groups[kept]) & set(groups[held])
    for label in range(3):
        assert (labels[held] == label).mean() == pytest.approx(1 / 3, abs=0.1)
    assert len(held) / 600 == pytest.approx(share, abs=0.05)


def test_a_class_of_a_single_group_stays_in_train() -> None:
    labels, groups = np.array([0, 0, 1, 1, 1, 1]), np.array([7, 7, 8, 8, 9, 9])
    kept, held = hold_out(labels, 0.3, 0, groups)
    assert set(labels[kept]) == {0, 1}
    assert set(labels[held]) == {1}
    with pytest.raises(UserError, match="groups of the images must be several, one of which can be held out"):
        hold_out(labels, 0.3, 0, labels)
