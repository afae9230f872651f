"""What is exported: the encoder of a run or of a classifier, with its head and the statistics of its images."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pmae.classify.model import Card, load_classifier
from pmae.config import Config, CropMode, DataConfig, EncoderConfig, Interpolation, Layout
from pmae.data.augment import Standardize
from pmae.data.images import as_tensor
from pmae.errors import UserError, require
from pmae.models import Encoder
from pmae.runs import Run, is_classifier, read_state
from pmae.train.checkpoint import load_encoder

COMPARED = 8


class Head(NamedTuple):
    """What makes an encoder a classifier: a linear layer on a pooling, and what its outputs mean."""

    weight: Tensor
    bias: Tensor
    pooling: str
    classes: tuple[str, ...]
    multi_label: bool

    def outputs(self, logits: Tensor) -> dict[str, Tensor]:
        """Logits (B, C) by name, and the probabilities that they stand for."""
        return {"logits": logits, "probabilities": logits.sigmoid() if self.multi_label else logits.softmax(-1)}


@dataclass(frozen=True, kw_only=True)
class Source:
    """An encoder to export, on the CPU in float32, ready to be called; with a head it is a classifier."""

    encoder: Encoder
    network: EncoderConfig
    standardize: Standardize
    dtype: np.dtype[Any]
    """The type of the images that were trained on."""
    head: Head | None = None
    crop_mode: CropMode = "squash"
    """How a picture of another size becomes one of theirs: of its centre, or of all of it."""
    crop_pct: float = 1.0
    interpolation: Interpolation = "bicubic"
    layout: Layout = "auto"
    """The axes of arrays, as the run was told: signals are not known by their shape."""

    @property
    def stem(self) -> str:
        return "classifier" if self.head else "encoder"

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.encoder.shape

    @property
    def resized(self) -> tuple[int, int]:
        """Height and width, or twice the short side, that a picture is resized to before its centre is kept."""
        return math.floor(self.shape[1] / self.crop_pct), math.floor(self.shape[2] / self.crop_pct)

    @property
    def scale(self) -> float:
        """What other libraries multiply pixels with first: bytes go to 0 to 1, everything else stays as it is."""
        return 1 / 255 if self.dtype == np.uint8 else 1.0

    @property
    def per_channel(self) -> bool:
        """Whether there is one mean and standard deviation per channel, and not one per pixel."""
        return self.standardize.mean.shape[-2:] == (1, 1)

    def statistics(self, what: str) -> tuple[list[float], list[float]]:
        """Mean and standard deviation per channel of scaled images, for formats that know no others."""
        if not self.per_channel:
            rule = f"{what} must have one mean and standard deviation per channel"
            why = "it has no place for those of every pixel (the run's data.standardize is 'pixel')"
            raise UserError(f"{rule}: {why}, nor has a convolution; choices: onnx, torch")
        flat = [part.flatten().double() * self.scale for part in (self.standardize.mean, self.standardize.std)]
        return flat[0].tolist(), flat[1].tolist()

    def preprocessing(self) -> dict[str, Any]:
        """What an image must be, and what is done to it before the encoder, as JSON."""
        known = self.statistics("preprocessing") if self.per_channel else None
        return {
            "channels": self.shape[0],
            "height": self.shape[1],
            "width": self.shape[2],
            "dtype": self.dtype.name,
            "scale": self.scale,
            "crop_mode": self.crop_mode,
            "crop_pct": self.crop_pct,
            "interpolation": self.interpolation,
            "layout": self.layout,
            "statistics": "channel" if known else "pixel, inside the graph",
            **({"mean": known[0], "std": known[1]} if known else {}),
            **({"classes": list(self.head.classes), "multi_label": self.head.multi_label} if self.head else {}),
        }

    def images(self) -> np.ndarray:
        """A few images of noise with the type and the statistics of the data."""
        noise = torch.randn(COMPARED, *self.shape, generator=torch.Generator().manual_seed(0))
        pixels = self.standardize.invert(noise).numpy()
        if self.dtype.kind == "f":
            return pixels.astype(self.dtype)
        limits = np.iinfo(self.dtype)
        return np.clip(np.rint(pixels), limits.min, limits.max).astype(self.dtype)

    def features(self, images: np.ndarray) -> dict[str, Tensor]:
        """What the encoder itself says of these images, or the classifier."""
        with torch.inference_mode():
            return self.outputs(self.standardize(as_tensor(images)))

    def outputs(self, x: Tensor) -> dict[str, Tensor]:
        """Of standardized images: features by pooling, or logits and probabilities."""
        found: dict[str, Tensor] = self.encoder.features(x)
        if self.head is None:
            return found
        return self.head.outputs(found[self.head.pooling] @ self.head.weight.T + self.head.bias)


@dataclass(frozen=True, kw_only=True)
class RunSource(Source):
    """The encoder of a run at one checkpoint."""

    run: Run
    epoch: float
    config: Config


def load_source(path: Run | Path | str, epoch: int | None) -> Source:
    """The encoder of a run at its last checkpoint or that of an epoch, or a classifier."""
    if not isinstance(path, Run) and is_classifier(path):
        require(epoch is None, "epoch", "left out for a classifier, which has one state", epoch)
        own = load_classifier(path, "cpu")
        head = Head(*own.head, own.card.pooling, own.classes, own.card.multi_label)
        network, dtype = EncoderConfig(**own.card.encoder), np.dtype(own.card.dtype)
        parts: dict[str, Any] = {"encoder": own.encoder, "standardize": own.embedder.standardize}
        return Source(**parts, network=network, dtype=dtype, head=head, **_reading(own.card, own.card.shape))
    run = Run(path)
    require(run.method != "weights", "run", "one that was trained here, not weights that were given", str(run.path))
    config, encoder, standardize = load_encoder(run, epoch)
    state, dtype = read_state(run.checkpoint(epoch)), np.dtype(run.environment["data"]["dtype"])
    parts = {"encoder": encoder, "standardize": standardize, "network": config.encoder, "dtype": dtype}
    reading = _reading(config.data, run.shape)
    return RunSource(**parts, run=run, epoch=state["epoch"], config=config, **reading)


def _reading(read: DataConfig | Card, shape: tuple[int, int, int]) -> dict[str, Any]:
    """How arrays, and files of another size, become such images: as for `pmae embed`; files become squares alone."""
    names = ["layout", *(("crop_mode", "crop_pct", "interpolation") if shape[1] == shape[2] else ())]
    return {name: getattr(read, name) for name in names}
