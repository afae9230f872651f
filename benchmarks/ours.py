"""Our training step as the loop takes it: plain, compiled, or compiled and in one CUDA graph."""

import tempfile
from pathlib import Path

import torch

from benchmarks.machine import Steps
from benchmarks.work import DEVIATION, MEAN, RATE, Work, random_space
from pmae.config import Config, replace
from pmae.data.augment import Standardize
from pmae.data.images import ImageSet, Splits
from pmae.fast.graph import compiled
from pmae.runs import create_run
from pmae.train import checkpoint
from pmae.train.environment import pick_device
from pmae.train.loop import Pretraining


def build(work: Work, engine: str) -> Steps:
    """A function that takes so many steps: everything the loop does between two log lines, draws included."""
    trainer = _trainer(work, replace(work.config, train__engine="compiled" if engine == "full" else "plain"))
    if engine == "compiled":
        # The step looks this method up at every call: the instance's own comes first.
        trainer.stepper.__dict__["measure"] = compiled(trainer.stepper.measure)
    order = trainer.draws.order(0)

    def steps(count: int) -> None:
        for number in range(count):
            position = number % trainer.steps
            trainer.stepper(trainer.inputs(0, position, trainer.batches.take(order[position]), RATE))

    return steps


def _trainer(work: Work, config: Config) -> Pretraining:
    """A trainer on noise; its run folder, of which only the fitted statistics and space matter, goes at once."""
    device = pick_device(config.train.device)
    one = torch.ones(work.shape[0], 1, 1)
    with tempfile.TemporaryDirectory() as folder:
        run = create_run(Path(folder) / "run", config, {})
        space = random_space(config, work.shape, device)
        checkpoint.save_fitted(run, Standardize(MEAN * one, DEVIATION * one), space)
        return Pretraining(config, Splits("noise", ImageSet(work.noise())), run, device)
