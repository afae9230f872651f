"""The run folder of a training: new, or the old one whose settings and data are the same."""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import torch

from pmae.config import Config
from pmae.config_file import to_dict
from pmae.data.images import Splits
from pmae.errors import UserError
from pmae.runs import Run, create_run, discard, require_vacant, write_json
from pmae.train.distributed import World
from pmae.train.environment import describe_environment
from pmae.train.lock import locked
from pmae.train.start import Start

FREE = ("train.log_every", "train.keep", "train.track", "train.device", "train.shard", "data.root", "data.threads")
"""Settings that a resumed run may change."""


@contextlib.contextmanager
def opened(
    config: Config, splits: Splits, out: Path, resume: bool, device: torch.device, start: Start | None, world: World
) -> Iterator[Run]:
    """The folder, which the main process holds for as long as this lasts; taken back if nothing was trained."""
    with contextlib.ExitStack() as held:
        with world.agreed():
            if world.main:
                if not resume:
                    require_vacant(out)
                held.enter_context(locked(out))
                _open(config, splits, out, resume, device, start)
        run = Run(out)
        try:
            yield run
        except UserError:
            # What only the fit or the first step could tell, such as a batch that does not fit in memory.
            trained = any(run.path.glob("failure_*")) or (run.path / "metrics.jsonl").exists()
            if world.main and not resume and not trained:
                discard(run)
            raise


def _open(config: Config, splits: Splits, out: Path, resume: bool, device: torch.device, start: Start | None) -> None:
    environment = describe_environment(splits, device) | ({"start": start.notes} if start else {})
    if not resume:
        create_run(out, config, environment)
        return
    run = Run(out)
    for section in dataclasses.fields(config):
        saved, given = getattr(run.config, section.name), getattr(config, section.name)
        for key in dataclasses.fields(saved):
            old, new = getattr(saved, key.name), getattr(given, key.name)
            if old != new and f"{section.name}.{key.name}" not in FREE:
                raise UserError(f"{section.name}.{key.name} must stay {old!r} when a run is resumed, got {new!r}")
    if run.environment["data"] != environment["data"]:
        raise UserError(f"data must be what the run began with, {run.environment['data']}, got {environment['data']}")
    write_json(run.path / "config.json", to_dict(config))
