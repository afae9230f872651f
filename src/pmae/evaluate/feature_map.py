"""What the map of a report shows: features of some test images, small pictures of them, and their neighbours."""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from pmae.data.augment import Standardize
from pmae.data.batches import Batches
from pmae.data.images import Splits
from pmae.evaluate.baselines import random_weights
from pmae.evaluate.features import extract
from pmae.evaluate.probes import nearest
from pmae.files import write_tensors
from pmae.models import Encoder, build_encoder
from pmae.runs import Run

MAPPED, SIDE, NEIGHBOURS = 1000, 32, 6  # images, the longer side of their pictures, neighbours of each


@torch.no_grad()
def save_feature_map(run: Run, encoder: Encoder, splits: Splits, standardize: Standardize, pooling: str) -> None:
    """Write features.safetensors: of test images, or training images where there are no others.

    `places` are their positions in the split, `neighbours` positions among themselves: of the encoder, and of the
    same one with random weights. Pictures stay in the data's units.
    """
    test = splits.test or splits.train
    places = np.linspace(0, len(test) - 1, min(MAPPED, len(test))).astype(np.int64)
    part = test.take(places)
    batches = Batches(part.images, standardize.mean.device)
    config = run.config
    untrained = random_weights(lambda: build_encoder(config.encoder, splits.train.shape), config.train.seed)
    made = {"": encoder, "random_": untrained.to(standardize.mean.device)}
    found = {name: extract(net, batches, standardize)[pooling] for name, net in made.items()}
    tensors = {"features": found[""], "places": torch.from_numpy(places), "labels": torch.as_tensor(part.labels)}
    tensors |= {f"{name}neighbours": _neighbours(features) for name, features in found.items()}
    tensors["pictures"] = _small(batches.take(torch.arange(len(places), device=standardize.mean.device)))
    write_tensors(run.path / "features.safetensors", {name: value.cpu() for name, value in tensors.items()})


def _neighbours(features: Tensor) -> Tensor:
    """(N, k) positions of the nearest others, nearest first."""
    found = nearest(features, features, min(NEIGHBOURS + 1, len(features)))
    own = found == torch.arange(len(features), device=found.device)[:, None]
    own[:, -1] |= ~own.any(1)  # a duplicate took its place
    return found[~own].view(len(features), -1).to(torch.int16)


def _small(images: Tensor) -> Tensor:
    """Pictures of at most 32 pixels a side, bytes where the data has bytes."""
    height, width = images.shape[-2:]
    scale = min(1.0, SIDE / max(height, width))
    size = max(1, round(height * scale)), max(1, round(width * scale))
    small = images if scale == 1 else F.interpolate(images.float(), size, mode="area")
    return small.round().to(torch.uint8) if images.dtype == torch.uint8 else small.float()
