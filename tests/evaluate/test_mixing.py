"""Mixing against torchvision's formulae, and the distributions it draws from."""

import numpy as np
import pytest
import torch
from scipy import stats
from torch.nn import functional as F
from torchvision.transforms import v2

from pmae.evaluate.mixing import BLENDED, Mix, draw_mix, mix_images, mixed_loss

CLASSES = 5


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(8, 2, 10, 14, generator=draw), torch.randint(0, CLASSES, (8,), generator=draw)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("mix", [Mix(0.3, None), Mix(1 - 15 / 140, (2, 5, 1, 6)), Mix(1.0, (3, 3, 0, 4))])
def test_images_and_loss_equal_torchvisions(mix: Mix, smoothing: float) -> None:
    x, labels = batch()
    params = {"labels": labels, "batch_size": len(x), "lam": mix.kept, "lam_adjusted": mix.kept}
    reference: v2.Transform = v2.MixUp(num_classes=CLASSES)
    if mix.box:
        top, bottom, left, right = mix.box
        reference, params["box"] = v2.CutMix(num_classes=CLASSES), (left, top, right, bottom)  # type: ignore[assignment]
    theirs, targets = reference.transform(x, params), reference.transform(labels, params)
    torch.testing.assert_close(mix_images(x, mix), theirs)
    logits = torch.randn(8, CLASSES, generator=torch.Generator().manual_seed(3))
    expected = F.cross_entropy(logits, targets, label_smoothing=smoothing)
    torch.testing.assert_close(mixed_loss(logits, labels, mix, smoothing), expected)


def test_a_batch_left_alone_has_the_plain_loss() -> None:
    x, labels = batch()
    assert mix_images(x, None) is x
    logits = torch.randn(8, CLASSES)
    assert torch.equal(mixed_loss(logits, labels, None, 0.0), F.cross_entropy(logits, labels))


def test_mixing_leaves_the_given_images_alone() -> None:
    x, _ = batch()
    before = x.clone()
    for mix in (Mix(0.3, None), Mix(0.5, (0, 5, 0, 14))):
        mix_images(x, mix)
    assert torch.equal(x, before)


def test_shares_and_weights_follow_their_distributions() -> None:
    draw = np.random.default_rng(0)
    drawn = [draw_mix(32, 48, 0.3, 0.5, draw) for _ in range(4000)]
    blended = [mix.kept for mix in drawn if mix and mix.box is None]
    pasted = [mix for mix in drawn if mix and mix.box]
    assert len(blended) / 4000 == pytest.approx(0.3, abs=0.03)
    assert len(pasted) / 4000 == pytest.approx(0.5, abs=0.03)
    assert stats.kstest(blended, stats.beta(BLENDED, BLENDED).cdf).pvalue > 0.01
    for kept, box in pasted:
        assert box
        top, bottom, left, right = box
        assert 0 <= top <= bottom <= 32
        assert 0 <= left <= right <= 48
        assert kept == pytest.approx(1 - (bottom - top) * (right - left) / (32 * 48))
    torch.manual_seed(0)
    reference = v2.CutMix(num_classes=CLASSES)
    x = torch.zeros(2, 1, 32, 48)
    theirs = [reference.make_params([x])["lam_adjusted"] for _ in range(2000)]
    assert stats.ks_2samp([mix.kept for mix in pasted], theirs).pvalue > 0.01


def test_a_signal_gets_a_stretch_and_chances_of_nothing_give_nothing() -> None:
    draw = np.random.default_rng(0)
    boxes = [mix.box for mix in (draw_mix(1, 100, 0.0, 1.0, draw) for _ in range(2000)) if mix]
    lengths = [right - left for _, _, left, right in filter(None, boxes)]
    assert {box[:2] for box in boxes if box} == {(0, 1)}
    assert np.mean(lengths) > 30
    assert all(draw_mix(8, 8, 0.0, 0.0, draw) is None for _ in range(50))
