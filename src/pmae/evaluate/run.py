"""From a run folder to scores in its results.json: the encoder at some epochs, and the baselines it must beat."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from pmae.data.augment import Standardize
from pmae.data.batches import Batches
from pmae.data.images import Splits
from pmae.errors import UserError
from pmae.evaluate import suite
from pmae.evaluate.baselines import RawPixels, fit_pca, random_weights
from pmae.evaluate.features import Processes, Representation, extract
from pmae.evaluate.protocols import Protocols, only
from pmae.files import write_tensors
from pmae.models import build_encoder
from pmae.results import PRIMARY, Score, scores_of
from pmae.runs import Run

MAPPED = 2000
"""Test images whose features are kept for the map in the report."""


@dataclass(frozen=True)
class RunEvaluation:
    """How the representations of one run are scored; each is in results.json as soon as it is measured.

    `standardize` lies on the device of the evaluation. All of `processes` compute features, the first one writes.
    """

    run: Run
    splits: Splits
    standardize: Standardize
    protocols: Protocols
    seeds: Sequence[int]
    say: Callable[[str], None]
    processes: Processes

    def __post_init__(self) -> None:
        count = self.processes.size
        if count > 1 and self.protocols.finetune:
            raise UserError(
                f"protocols must be linear, mlp or knn in several processes ({count}), got 'finetune': it trains the "
                "encoder, which one process does; run it without torchrun"
            )

    @property
    def device(self) -> torch.device:
        """Where the networks and features are."""
        return self.standardize.mean.device

    def score_encoder(self, encoder: Representation, epoch: int) -> None:
        """The run's own encoder after this many epochs."""
        method = "mae" if self.run.config.space.name == "pixels" else "pmae"
        self._score(encoder, method, epoch, self.protocols)

    def score_baselines(self) -> None:
        """What needs no pretraining: random weights, raw pixels, PCA; from scratch is fine-tuning of random weights."""
        config, shape, kinds = self.run.config, self.splits.train.shape, self.protocols.kinds
        untrained = random_weights(lambda: build_encoder(config.encoder, shape), config.train.seed).to(self.device)
        frozen = only(self.protocols, [kind for kind in kinds if kind != "finetune"])
        if "finetune" in kinds:
            self._score(untrained, "from scratch", 0, only(self.protocols, ["finetune"]))
        if frozen.kinds:
            pca = fit_pca(Batches(self.splits.train.images, self.device), self.standardize, shape, untrained.width)
            self._score(untrained, "random weights", 0, frozen)
            self._score(RawPixels(shape, untrained.width), "raw pixels", 0, frozen)
            self._score(pca.to(self.device), "pca features", 0, frozen)

    def _score(self, represent: Representation, method: str, epoch: int, protocols: Protocols) -> None:
        label = f"{method} epoch {epoch}" if epoch else method
        # One a preset and data set: each is a fine-tuning of its own, to be resumed by itself.
        folder = re.sub(r"[^\w.]+", "-", f"{label} {protocols.name} {self.splits.name}")
        found = suite.evaluate(
            represent,
            self.splits,
            self.standardize,
            protocols,
            method=method,
            epoch=epoch,
            device=self.device,
            seeds=self.seeds,
            folder=self.run.path / "finetune" / folder,
            say=lambda message: self.say(f"{label}: {message}") if self.processes.main else None,
            processes=self.processes,
        )
        with self.processes.all_agree():
            if self.processes.main:
                self.run.add_evaluation(found)

    def save_features(self, encoder: Representation) -> None:
        """Features and labels of some test images, for the map in the report."""
        test = self.splits.test
        if test is None or test.labels is None:
            return
        part = test.take(torch.linspace(0, len(test) - 1, min(MAPPED, len(test))).long().numpy())
        features = extract(encoder, Batches(part.images, self.device), self.standardize, compile=False)[PRIMARY].cpu()
        tensors = {"features": features, "labels": torch.as_tensor(part.labels)}
        write_tensors(self.run.path / "features.safetensors", tensors)


def score_table(run: Run) -> str:
    """Accuracies of everything evaluated in a run, as aligned lines."""
    lines = [f"  {'representation':<28} {'protocol':<9} {'pooling':<8} {'split':<6} {'accuracy':>8}   95% interval"]
    return "\n".join([*lines, *(_line(score) for score in scores_of(run.evaluations))])


def _line(score: Score) -> str:
    accuracy = score.accuracy
    parts = (accuracy.value, accuracy.low, accuracy.high)
    value, low, high = (float("nan") if part is None else part for part in parts)
    where = f"  {score.label:<28} {score.protocol:<9} {score.pooling:<8} {score.split:<6}"
    return f"{where} {value:8.1f}   {low:.1f} to {high:.1f}"
