"""The decoder: transformer blocks over a grid of tokens, and a linear map from each token to its patch of pixels."""

import torch
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.nn import functional

from pmae.config import DecoderConfig
from pmae.errors import require
from pmae.models.encoder import Encoder, xavier
from pmae.models.positions import sine_cosine
from pmae.models.short_attention import install

SIZES = {
    "released": {"width": 512, "depth": 8, "heads": 16},
    "text": {"width": 192, "depth": 12, "heads": 12},
    "small": {"width": 192, "depth": 4, "heads": 12},
}


class Decoder(nn.Module):
    """Predicts every patch (B, N, patch * patch * channels) from the encoder's tokens."""

    positions: Tensor

    def __init__(self, config: DecoderConfig, encoder: Encoder, patch: int) -> None:
        super().__init__()
        channels, height, width = encoder.shape
        dim, depth, heads = (getattr(config, key) or size for key, size in SIZES[config.name].items())
        require(dim % heads == 0, "decoder.width", f"a multiple of decoder.heads ({heads})", dim)
        self.grid = (height // patch, width // patch)
        self.embed = nn.Linear(encoder.width, dim)
        self.mask_token = nn.Parameter(torch.zeros(dim))
        self.blocks = nn.Sequential(*(Block(dim, heads, qkv_bias=True) for _ in range(depth)))
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, patch * patch * channels)
        self.register_buffer("positions", sine_cosine(dim, *self.grid, prefix=0), persistent=False)
        self.apply(xavier)
        install(self)
        nn.init.normal_(self.mask_token, std=0.02)

    def forward(self, prefix: Tensor, patches: Tensor, restore: Tensor | None = None) -> Tensor:
        """Tokens in, patches out; with `restore` (B, N) mask tokens stand in for the patches that were dropped."""
        patches, prefix = self.embed(patches), self.embed(prefix)
        patches = self._onto_grid(patches) if restore is None else self._fill_gaps(patches, restore)
        tokens = torch.cat([prefix, patches + self.positions.to(patches.dtype)], dim=1)
        tokens = self.norm(self.blocks(tokens))
        return self.head(tokens[:, prefix.shape[1] :])

    def _fill_gaps(self, visible: Tensor, restore: Tensor) -> Tensor:
        batch, count = restore.shape
        gaps = self.mask_token.to(visible.dtype).expand(batch, count - visible.shape[1], -1)
        tokens = torch.cat([visible, gaps], dim=1)
        return tokens.gather(1, restore[..., None].expand(-1, -1, tokens.shape[2]))

    def _onto_grid(self, patches: Tensor) -> Tensor:
        """A convolutional encoder has a coarser grid than the decoder: its tokens are spread over the finer one."""
        rows, columns = self.grid
        if patches.shape[1] == rows * columns:
            return patches
        coarse = max(1, round((patches.shape[1] * rows / columns) ** 0.5))
        image = patches.transpose(1, 2).unflatten(2, (coarse, -1))
        return functional.interpolate(image, self.grid, mode="bilinear").flatten(2).transpose(1, 2)


def patchify(x: Tensor, patch: int) -> Tensor:
    """(B, C, H, W) to (B, N, patch * patch * C), channels last within a patch."""
    batch, channels, height, width = x.shape
    x = x.reshape(batch, channels, height // patch, patch, width // patch, patch)
    return x.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def unpatchify(patches: Tensor, patch: int, shape: tuple[int, int, int]) -> Tensor:
    """The inverse of `patchify`."""
    channels, height, width = shape
    x = patches.unflatten(1, (height // patch, width // patch)).unflatten(3, (patch, patch, channels))
    return x.permute(0, 5, 1, 3, 2, 4).reshape(-1, channels, height, width)
