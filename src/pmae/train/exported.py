"""An encoder from the folder that it was exported to, for timm or Hugging Face: weights and JSON, no pickle."""

from pathlib import Path
from typing import Any, Literal, NamedTuple, NotRequired, TypedDict

import torch

from pmae.config import Config, DataConfig
from pmae.data.augment import Standardize
from pmae.errors import require
from pmae.files import read_object
from pmae.models import Encoder, build_encoder
from pmae.models.described import described_weights, require_encoder
from pmae.models.weights import load_weights
from pmae.validation import Count, Positive, coerced

FILE = "preprocessing.json"


class Preprocessing(TypedDict):
    """What preprocessing.json says of the images, as far as an encoder needs it; statistics are of scaled pixels."""

    channels: Count
    height: Count
    width: Count
    dtype: NotRequired[str]
    scale: Positive
    crop_mode: NotRequired[Literal["center", "squash"]]
    mean: NotRequired[list[float]]
    std: NotRequired[list[Positive]]


class TrainedOn(NamedTuple):
    """The images that an encoder was trained on: how they were read, their shape and their type."""

    data: DataConfig
    shape: tuple[int, int, int]
    dtype: str


def is_exported(folder: Path | str) -> bool:
    """Whether a folder is one that `export` wrote."""
    return (Path(folder).expanduser() / FILE).is_file()


def read_preprocessing(folder: Path) -> tuple[TrainedOn, dict[str, Any]]:
    """What an exported folder says of its images, and all that is done to them."""
    found = read_object(folder / FILE)
    own = {name: found[name] for name in Preprocessing.__annotations__ if name in found}
    known: dict[str, Any] = coerced(own, Preprocessing, str(folder / FILE))
    require("mean" in known, "run", "an encoder that was exported for timm or Hugging Face", str(folder))
    shape = known["channels"], known["height"], known["width"]
    reading = DataConfig(crop_mode=known.get("crop_mode", "squash"))
    return TrainedOn(reading, shape, known.get("dtype", "uint8")), known


def load_exported(folder: Path | str) -> tuple[Config, Encoder, Standardize]:
    """The encoder, the settings that build it, and the statistics its images need, in the units of the images."""
    path = Path(folder).expanduser()
    images, known = read_preprocessing(path)
    config = Config(data=images.data, encoder=require_encoder(described_weights(str(path)), str(path)))
    with torch.random.fork_rng(devices=[]):  # initial weights, which are not kept, are drawn
        encoder = build_encoder(config.encoder, images.shape)
    encoder.net.load_state_dict(load_weights(str(path), encoder).tensors)
    mean, std = (torch.tensor(known[name]).reshape(-1, 1, 1) / known["scale"] for name in ("mean", "std"))
    return config, encoder.eval(), Standardize(mean, std)
