"""Mixing against torchvision's formulae, and the distributions it draws from."""

import numpy as np
import pytest
import torch
from scipy import stats
from torch.nn import functional as F
from torchvision.transforms import v2

from pmae.evaluate.augment import BLENDED, draw_mix, mix_images, mixed_loss

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
    expected = F.cross_entropy(logits, targets, label_smoothing=smoothing)
    torch.testing.assert_close(mixed_loss(logits, labels, weights, smoothing), expected)


def test_a_batch_left_alone_has_its_images_and_the_plain_loss() -> None:
    x, labels = batch()
    assert torch.equal(mix_images(x, own()), x)
    logits = torch.randn(8, CLASSES)
    assert torch.equal(mixed_loss(logits, labels, own(), 0.0), F.cross_entropy(logits, labels))


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
    assert stats.kstest(blended, stats.beta(BLENDED, BLENDED).cdf).pvalue > 0.01
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
