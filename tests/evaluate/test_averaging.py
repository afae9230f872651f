"""The moving average against its closed form."""

import numpy as np
import torch
from torch import nn

from pmae.evaluate.finetune_step import Average


def test_the_average_has_its_closed_form() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    average = Average(model, 0.9)
    history = [model.weight.detach().clone()]
    for step in range(200):
        with torch.no_grad():
            model.weight.add_(torch.randn(2, 3))
        history.append(model.weight.detach().clone())
        average.update(step)
    decays = [min(0.9, (1 + t) / (10 + t)) for t in range(200)]
    shares = [np.prod(decays)] + [(1 - d) * np.prod(decays[t + 1 :]) for t, d in enumerate(decays)]
    np.testing.assert_allclose(sum(shares), 1.0)
    expected = sum(share * weight for share, weight in zip(shares, history, strict=True))
    torch.testing.assert_close(average.model.weight, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(model.weight, history[-1])


def test_statistics_are_averaged_and_counters_copied() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    average = Average(model, 0.999)
    model(torch.randn(4, 1, 8, 8) + 3)
    average.update(0)
    ours, theirs = average.model.state_dict(), model.state_dict()
    torch.testing.assert_close(ours["1.running_mean"], 0.9 * theirs["1.running_mean"])
    assert int(ours["1.num_batches_tracked"]) == 1
    assert all(p.requires_grad for p in average.model.parameters())


def test_what_does_not_move_stays_exactly() -> None:
    model = nn.Linear(30, 20)
    average = Average(model, 0.99)
    for step in range(50):
        average.update(step)
    assert torch.equal(average.model.weight, model.weight)
