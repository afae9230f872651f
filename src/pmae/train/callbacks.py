"""What of somebody's own happens during a run: at its start, after every step and epoch, and at its end."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from torch import nn
from torch.optim import AdamW

from pmae.config import Config
from pmae.method import MaskedAutoencoder
from pmae.plugins import build
from pmae.runs import Run

EVENTS = ("on_start", "on_step", "on_epoch", "on_end")


class Training(Protocol):
    """What a callback sees of a run in progress."""

    config: Config
    model: MaskedAutoencoder
    optimizer: AdamW
    run: Run
    epochs: int
    steps: int
    """Steps an epoch."""
    step: int
    """Steps taken so far."""
    metrics: dict[str, float]
    """The numbers that were logged last, by name."""

    def stop(self, reason: str) -> None:
        """Save a checkpoint after this step (in several processes, the next one logged) and end the run."""


class Callback:
    """A base class for callbacks, whose methods do nothing; any class that has one of them will do.

    A callback that is an nn.Module too becomes part of the model: its parameters train, and all its state is saved and
    restored.
    """

    def on_start(self, training: Training) -> None:
        """The model is built, nothing is restored yet: what is added to it here is trained, saved and restored."""

    def on_step(self, training: Training) -> None:
        """A step was taken; reading a number from the device here would make it wait."""

    def on_epoch(self, training: Training) -> None:
        """An epoch has ended and the encoder was looked at, if that was due."""

    def on_end(self, training: Training) -> None:
        """The run has ended, or was told to stop, and everything is saved."""


class Callbacks:
    """The callbacks of a run, by event."""

    def __init__(self, names: Sequence[str]) -> None:
        self._all = [build("callback", name, "train.callbacks") for name in names]
        self._calls: dict[str, list[Any]] = {
            event: [getattr(each, event) for each in self._all if hasattr(each, event)] for event in EVENTS
        }
        self._calls["on_step"] += [each for each in self._all if isinstance(each, partial)]  # functions

    def start(self, training: Training) -> None:
        """Make modules part of the model, and call `on_start`."""
        modules = [each for each in self._all if isinstance(each, nn.Module)]
        if modules:
            training.model.callbacks = nn.ModuleList(modules)
        self("on_start", training)

    def __call__(self, event: str, training: Training) -> None:
        for call in self._calls[event]:
            call(training)
