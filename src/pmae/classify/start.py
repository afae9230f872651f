"""Where fine-tuning starts: the encoder of a run, or of weights that timm or Hugging Face wrote."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from pmae.config import DataConfig, EncoderConfig
from pmae.data.augment import Standardize
from pmae.data.batches import Batches, fit_standardize
from pmae.data.images import ImageSet
from pmae.errors import UserError, require
from pmae.models import Encoder, build_encoder
from pmae.models.described import BYTES, Described, described_weights, require_encoder
from pmae.models.weights import load_weights
from pmae.runs import Run
from pmae.train.checkpoint import load_encoder


class Start(NamedTuple):
    """An encoder to train, the settings that build it, the statistics of its pixels, and what was done to make it."""

    encoder: Encoder
    config: EncoderConfig
    standardize: Standardize
    notes: tuple[str, ...] = ()


def is_run(source: Path | str | Run) -> bool:
    """Whether a path is a run folder, not weights."""
    return isinstance(source, Run) or (Path(source).expanduser() / "checkpoints").is_dir()


def reading_of(source: Path | str | Run) -> DataConfig:
    """How the images of a run were read; those for weights are read as they are."""
    return Run(source).config.data if is_run(source) else DataConfig()


def load_start(source: Path | str | Run, images: ImageSet, name: str | None = None) -> Start:
    """The encoder at `source` for these images; `name` is its timm network where weights do not tell it."""
    if is_run(source):
        config, found, standardize = load_encoder(source)
        if images.shape != found.shape:
            rule = "of the shape that the run was trained on (resize and channels convert image files)"
            raise UserError(f"data must have images {rule}, {found.shape}, got {images.shape}")
        return Start(found, config.encoder, standardize)
    place = Path(str(source)).expanduser()
    rule = "a run folder, or weights that timm or Hugging Face wrote"
    require(place.exists(), "start", rule, str(source))
    require(not (place / "classifier.json").exists(), "start", f"{rule}, not a classifier", str(source))
    described = described_weights(str(source), name)
    encoder = require_encoder(described, str(source))
    _require_patches(encoder.patch_size, images.shape)
    built = build_encoder(encoder, images.shape)
    pretrained = load_weights(str(source), built)
    built.net.load_state_dict(pretrained.tensors)
    recorded = recorded_statistics(described, images)
    told = "recorded with the weights" if recorded else "those of the training images"
    standardize = recorded or fit_standardize(Batches(images.images, torch.device("cpu")), "channel")
    return Start(built.eval(), encoder, standardize, (*pretrained.notes, f"mean and deviation of pixels are {told}"))


def _require_patches(patch: int | None, shape: tuple[int, int, int]) -> None:
    """Refuse sides that the patches of given weights do not divide, with one that they do."""
    if patch and shape[1] > 1 and (shape[1] % patch or shape[2] % patch):
        fitting = patch * max(1, round(max(shape[1:]) / patch))
        rule = f"sides that the patches of the weights, of {patch} pixels, divide (for files resize={fitting})"
        raise UserError(f"data must have images with {rule}, got {shape[1]}x{shape[2]}")


def recorded_statistics(described: Described, images: ImageSet) -> Standardize | None:
    """Mean and standard deviation that came with weights, in the images' units; None where they do not apply."""
    mean, std, scale = described.mean, described.std, described.scale
    if mean is None or std is None or len(mean) != images.shape[0]:
        return None
    if scale == BYTES and images.images.dtype != np.uint8:
        return None
    return Standardize(*(torch.tensor(values).reshape(-1, 1, 1) / scale for values in (mean, std)))
