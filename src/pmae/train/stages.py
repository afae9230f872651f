"""Training that begins with large patches: a run of its own, in the folder of the one that goes on with its networks.

Both have one schedule: the rate is kept in the first stage, and goes to 0 in the second.
"""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from pmae.config import Config, replace
from pmae.errors import Interrupted, UserError
from pmae.flops import flops_per_image
from pmae.plugins import command_line
from pmae.runs import FIRST, DataRecord, Run, discard
from pmae.train.distributed import is_main, was_restarted
from pmae.train.environment import release_memory
from pmae.train.setup import locked


def first_epochs(config: Config) -> int:
    """How many epochs with the first patches see as many tokens as one with the last."""
    patch, first = config.encoder.patch_size or 1, config.encoder.first_patch_size or 1
    return max(1, first // patch) ** 2


def first_stage(config: Config) -> Config:
    """The settings of the first stage, of resolved ones: other patches, and epochs for as many tokens."""
    more, train, optim = first_epochs(config), config.train, config.optim
    return replace(
        config,
        encoder__patch_size=config.encoder.first_patch_size,
        encoder__first_patch_size=0,
        optim__schedule="constant" if optim.schedule == "cosine" else optim.schedule,
        optim__warmup_epochs=None if optim.warmup_epochs is None else round(more * optim.warmup_epochs, 2),
        train__epochs=more * (train.epochs or 1),
        train__checkpoint_every=more * (train.checkpoint_every or 1),
        probe__every=more * (config.probe.every or 1),
    )


def operations(config: Config, data: DataRecord, epochs: float) -> float | None:
    """Floating-point operations of a pretraining that came so far, its first stage included; None if not counted."""
    stages = [(config, epochs)]
    if config.encoder.first_patch_size:
        first = first_stage(config)
        stages.append((first, first.train.epochs or 0))
    channels, height, width = data["shape"]
    batch = config.train.batch_size or 1
    images = data["counts"]["train"] // batch * batch  # those that do not fill a batch are left out of an epoch
    try:
        each = (flops_per_image(stage, (channels, height, width)) * length for stage, length in stages)
        return images * sum(each)
    except UserError:
        return None


def train_first(
    config: Config,
    out: Path,
    resume: bool,
    rehearse: Callable[[], object],
    train: Callable[[Config, Path, bool], object],
) -> None:
    """Begin a run in `out`, or find it there, and train its first stage to its end, wherever that was stopped.

    `rehearse` begins it, and takes a step of the second stage: its small patches need the most memory, and whether
    there is enough is to be known before the first stage, not after it.
    """
    folder, first = out / FIRST, first_stage(config)
    if not (resume or was_restarted(out)):
        rehearse()
        release_memory()
    elif (out / "metrics.jsonl").exists():
        return  # the second stage has begun, wherever a callback may have ended the first
    try:
        with locked(out) if is_main() else nullcontext():
            train(first, folder, (folder / "config.json").exists())
    except Interrupted as stop:
        again = command_line("pretrain", "--out", out, "--resume")
        raise Interrupted(f"continue with: {again}", stop.code - 128) from None
    except UserError:
        # It was taken back, as nothing had been trained. A run that was here before is not ours to take back.
        if is_main() and not (resume or folder.exists()):
            discard(Run(out))
        raise
    release_memory()
