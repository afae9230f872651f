"""Rounded weights beside the whole ones."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


class Halves:
    """The weights that autocast would round to bfloat16 layer by layer, rounded by the update of the step before.

    The numbers are autocast's own; what is saved are three hundred small kernels a step.
    """

    def __init__(self, model: nn.Module) -> None:
        layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
        slots = [(layer, key, p) for layer in layers for key, p in layer.named_parameters(recurse=False)]
        self._slots = [slot for slot in slots if slot[2].requires_grad]
        self.of = {p: nn.Parameter(p.detach().bfloat16()) for _, _, p in self._slots}

    @contextmanager
    def lent(self) -> Iterator[None]:
        """The model's layers hold their rounded weights, and these get the gradients."""
        for layer, key, whole in self._slots:
            layer._parameters[key], self.of[whole].grad = self.of[whole], None
        try:
            yield
        finally:
            for layer, key, whole in self._slots:
                layer._parameters[key] = whole
