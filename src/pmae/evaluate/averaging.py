"""The exponential moving average of a model's weights, as a model of its own."""

import copy
from typing import Generic, TypeVar

import torch
from torch import nn

Model = TypeVar("Model", bound=nn.Module)


class Average(Generic[Model]):
    """A copy of a model that follows it: `decay` of itself and the rest of the model at every step."""

    def __init__(self, model: Model, decay: float) -> None:
        self.model, self.decay = copy.deepcopy(model), decay
        # These tensors share memory with the two models, which are only ever changed in place.
        pairs = list(zip(self.model.state_dict().values(), model.state_dict().values(), strict=True))
        self._counters = [pair for pair in pairs if not pair[0].is_floating_point()]
        self._mine = [mine for mine, _ in pairs if mine.is_floating_point()]
        self._theirs = [theirs for mine, theirs in pairs if mine.is_floating_point()]

    def update(self, step: int) -> None:
        """Follow the model after step `step`, the first being 0; early on faster, so that the start is forgotten."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self._mine, self._theirs, 1 - decay)
        for mine, theirs in self._counters:
            mine.copy_(theirs)
