"""Opening a run: its processes, its folder, new or the old one, and the weights that it starts from."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pmae.config import Config, DataConfig
from pmae.config_file import FREE, flat, to_dict
from pmae.data.crops import plan_crops
from pmae.data.images import Splits
from pmae.errors import UserError, require
from pmae.files import write_json
from pmae.models.weights import Pretrained
from pmae.plugins import require_plugins
from pmae.runs import Run, create_run, discard, require_vacant
from pmae.train import checkpoint, distributed, setup
from pmae.train.distributed import World
from pmae.train.environment import describe_environment, memory_errors, pick_device, pick_precision, steady_matmuls
from pmae.train.journal import say


class Opened(NamedTuple):
    """A run that is held by its processes, of which this is one."""

    run: Run
    device: torch.device
    pretrained: Pretrained | None
    """The weights that it starts from, if it has not begun and there are any."""
    world: World
    require_folder: Callable[[], None]
    """Refuses to go on where its folder was moved."""


@contextlib.contextmanager
def opened(
    config: Config, splits: Splits, out: Path, weights: str | None, resume: bool, quiet: bool, fitted: Path | None
) -> Iterator[Opened]:
    """Join the other processes, hold the run's folder and load the weights that it starts from, or refuse.

    What another run in the folder `fitted` learned from the images before training is taken. Inside, running out of
    memory is one sentence, and the caller's random state is kept.
    """
    device = distributed.local_device(pick_device(config.train.device))
    model = setup.dry_build(config, splits.train.shape, device)
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
    precision = pick_precision(config.train.precision, device)
    with distributed.process_group(device) as world, steady_matmuls(precision, device):
        distributed.require_shardable(config, model, world.size)
        distributed.require_divisible(config, config.train.batch_size or 1, model, world.size)
        # As the first process sees it: a moment later the folder may be there.
        resume = bool(world.all_gather(resume or distributed.was_restarted(out))[0])
        # Where every checkpoint is damaged a run begins anew, and with the weights that it began with.
        whole = resume and any(checkpoint.damage(each) is None for each in Run(out).checkpoints())
        wanted = weights is not None and not whole
        pretrained = setup.given_weights(str(weights), model) if wanted else None
        notes = [f"encoder.weights: {'; '.join(pretrained.notes)}"] if pretrained else []
        with world.all_agree():
            fit = model.space, len(splits.train), device
            notes += setup.threads_note(out, device) if resume else [] if fitted else setup.expected_fit(*fit)
        notes += [str(plan)] if (plan := plan_crops(splits.train, config, device)) else []
        for note in notes if world.main and not quiet else []:
            say(note)
        forked = torch.random.fork_rng([device] if device.type == "cuda" else [])  # which every step seeds anew
        folder = run_folder(config, splits, out, resume, pretrained, world, fitted)
        with folder as (run, require_folder), memory_errors(config.train, device), forked:
            yield Opened(run, device, pretrained, world, require_folder)


@contextlib.contextmanager
def run_folder(
    config: Config,
    splits: Splits,
    out: Path,
    resume: bool,
    pretrained: Pretrained | None,
    world: World,
    fitted: Path | None,
) -> Iterator[tuple[Run, Callable[[], None]]]:
    """A new or the old folder, held by the main process, and a check that it is; taken back if nothing was trained."""
    with contextlib.ExitStack() as held:
        require_held: Callable[[], None] = lambda: None  # noqa: E731
        with world.all_agree():
            if world.main:
                if not resume:
                    require_vacant(out)
                require_held = held.enter_context(setup.locked(out))
                environment = describe_environment(splits, world.device)
                environment |= {"start": pretrained.notes} if pretrained else {}
                _resume(config, out, environment) if resume else create_run(out, config, environment)
                if fitted:
                    setup.take_fit(Run(out), fitted)
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
    run, now = Run(out), flat(config)
    require(run.method != "weights", "out", "a run that can go on, not weights as given: init takes those", str(out))
    require_plugins(run.config, unchanged=True)
    # Images may lie elsewhere now, and this run among them: the fingerprint tells whether they are the same.
    known = {name: value for name, value in run.environment["data"].items() if name not in ("name", "notes")}
    free = FREE | {"data.source"} if "fingerprint" in known else FREE
    # Earlier versions said less of their data, such as no fingerprint.
    given = {name: environment["data"].get(name) for name in known}
    other = [name for name in known if known[name] != given[name]]
    name, got_name = (data["name"] for data in (run.environment["data"], environment["data"]))
    # Told first, as settings follow from the images.
    if other and name != got_name == DataConfig().source == config.data.source:
        again = "pmae.pretrain(config, images, out, resume=True)"
        raise UserError(f"images must be given again to resume a run of images in memory ({name!r}): {again}")
    for setting, value in flat(run.config).items():
        if value != now[setting] and setting not in free:
            raise UserError(f"{setting} must stay {value!r} when a run is resumed, got {now[setting]!r}")
    if other == ["fingerprint"]:
        raise UserError("data must be the images that the run began with, got others of the same shapes and names")
    if other:
        began, got = ({name: data[name] for name in other} for data in (known, given))
        raise UserError(f"data must be what the run began with, {began}, got {got}")
    write_json(run.path / "config.json", to_dict(config))
