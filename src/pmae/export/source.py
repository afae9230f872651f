"""What is exported: a run's encoder at one checkpoint, the statistics of its images, and images to compare on."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pmae.config import Config
from pmae.data.augment import Standardize
from pmae.data.images import as_tensor
from pmae.errors import UserError
from pmae.models import Encoder
from pmae.runs import Run, read_state
from pmae.train.checkpoint import load_encoder

COMPARED = 8


@dataclass(frozen=True)
class Source:
    """An encoder to export, on the CPU in float32, ready to be called."""

    run: Run
    epoch: float
    config: Config
    encoder: Encoder
    standardize: Standardize
    dtype: np.dtype[Any]
    """The type of the images that were trained on."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        return self.encoder.shape

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
            raise UserError(
                f"{what} must have one mean and standard deviation per channel: it has no place for those of every "
                "pixel (the run's data.standardize is 'pixel'), nor has a convolution; choices: onnx, torch"
            )
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
            "statistics": "channel" if known else "pixel, inside the graph",
            **({"mean": known[0], "std": known[1]} if known else {}),
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
        """What the encoder itself says of these images."""
        with torch.inference_mode():
            return self.encoder.features(self.standardize(as_tensor(images)))


def load_source(run: Run, epoch: int | None) -> Source:
    """The encoder of a run at its last checkpoint or that of an epoch."""
    config, encoder, standardize = load_encoder(run, epoch)
    state = read_state(run.checkpoint(epoch))
    return Source(run, state["epoch"], config, encoder, standardize, np.dtype(run.environment["data"]["dtype"]))
