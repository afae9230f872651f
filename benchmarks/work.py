"""What is timed: a training step of one method at one size, with the paper's encoder and the released decoder."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from timm.models.vision_transformer import VisionTransformer

from pmae.config import Config, replace
from pmae.derive import resolve
from pmae.errors import require, unknown_name
from pmae.paper.recipes import recipe
from pmae.spaces import Space, build_space

Precision = Literal["auto", "float32", "bfloat16"]
METHODS = {"pmae": "paper", "mae": "mae"}
"""The recipe that each method's settings start from."""
CHANNELS = 3
RATE = 3e-4
MEAN, DEVIATION = 127.5, 73.6
"""Of uniform bytes, which the images are."""
SHARES = {"pmae": 0.2, "mae": 0.75}
"""What each method hides."""
WHOLE, LEADING = 64, 3072
"""Up to this side PMAE has all components of an image; beyond, so many leading ones and the rest as one, since all of
128x128 would be 10 GB that take minutes to fit."""
DISTINCT = 4096
"""Images that differ; more are the same again, for making noise takes longer than timing it."""


@dataclass(frozen=True)
class Sizes:
    """Of the network, the same for all: the paper's ViT-T with 12 heads and the released decoder."""

    width: int = 192
    depth: int = 12
    heads: int = 12
    decoder_width: int = 512
    decoder_depth: int = 8
    decoder_heads: int = 16


NETWORKS = {"tiny": Sizes(), "small": Sizes(384, 12, 6), "base": Sizes(768, 12, 12)}
"""ViT-T as in the paper, ViT-S and ViT-B, with the released decoder."""
PATCHES = {"tiny": 8, "small": 16, "base": 16}


@dataclass(frozen=True)
class Work:
    """A step to time: random crops and flips of uint8 noise, forward, backward and update."""

    method: str
    side: int
    batch: int
    device: str = "cpu"
    patch: int = 8
    masked: float | None = None
    """Share of the variance or of the patches to hide; the method's own if not given."""
    images: int = 0
    """How many images there are; eight batches if not given."""
    network: Sizes = field(default_factory=Sizes)
    space: str = "pca"
    """Of PMAE."""
    precision: Precision = "auto"
    """Arithmetic of the networks, ours and the peers'; bfloat16 on CUDA and float32 on a CPU if not given."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise unknown_name("methods", self.method, METHODS)
        require(self.patch >= 1, "patch", "at least 1", self.patch)
        require(self.batch >= 2, "batch", "at least 2", self.batch)
        fits = self.side >= 2 * self.patch and self.side % self.patch == 0
        require(fits, "sizes", f"multiples of the patch size ({self.patch}), two patches or more", self.side)
        object.__setattr__(self, "images", self.images or 8 * self.batch)
        object.__setattr__(self, "masked", self.masked or SHARES[self.method])
        usual: Precision = "bfloat16" if self.device.startswith("cuda") else "float32"
        object.__setattr__(self, "precision", usual if self.precision == "auto" else self.precision)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of an image."""
        return CHANNELS, self.side, self.side

    @property
    def config(self) -> Config:
        """The whole configuration, with one mask an image and nothing left to derive."""
        pmae = self.method == "pmae"
        kind = "masked_variance" if pmae else "masked_patches"
        changed = replace(
            recipe(METHODS[self.method]),
            masking__per="image",
            objective__scale="constant",
            encoder__patch_size=self.patch,
            **{f"encoder__{key}": getattr(self.network, key) for key in ("width", "depth", "heads")},
            **{f"decoder__{key}": getattr(self.network, f"decoder_{key}") for key in ("width", "depth", "heads")},
            train__batch_size=self.batch,
            train__device=self.device,
            train__precision=self.precision,
            space__components=LEADING if pmae and self.space == "pca" and self.side > WHOLE else None,
            **{f"masking__{kind}": self.masked},
            **({"space__name": self.space} if pmae else {}),
        )
        return resolve(changed, self.images, self.shape)[0]

    def noise(self) -> np.ndarray:
        """The images, uint8: what they show costs nothing, so nothing is read from a disk."""
        distinct = (min(self.images, DISTINCT), *self.shape)
        return np.resize(np.random.default_rng(0).integers(0, 256, distinct, np.uint8), (self.images, *self.shape))


def vision_transformer(work: Work) -> VisionTransformer:
    """The encoder as plain timm, for those peers that take one."""
    sizes = work.network
    return VisionTransformer(
        img_size=work.side,
        patch_size=work.patch,
        num_classes=0,
        embed_dim=sizes.width,
        depth=sizes.depth,
        num_heads=sizes.heads,
    )


def random_space(config: Config, shape: tuple[int, int, int], device: torch.device) -> Space:
    """The configured space with random directions, which cost a step what fitted ones do, without minutes of fitting.

    Directions of variance 1 / D keep the norm of an image, so losses stay finite; variances fall like a spectrum.
    """
    space = build_space(config.space, shape).to(device)
    for name, tensor in space.state_dict().items():
        if name == "variance":
            tensor.copy_(1 / torch.arange(1, len(tensor) + 1, device=device))
        elif tensor.ndim == 2:
            tensor.normal_(std=tensor.shape[1] ** -0.5)
    return space
