"""What training begins with: statistics and space, from the images or the run folder, and the first weights."""

import time
from pathlib import Path

import torch

from pmae.config import Config
from pmae.data.augment import Standardize
from pmae.data.batches import Batches, Standardized, fit_standardize
from pmae.method import MaskedAutoencoder, build_method
from pmae.models import Encoder
from pmae.runs import Run, write_json
from pmae.spaces import Space, build_space
from pmae.spaces.together import Together
from pmae.train import checkpoint
from pmae.train.distributed import World
from pmae.train.start import Start, load_start


def given_weights(config: Config, encoder: Encoder, out: Path, resume: bool) -> Start | None:
    """The weights to start from, unless there are none or a checkpoint replaces them."""
    weights = config.encoder.weights
    return None if weights is None or (resume and Run(out).checkpoints()) else load_start(weights, encoder)


def fitted(
    config: Config, run: Run, batches: Batches, shape: tuple[int, int, int], world: World
) -> tuple[Standardize, Space]:
    """Statistics and space, from the run folder if they are there, else fitted and saved."""
    path, device = run.path / "fitted.safetensors", batches.device
    space = build_space(config.space, shape).to(device)
    if path.exists():
        checkpoint.load_into(space, path, prefix="space.")
        return checkpoint.load_standardize(run).to(device), space
    standardize = fit_standardize(batches, config.data.standardize, world.share, world.add_up).to(device)
    mine = Standardized(batches, standardize, world.share)
    began = _clock(device)
    space.fit_together(Standardized(batches, standardize), Together(lambda whole: mine, world.add_up))
    seconds = round(_clock(device) - began, 6)
    with world.agreed():
        if world.main:
            # With the machine, which it says something about: what goes into the results is the same on all.
            write_json(run.path / "environment.json", {**run.environment, "fit_seconds": seconds})
            checkpoint.save_fitted(run, standardize, space)
    # The others take what the first one wrote, so that all have the same bits.
    return (standardize, space) if world.main else fitted(config, run, batches, shape, world)


def seeded_model(config: Config, shape: tuple[int, int, int], space: Space, start: Start | None) -> MaskedAutoencoder:
    """Initial weights that depend on the seed and the given ones alone, leaving the caller's random state as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.train.seed)
        model = build_method(config, shape, space)
    if start:
        model.encoder.net.load_state_dict(start.tensors)
    return model


def _clock(device: torch.device) -> float:
    """Seconds, read when the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.monotonic()
