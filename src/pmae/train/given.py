"""Weights of timm or Hugging Face as they are: the encoder, and how the images that it was trained on were read."""

from pathlib import Path
from typing import NamedTuple

import torch

from pmae.config import DataConfig, EncoderConfig
from pmae.data.augment import Standardize
from pmae.data.batches import Batches, fit_standardize
from pmae.data.images import ImageSet
from pmae.errors import UserError
from pmae.models import Encoder, build_encoder
from pmae.models.described import Described, described_weights, require_encoder
from pmae.models.weights import load_weights


class TrainedOn(NamedTuple):
    """The images that an encoder was trained on: how they were read, their shape and their type."""

    data: DataConfig
    shape: tuple[int, int, int]
    dtype: str


class Start(NamedTuple):
    """An encoder to begin with, the settings that build it, the statistics of its pixels, and what was done to it."""

    encoder: Encoder
    config: EncoderConfig
    standardize: Standardize
    notes: tuple[str, ...] = ()


def given_images(place: Path, name: str | None = None) -> TrainedOn:
    """The images that weights were trained on; `name` is the timm network where nothing beside them tells it."""
    known = described_weights(str(place), name)
    require_encoder(known, str(place))
    return TrainedOn(DataConfig(**known.reading._asdict()), known.shape, known.dtype)


def load_given(
    place: Path, name: str | None = None, shape: tuple[int, int, int] | None = None, images: ImageSet | None = None
) -> Start:
    """The encoder for images of its own shape, of another, or for these, whose statistics stand in for missing ones."""
    known = described_weights(str(place), name)
    config, shape = require_encoder(known, str(place)), images.shape if images else shape or known.shape
    patch = config.patch_size
    if patch and shape[1] > 1 and (shape[1] % patch or shape[2] % patch):
        fitting = patch * max(1, round(max(shape[1:]) / patch))
        rule = f"sides that the patches of the weights, of {patch} pixels, divide (for files resize={fitting})"
        raise UserError(f"data must have images with {rule}, got {shape[1]}x{shape[2]}")
    with torch.random.fork_rng(devices=[]):  # initial weights, which are not kept, are drawn
        encoder = build_encoder(config, shape)
    pretrained = load_weights(str(place), encoder)
    encoder.net.load_state_dict(pretrained.tensors)
    standardize, told = recorded(known, shape[0], str(images.images.dtype) if images else None), known.told
    if standardize is None and images is not None:
        standardize, told = fit_standardize(Batches(images.images, torch.device("cpu")), "channel"), "the images' own"
    if standardize is None:
        rule = f"mean and standard deviation of their {shape[0]} channels beside them"
        raise UserError(f"weights {str(place)!r} must have {rule}")
    notes = [*pretrained.notes, f"mean and standard deviation of pixels: {told}"]
    if images is not None and images.names:
        mode, share, how, _ = known.reading
        notes.append(f"files were resized by crop_mode {mode}, crop_pct {share:.4g}, {how}")
    return Start(encoder.eval(), config, standardize, tuple(notes))


def recorded(known: Described, channels: int, dtype: str | None) -> Standardize | None:
    """Mean and standard deviation that came with weights, in the images' units; None where they do not apply."""
    if known.mean is None or known.std is None or len(known.mean) != channels or dtype not in (None, known.dtype):
        return None
    return Standardize(*(torch.tensor(values).reshape(-1, 1, 1) / known.scale for values in (known.mean, known.std)))
