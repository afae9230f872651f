"""The optimizer that a step updates with."""

import pytest
import torch
from torch import nn

from pmae.config import OptimConfig
from pmae.train.step import build_optimizer


class Small(nn.Module):
    """A matrix, a bias, a norm and a token."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(3, 2), nn.LayerNorm(2)
        self.cls_token = nn.Parameter(torch.ones(1, 1, 2))


@pytest.mark.parametrize("decay_all", [False, True])
def test_decay_shrinks_matrices_or_everything(decay_all: bool) -> None:
    model, lr, decay = Small(), 0.1, 0.5
    optimizer = build_optimizer(model, OptimConfig(weight_decay=decay, decay_all=decay_all), on_graph=False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for group in optimizer.param_groups:
        group["lr"] = lr
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        factor = 1 - lr * decay if decay_all or name == "layer.weight" else 1.0
        torch.testing.assert_close(parameter.detach(), factor * before[name])
