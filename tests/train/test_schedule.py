"""Schedules against closed forms."""

import math

import pytest
import torch

from pmae.config import OptimConfig
from pmae.train.schedule import rate, rate_of_step


def test_cosine_rises_linearly_then_falls_to_zero() -> None:
    assert rate("cosine", 0, 100, 10) == 0
    assert rate("cosine", 5, 100, 10) == pytest.approx(0.5)
    assert rate("cosine", 10, 100, 10) == 1
    assert rate("cosine", 55, 100, 10) == pytest.approx(0.5)
    assert rate("cosine", 40, 100, 10) == pytest.approx((1 + math.cos(math.pi / 3)) / 2)
    assert rate("cosine", 100, 100, 10) == pytest.approx(0, abs=1e-12)


def test_released_is_near_zero_for_most_of_its_warm_up() -> None:
    assert rate("released", 0, 800, 40) == pytest.approx(1e-40)
    assert rate("released", 39.9, 800, 40) == pytest.approx(0.1)
    assert rate("released", 40, 800, 40) == 1


@pytest.mark.filterwarnings("ignore")
def test_released_is_torchs_warm_up_and_cosine_in_sequence() -> None:
    epochs, warmup = 50, 4
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    rising = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 10.0 ** -(warmup - epoch))
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [rising, falling], [warmup])
    for epoch in range(epochs):
        assert rate("released", epoch, epochs, warmup) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-6)
        schedule.step()
    assert rate("released", 799, 800, 40) == pytest.approx((1 + math.cos(math.pi * 759 / 800)) / 2)


@pytest.mark.parametrize("warmup", [0.0, 0.5, 1.0])
def test_a_run_of_one_step_trains(warmup: float) -> None:
    assert rate_of_step(OptimConfig(warmup_epochs=warmup), 0, steps=1, epochs=1) >= 0.5


def test_constant_stays_and_no_warm_up_starts_at_the_peak() -> None:
    assert rate("constant", 99, 100, 10) == 1
    assert rate("cosine", 0, 100, 0) == 1
    assert rate("cosine", 1, 1, 1) == 1
