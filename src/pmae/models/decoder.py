"""The decoder: transformer blocks over a grid of tokens, and a linear map from each token to its patch of pixels."""

import math
from collections.abc import Callable

import torch
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.nn import functional

from pmae.config import DecoderConfig
from pmae.errors import UserError, require
from pmae.models.encoder import INITIALIZERS, Encoder, patch_sides, run_blocks, sine_cosine

SIZES = {
    "released": {"width": 512, "depth": 8, "heads": 16},
    "text": {"width": 192, "depth": 12, "heads": 12},
    "small": {"width": 192, "depth": 4, "heads": 12},
}


class Decoder(nn.Module):
    """Predicts patches (B, N, numbers of a patch) from the encoder's tokens: every one, or those that were hidden."""

    positions: Tensor
    kernels: str | None = None  # what `fast.accelerate` was told, if it was

    def __init__(self, config: DecoderConfig, encoder: Encoder, patch: int | None) -> None:
        super().__init__()
        if patch is None:
            raise UserError("encoder.patch_size must be set or derived from the data before a model is built")
        channels, height, width = encoder.shape
        dim, depth, heads = (getattr(config, key) or size for key, size in SIZES[config.name or "released"].items())
        require(dim % heads == 0, "decoder.width", f"a multiple of decoder.heads ({heads})", dim)
        rows, columns = patch_sides(patch, height)
        self.patch, self.grid, self.aspect = patch, (height // rows, width // columns), height / width
        self.embed = nn.Linear(encoder.width, dim)
        self.mask_token = nn.Parameter(torch.zeros(dim))
        self.blocks = nn.Sequential(*(Block(dim, heads, qkv_bias=True) for _ in range(depth)))
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, rows * columns * channels)
        self.register_buffer("positions", sine_cosine(dim, *self.grid, prefix=0), persistent=False)
        self.apply(INITIALIZERS[config.init])
        nn.init.normal_(self.mask_token, std=0.02)
        self.run_blocks: Callable[..., Tensor] = run_blocks

    def forward(self, prefix: Tensor, patches: Tensor, order: Tensor | None = None) -> Tensor:
        """Every patch from every token or, with `order` (B, N), the hidden ones from the visible ones.

        `order` has the positions of the visible patches and then of the hidden ones, which come out in that order.
        """
        patches, prefix = self.embed(patches), self.embed(prefix)
        positions = self.positions.to(patches.dtype)
        if order is None:
            tokens = torch.cat([prefix, self._onto_grid(patches) + positions], dim=1)
            return self.head(self.run_blocks(self.blocks, self.norm, tokens)[:, prefix.shape[1] :])
        # Positions tell the tokens apart, so they need not stand in the grid's order.
        gaps = self.mask_token.to(patches.dtype).expand(len(order), order.shape[1] - patches.shape[1], -1)
        patches = torch.cat([patches, gaps], dim=1) + torch.take_along_dim(positions, order[..., None], 1)
        tokens = torch.cat([prefix, patches], dim=1)
        return self.head(self.run_blocks(self.blocks, self.norm, tokens, gaps.shape[1]))

    def _onto_grid(self, patches: Tensor) -> Tensor:
        """A convolutional encoder has a coarser grid than the decoder: its tokens are spread over the finer one."""
        rows, columns = self.grid
        if patches.shape[1] == rows * columns:
            return patches
        # Networks round their sides up: of the grids with so many tokens it is the nearest to the image's proportions.
        count = patches.shape[1]
        divisors = [n for n in range(1, count + 1) if count % n == 0]
        coarse = min(divisors, key=lambda n: abs(math.log(n * n / (count * self.aspect))))
        image = patches.transpose(1, 2).unflatten(2, (coarse, -1))
        return functional.interpolate(image, self.grid, mode="bilinear").flatten(2).transpose(1, 2)
