"""Setting up a run: its folder, what is fitted to the images before training, and the initial weights."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from pmae.config import Config
from pmae.config_file import to_dict
from pmae.data.augment import Standardize
from pmae.data.batches import Batches, Standardized, fit_standardize
from pmae.data.decode import available_bytes
from pmae.data.images import Splits
from pmae.errors import UserError
from pmae.files import write_json
from pmae.method import MaskedAutoencoder, build_method
from pmae.models import Encoder
from pmae.models.weights import Pretrained, load_weights
from pmae.runs import Run, create_run, discard, require_vacant
from pmae.spaces import Space, build_space
from pmae.spaces.moments import DistributedFit
from pmae.train import checkpoint
from pmae.train.distributed import World
from pmae.train.environment import describe_environment, locked

FREE = (
    *("train.log_every", "train.keep", "train.track", "train.device", "train.kernels", "train.shard"),
    *("data.root", "data.threads"),
)
"""Settings that a resumed run may change."""
SIDE = 1024
"""Of the matrices whose multiplication tells the speed of a device."""
QUICK, SOON = 1e11, 5.0
"""Operations and seconds below which there is nothing to say of a fit."""


def expected_fit(space: Space, images: int, device: torch.device) -> str:
    """Refuse a fit that memory is too small for, with the bytes; of one that takes a while, a line that says so."""
    need, operations = space.fit_cost(images)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_bytes()
    what = f"the fit of space {space.config.name!r} to {images:,} images"
    if need > free:
        raise UserError(f"{what} needs {need:,} bytes, and {free:,} are free on {device}; {space.way_out}")
    seconds = operations / _operations_a_second(device) if operations > QUICK else 0.0
    if seconds < SOON:
        return ""
    minutes, hours = f"{seconds / 60:.0f} minutes", f"{seconds / 3600:,.0f} hours"
    about = f"{seconds:.0f} s" if seconds < 120 else minutes if seconds < 7200 else hours
    return f"{what} takes about {about} and {need / 1e9:.1f} GB on {device}"


def _operations_a_second(device: torch.device) -> float:
    """Of a matrix multiplication as fits do them: float64 on CUDA, float32 on a CPU; the better of two."""
    a = torch.ones(SIDE, SIDE, device=device, dtype=torch.float64 if device.type == "cuda" else torch.float32)
    float((a @ a)[0, 0])
    spent = []
    for _ in range(2):
        began = time.perf_counter()
        float((a @ a)[0, 0])
        spent.append(time.perf_counter() - began)
    return 2 * SIDE**3 / max(min(spent), 1e-9)


@contextlib.contextmanager
def run_folder(
    config: Config,
    splits: Splits,
    out: Path,
    resume: bool,
    device: torch.device,
    pretrained: Pretrained | None,
    world: World,
) -> Iterator[tuple[Run, Callable[[], None]]]:
    """A new folder, or the old one if settings and data are the same, held by the main process; beside it, a check
    that it is still there. Taken back if nothing was trained.
    """
    with contextlib.ExitStack() as held:
        require_held: Callable[[], None] = lambda: None  # noqa: E731
        with world.all_agree():
            if world.main:
                if not resume:
                    require_vacant(out)
                require_held = held.enter_context(locked(out))
                environment = describe_environment(splits, device)
                environment |= {"start": pretrained.notes} if pretrained else {}
                _resume(config, out, environment) if resume else create_run(out, config, environment)
        run = Run(out)
        try:
            yield run, require_held
        except UserError:
            # What only the fit or the first step could tell, such as a batch that does not fit in memory.
            trained = any(run.path.glob("failure_*")) or (run.path / "metrics.jsonl").exists()
            if world.main and not resume and not trained and run.path.exists():
                discard(run)
            raise


def _resume(config: Config, out: Path, environment: dict[str, Any]) -> None:
    """Refuse other settings than those a run began with, where they matter, and other data."""
    run = Run(out)
    for section in dataclasses.fields(config):
        saved, given = getattr(run.config, section.name), getattr(config, section.name)
        for key in dataclasses.fields(saved):
            old, new = getattr(saved, key.name), getattr(given, key.name)
            if old != new and f"{section.name}.{key.name}" not in FREE:
                raise UserError(f"{section.name}.{key.name} must stay {old!r} when a run is resumed, got {new!r}")
    before = run.environment["data"]
    # Earlier versions said less of their data, such as no fingerprint.
    now = {name: environment["data"].get(name) for name in before}
    if [name for name in before if before[name] != now[name]] == ["fingerprint"]:
        raise UserError("data must be the images that the run began with, got others of the same shapes and names")
    if before != now:
        raise UserError(f"data must be what the run began with, {before}, got {now}")
    write_json(run.path / "config.json", to_dict(config))


def threads_note(out: Path, device: torch.device) -> str:
    """A line where a run goes on with another number of CPU threads: sums then round differently in their last bits."""
    before, now = Run(out).environment.get("threads"), torch.get_num_threads()
    if device.type != "cpu" or before in (None, now):
        return ""
    return f"the run began with {before} threads and goes on with {now}: results agree to rounding, not bit for bit"


def fit_or_load(
    config: Config, run: Run, batches: Batches, shape: tuple[int, int, int], world: World
) -> tuple[Standardize, Space]:
    """Statistics and space, from the run folder if they are there, else fitted and saved."""
    path, device = run.path / "fitted.safetensors", batches.device
    space = build_space(config.space, shape).to(device)
    if path.exists():
        checkpoint.load_into(space, path, prefix="space.")
        return checkpoint.load_standardize(run).to(device), space
    standardize = fit_standardize(batches, config.data.standardize, world.part, world.all_reduce).to(device)
    mine = Standardized(batches, standardize, world.part)
    began = _clock(device)
    space.fit_distributed(Standardized(batches, standardize), DistributedFit(lambda whole: mine, world.all_reduce))
    seconds = round(_clock(device) - began, 6)
    with world.all_agree():
        if world.main:
            # With the machine, which it says something about: what goes into the results is the same on all.
            write_json(run.path / "environment.json", {**run.environment, "fit_seconds": seconds})
            checkpoint.save_fitted(run, standardize, space)
    # The others take what the first one wrote, so that all have the same bits.
    return (standardize, space) if world.main else fit_or_load(config, run, batches, shape, world)


def _clock(device: torch.device) -> float:
    """Seconds, read when the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.monotonic()


def pretrained_weights(config: Config, encoder: Encoder, out: Path, resume: bool) -> Pretrained | None:
    """What `encoder.weights` names, unless it names nothing or a checkpoint replaces it."""
    weights = config.encoder.weights
    return None if weights is None or (resume and Run(out).checkpoints()) else load_weights(weights, encoder)


def initial_model(
    config: Config, shape: tuple[int, int, int], space: Space, pretrained: Pretrained | None
) -> MaskedAutoencoder:
    """Initial weights that depend on the seed and the given ones alone, leaving the caller's random state as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.train.seed)
        model = build_method(config, shape, space)
    if pretrained:
        model.encoder.net.load_state_dict(pretrained.tensors)
    return model
