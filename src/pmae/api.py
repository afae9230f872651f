"""The front door in Python: from a name, a path or an array to a finished run folder."""

from pathlib import Path
from typing import Any

from pmae.config import Config, DataConfig, replace
from pmae.data.datasets import load
from pmae.data.images import ImageSet, Splits
from pmae.data.readers.arrays import from_arrays
from pmae.derive import describe, resolve
from pmae.errors import UserError
from pmae.evaluate.watch import watch_with
from pmae.report.figures import save_figures
from pmae.runs import Run
from pmae.train import loop


def pretrain(
    config: Config | None = None,
    images: Any = None,
    out: Path | str = "runs/pmae",
    resume: bool = False,
    quiet: bool = False,
) -> Run:
    """Pretrain on what `config.data` names, or on `images` in memory, into the run folder `out`."""
    config = config or Config()
    splits = load(config.data) if images is None else in_memory(images, config.data)
    config, reasons = resolve(config, len(splits.train), splits.train.shape)
    if not quiet:
        print(f"{splits.name}: {_counts(splits)}\n{describe(config, reasons)}", flush=True)
    probe = load(DataConfig(source=config.probe.data, root=config.data.root)) if config.probe.data else splits
    _same_shape(splits.train, probe.train)
    run = loop.pretrain(config, splits, out, resume, quiet, watch_with(probe))
    save_figures(run)
    return run


def in_memory(images: Any, config: DataConfig) -> Splits:
    """Arrays, tensors, an `ImageSet` or whole `Splits` as a data set."""
    if isinstance(images, Splits):
        return images
    return Splits("array", images if isinstance(images, ImageSet) else from_arrays(images, layout=config.layout))




def mae_twin(config: Config) -> Config:
    """The same budget, model and data, with patches hidden instead of components."""
    return replace(
        config,
        space__name="pixels",
        masking__masked_variance=None,
        masking__masked_patches=0.75,
        objective__target="patches",
        objective__scale="mean",
    )


def _same_shape(trained: ImageSet, probed: ImageSet) -> None:
    if trained.shape != probed.shape:
        raise UserError(f"probe.data must have images of the same shape {trained.shape}, got {probed.shape}")


def _counts(splits: Splits) -> str:
    channels, height, width = splits.train.shape
    parts = [(name, getattr(splits, name)) for name in ("train", "val", "test")]
    counts = ", ".join(f"{len(part):,} {name}" for name, part in parts if part is not None)
    return f"{counts} images of {height}x{width}, {channels} channel{'s' * (channels > 1)}, {splits.train.images.dtype}"
