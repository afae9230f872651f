"""Differences of accuracies: paired on the same images, against scipy's bootstrap, and without the answers."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import binomtest, bootstrap

from pmae.intervals import Interval
from pmae.report.difference import difference, pooled
from pmae.results import Score


def scored(right: np.ndarray, keep: bool = True) -> Score:
    """A score of images that are right or wrong for each seed (seeds, images)."""
    truth = np.arange(right.shape[1]) % 3
    answers = np.stack([truth, *np.where(right, truth, (truth + 1) % 3)]).astype(np.int16)
    mean, half = right.mean(), 1.96 * (right.mean() * (1 - right.mean()) / right.shape[1]) ** 0.5
    metrics = {"accuracy": Interval(mean, mean - half, mean + half)}
    return Score("linear", "mean", "test", right.shape[1], metrics, answers=answers if keep else None)


def test_the_interval_is_that_of_scipys_paired_bootstrap() -> None:
    rng = np.random.default_rng(0)
    theirs = rng.random((2, 400)) < 0.7
    mine = theirs | (rng.random((2, 400)) < 0.1)
    found = difference(scored(mine), scored(theirs))
    each = mine.mean(0) - theirs.mean(0)
    reference = bootstrap((each,), np.mean, method="percentile", n_resamples=10_000, random_state=0)
    low, high = (100 * end for end in reference.confidence_interval)
    assert found.paired
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.3)
    assert found.clear


def test_pairs_show_what_two_intervals_hide() -> None:
    rng = np.random.default_rng(1)
    theirs = rng.random((1, 1000)) < 0.7
    mine = theirs.copy()
    mine[0, np.flatnonzero(~theirs[0])[:12]] = True
    assert difference(scored(mine), scored(theirs)).clear, "twelve more are right and none fewer"
    apart = difference(scored(mine, keep=False), scored(theirs))
    assert not apart.paired
    assert not apart.clear
    assert apart.points == pytest.approx(1.2)


def test_answers_of_other_images_are_not_paired() -> None:
    few, many = (scored(np.ones((1, count), bool)) for count in (50, 60))
    assert not difference(few, many).paired
    one, other = (replace(few, data="toy", fingerprint=images) for images in "ab")
    assert not difference(one, other).paired, "the same labels, and the same name"
    assert difference(one, replace(other, fingerprint="")).paired, "older versions noted none"


def test_without_an_interval_nothing_is_said_about_chance() -> None:
    bare = Score("linear", "cls", "test", 50, {"accuracy": Interval(0.7)})
    assert "has no interval" in difference(bare, bare).words


def test_copies_of_an_image_that_are_one_group_count_once() -> None:
    """An interval over images would have it that five views of a patient are five patients."""
    rng = np.random.default_rng(2)
    theirs = rng.random((1, 300)) < 0.7
    mine = theirs ^ (rng.random((1, 300)) < 0.1)
    alone = difference(scored(mine), scored(theirs))
    views = [replace(scored(np.repeat(right, 5, 1)), groups=np.repeat(np.arange(300), 5)) for right in (mine, theirs)]
    grouped, naive = difference(*views), difference(*(replace(each, groups=None) for each in views))
    assert (grouped.low, grouped.high) == pytest.approx((alone.low, alone.high), abs=0.3)
    assert naive.high - naive.low < 0.6 * (grouped.high - grouped.low)


def test_groups_of_several_sizes_are_drawn_whole_as_scipy_draws_them() -> None:
    rng = np.random.default_rng(3)
    groups = rng.integers(0, 120, 400)
    theirs = (rng.random(120) < 0.7)[groups][None]
    mine = (theirs[0] | (rng.random(120) < 0.2)[groups])[None]
    found = difference(*(replace(scored(right), groups=groups) for right in (mine, theirs)))
    sums, sizes = np.bincount(groups, (mine[0] ^ theirs[0]).astype(float)), np.bincount(groups)

    def ratio(above: np.ndarray, below: np.ndarray, axis: int) -> np.ndarray:
        return np.asarray(above.sum(axis) / below.sum(axis))

    how = {"method": "percentile", "n_resamples": 10_000, "paired": True, "vectorized": True, "random_state": 0}
    reference = bootstrap((sums, sizes), ratio, **how).confidence_interval
    assert (found.low, found.high) == pytest.approx((100 * reference.low, 100 * reference.high), abs=0.5)


@pytest.mark.parametrize("differing", range(1, 9))
@pytest.mark.parametrize("views", [1, 20])
def test_no_more_is_clear_than_by_a_sign_test_where_few_images_or_patients_differ(differing: int, views: int) -> None:
    mine = np.ones((1, 50 * views), bool)
    theirs = np.repeat(np.arange(50) >= differing, views)[None]
    groups = np.repeat(np.arange(50), views)
    for units in (slice(None), slice(differing * views)):  # among others, and alone
        pair = (replace(scored(right[:, units]), groups=groups[units]) for right in (mine, theirs))
        assert difference(*pair).clear == (binomtest(differing, differing).pvalue < 0.05)


def test_groups_that_one_side_alone_noted_count_for_both() -> None:
    """A run that was scored before images had groups, beside one that was scored after: the images are the same."""
    rng = np.random.default_rng(4)
    theirs, mine = (scored(np.repeat(rng.random((1, 100)) < share, 5, 1)) for share in (0.6, 0.7))
    known = replace(mine, groups=np.repeat(np.arange(100), 5))
    assert difference(theirs, known).low == pytest.approx(-difference(known, theirs).high, abs=0.3)
    together = pooled([mine, known])
    assert together is not None
    assert together.groups is not None
