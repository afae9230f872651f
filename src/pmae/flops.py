"""Floating-point operations of a training step in closed form: what the work is, however it is carried out."""

import functools
import math
from typing import Any, NamedTuple

import timm
import torch

from pmae.config import VIT_TINY, Config, EncoderConfig
from pmae.contrastive import HIDDEN, OUT
from pmae.errors import UserError
from pmae.masking import nominal_ratio, visible_patches
from pmae.models.decoder import SIZES
from pmae.models.encoder import is_vit_name, patch_sides, timm_recipe
from pmae.plugins import parse
from pmae.spaces.fixed import FEW_CHANNELS
from pmae.spaces.pca import patch_side

COUNTED = ("pca", "patch_pca", "cosine", "pixels")  # the spaces that are counted


def flops_per_image(config: Config, shape: tuple[int, int, int], whole: bool = False) -> int:
    """Operations of one image's step, forward and backward: those of its GEMMs, 2mnk for (m, k) times (k, n).

    With N patches of P numbers, an encoder W wide and L deep over T tokens ([CLS] and the visible patches), a decoder
    w wide and l deep over N + 1, and D pixels:

        patches to tokens  2 x 2NPW                    (the image needs no gradient, so two GEMMs instead of three)
        encoder            3 x L (24 T W^2 + 4 T^2 W)  (24: qkv 6, projection 2, MLP 16; then scores and their sum)
        to the decoder     3 x 2TWw
        decoder            3 x l (24 (N+1) w^2 + 4 (N+1)^2 w)
        tokens to pixels   3 x 2NwP
        predicted in vain  3 x (16 T w^2 + 2(T-1)wP)   (the last MLP and the pixels of [CLS] and the visible patches)
        components         4 x 2D^2                    (project, reconstruct; project the prediction, and its gradient;
                                                        with the components of patches 4 x 2DP, with cosines
                                                        4 x 2D(rows + columns))

    What would be predicted in vain is MAE's, and taken off unless `whole`: the peers do that work, we do not. The fused
    blocks also leave out the last projection of those tokens, 3 x 2Tw^2, which is not taken off. The last line is
    PMAE's, whose T is N + 1; with pixels as target it is half of that. With a contrastive loss there are two views
    of everything, with its heads or the forward pass of its teacher; the batch's similarities are left out, as they
    grow with it. Crops, norms, activations, masks and the optimizer are not counted: they are costs, not work.
    """
    sizes = _sizes(config, shape)
    one = _reconstruction(config, sizes, whole) + projection_flops(config, shape)
    return 2 * (one + _contrastive(config, sizes)) if config.objective.contrastive_weight else one


class _Sizes(NamedTuple):
    """The numbers that the closed form is made of."""

    grid: tuple[int, int]
    patch_numbers: int
    tokens: int
    width: int
    depth: int
    decoder_width: int
    decoder_depth: int

    @property
    def patches(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def embedding(self) -> int:
        return 2 * self.patches * self.patch_numbers * self.width


def _sizes(config: Config, shape: tuple[int, int, int]) -> _Sizes:
    (channels, height, width), patch = shape, config.encoder.patch_size
    if patch is None or not is_vit_name(config.encoder.name) or config.space.name not in COUNTED:
        counted = ", ".join(COUNTED)
        raise UserError(f"operations are counted for a resolved configuration with a plain ViT and space {counted}")
    rows, columns = patch_sides(patch, height)
    grid, named = (height // rows, width // columns), SIZES[config.decoder.name or "released"]
    tokens = 1 + grid[0] * grid[1]
    if config.method == "mae":
        tokens = 1 + visible_patches(grid[0] * grid[1], nominal_ratio(config.masking))
    decoder = (getattr(config.decoder, key) or named[key] for key in ("width", "depth"))
    return _Sizes(grid, rows * columns * channels, tokens, *_encoder_sides(config.encoder, shape), *decoder)


def _reconstruction(config: Config, n: _Sizes, whole: bool) -> int:
    """Encoder and decoder, of one view."""
    encoder = 2 * n.embedding + 3 * n.depth * _block(n.tokens, n.width)
    if not config.objective.reconstruction_weight:  # nothing is decoded
        return encoder
    linear = 2 * n.tokens * n.width * n.decoder_width + 2 * n.patches * n.decoder_width * n.patch_numbers
    blocks = n.decoder_depth * _block(n.patches + 1, n.decoder_width)
    if config.method == "mae" and not whole:
        linear -= 2 * (n.tokens - 1) * n.decoder_width * n.patch_numbers
        blocks -= 16 * n.tokens * n.decoder_width**2
    return encoder + 3 * (linear + blocks)


def _contrastive(config: Config, n: _Sizes) -> int:
    """What a contrastive loss adds to each of two views."""
    if config.objective.contrastive == "nt_xent":
        window = max(1, n.grid[0] // 2) * max(1, n.grid[1] // 2)
        local, head = config.objective.local_views or 0, 3 * 2 * (n.width * HIDDEN + HIDDEN * OUT)
        windows = local * 3 * n.depth * _block(window + 1, n.width) + bool(local) * 2 * n.embedding
        return windows + (1 + local) * head
    name, _ = parse(config.objective.contrastive, "objective.contrastive")
    if name != "data2vec":
        raise UserError(f"operations are counted for objective.contrastive nt_xent and data2vec, got {name!r}")
    teacher = n.embedding + n.depth * _block(n.patches + 1, n.width)
    return teacher + 3 * 2 * 2 * n.patches * n.width**2


@functools.cache  # one of timm takes a tenth of a second to build, and tables count the same one for many runs
def _encoder_sides(encoder: EncoderConfig, shape: tuple[int, int, int]) -> tuple[int, int]:
    """Width and depth; of timm's ViTs from one that takes no memory, if its blocks are those of the closed form."""
    if encoder.name == "vit_tiny":
        return encoder.width or VIT_TINY["width"], encoder.depth or VIT_TINY["depth"]
    name, options = timm_recipe(encoder, shape)
    with torch.device("meta"):
        net: Any = timm.create_model(name, num_classes=0, pretrained=False, **options)
    width, depth = net.embed_dim, len(net.blocks)
    weights = sum(weight.numel() for weight in net.blocks.parameters() if weight.ndim == 2)
    if net.num_prefix_tokens != 1 or weights != depth * 12 * width**2:
        raise UserError(f"operations are counted for a ViT with [CLS] and MLPs four times as wide, got {name!r}")
    return width, depth


def _block(tokens: int, width: int) -> int:
    return 24 * tokens * width**2 + 4 * tokens**2 * width


def projection_flops(config: Config, shape: tuple[int, int, int]) -> int:
    """The maps between pixels and components, if any hide; with a kept rest, the visible image takes one more."""
    if config.method == "mae" or not config.masking.enabled:
        return 0
    pixels, kept = math.prod(shape), config.space.components
    if config.space.name == "patch_pca":
        rows, columns = patch_sides(patch_side(shape[1], shape[2], config.space.patch), shape[1])
        kept = shape[0] * rows * columns
    if config.space.name == "cosine":
        # Down, across, and the channels turned, which takes a GEMM where they are many.
        kept = shape[1] + shape[2] + (shape[0] if shape[0] > FEW_CHANNELS else 0)
    both = config.objective.target == "components" and config.objective.reconstruction_weight > 0
    gemms = (4 if both else 2) + (config.space.components is not None)
    return gemms * 2 * pixels * (kept or pixels)
