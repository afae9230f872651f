"""Encoders: the paper's ViT-T or any timm image model, which `Encoder.net` is: exporting is copying it."""

import re
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, cast

import timm
import torch
from timm.layers.drop import DropPath
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pmae.config import VIT_TINY, EncoderConfig
from pmae.errors import UserError, require, unknown_name
from pmae.plugins import TABLES, find, is_registered, parse

UNDECAYED = ("cls_token", "reg_token", "pos_embed")
UNNORMED = nn.Identity()  # in the place of the last norm: the residual stream as it is
DROP_PATHS = ("drop_path", "drop_path1", "drop_path2")  # what timm calls the places at the end of a residual branch
VIT_MODULES = ("timm.models.vision_transformer", "timm.models.deit")


def embed_patches(patch_embed: nn.Module, x: Tensor) -> Tensor:
    """Images (B, C, H, W) to patch tokens (B, N, width) by timm's own layer."""
    return patch_embed(x)


def run_blocks(blocks: nn.Sequential, norm: nn.Module, x: Tensor, last: int | None = None) -> Tensor:
    """Tokens (B, N, width) through timm's own blocks and the last norm; out come all, or each sequence's `last`."""
    x = norm(blocks(x))
    return x if last is None else x[:, -last:]


def run_blocks_checkpointed(blocks: nn.Sequential, norm: nn.Module, x: Tensor, last: int | None = None) -> Tensor:
    """The same with activation checkpointing (Chen et al. 2016): each block is computed again backward."""
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return norm(x) if last is None else norm(x)[:, -last:]


class Network(nn.Module):
    """The type of `Encoder.net`, which itself is of timm's own class: what all of timm's image models have."""

    num_features: int
    forward_features: Callable[[Tensor], Tensor]
    """Images to tokens (B, N, width) or a feature map."""


class Encoder(nn.Module):
    """A timm model seen as a map from images to prefix tokens (such as [CLS]) and patch tokens.

    `embed_patches` and `run_blocks` are how a ViT's two parts are run; `fast.accelerate` puts faster ones there.
    """

    kernels: str | None = None  # what `fast.accelerate` was told, if it was

    def __init__(self, net: nn.Module, shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.net = cast(Network, net)
        self.shape = shape
        self.width = self.net.num_features
        self.is_vit = isinstance(net, VisionTransformer)
        self.embed_patches: Callable[[nn.Module, Tensor], Tensor] = embed_patches
        self.run_blocks: Callable[..., Tensor] = run_blocks

    def forward(self, x: Tensor, keep: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Prefix tokens (B, P, width) and patch tokens (B, N, width); `keep` (B, V) drops all other patches (MAE).

        `keep` may have several rows an image: (kB, V) gives the tokens of all images k times over, each embedded once.
        """
        net: Any = self.net
        if not self.is_vit:
            # Convolutions are a third faster where an image's channels lie side by side.
            return split_tokens(net, net.forward_features(x.contiguous(memory_format=torch.channels_last)))
        prefix, tokens = net.num_prefix_tokens, self._embed(x)
        if keep is not None:
            tokens = tokens if len(keep) == len(tokens) else tokens.repeat(len(keep) // len(tokens), 1, 1)
            patches = tokens[:, prefix:].gather(1, keep[..., None].expand(-1, -1, tokens.shape[2]))
            tokens = torch.cat([tokens[:, :prefix], patches], dim=1)
        tokens = self.run_blocks(net.blocks, net.norm, net.norm_pre(tokens))
        return tokens[:, :prefix], tokens[:, prefix:]

    @property
    def depth(self) -> int:
        """How many blocks a ViT has; a network of another kind counts as one."""
        net: Any = self.net
        return len(net.blocks) if self.is_vit else 1

    def _embed(self, x: Tensor) -> Tensor:
        net: Any = self.net
        return net._pos_embed(self.embed_patches(net.patch_embed, x))

    def layers(self, x: Tensor, count: int) -> tuple[Tensor, list[Tensor]]:
        """Patch tokens (B, N, width), and those after each of the last `count` blocks, before the last norm.

        A ViT with fewer blocks has as many layers, and a network of another kind one, its end.
        """
        net: Any = self.net
        if not self.is_vit or not count:
            tokens = self(x)[1]
            return tokens, [tokens] * (count > 0)
        stream, layers = net.norm_pre(self._embed(x)), []
        ends = range(max(1, len(net.blocks) - count + 1), len(net.blocks) + 1)
        for first, end in pairwise([0, *ends]):
            stream = self.run_blocks(net.blocks[first:end], UNNORMED, stream)
            layers.append(stream[:, net.num_prefix_tokens :])
        return net.norm(layers[-1]), layers

    def features(self, x: Tensor) -> dict[str, Tensor]:
        """The representations of unmasked images: "mean" of the patch tokens, and "cls" where there is such a token."""
        return pool(*self(x))


def split_tokens(net: nn.Module, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """What a timm model's `forward_features` returns as prefix tokens (B, P, width) and patch tokens (B, N, width)."""
    if tokens.ndim == 4:
        channels_last = getattr(net, "output_fmt", "NCHW") == "NHWC"
        tokens = tokens.flatten(1, 2) if channels_last else tokens.flatten(2).transpose(1, 2)
        return tokens[:, :0], tokens
    prefix = int(getattr(net, "num_prefix_tokens", 0))
    return tokens[:, :prefix], tokens[:, prefix:]


def pool(prefix: Tensor, patches: Tensor) -> dict[str, Tensor]:
    """The mean of the patch tokens and, where there is one, the [CLS] token, by name; each (B, width)."""
    pooled = {"mean": patches.mean(1)}
    return {"cls": prefix[:, 0], **pooled} if prefix.shape[1] else pooled


def build_encoder(config: EncoderConfig, shape: tuple[int, int, int]) -> Encoder:
    """An untrained encoder for images (C, H, W); `config.patch_size` must be resolved for a ViT."""
    require_network(config.name)
    if _is_ours(config.name):
        return _tried(config.name, shape, lambda: find("encoder", config.name, "encoder.name")(shape))
    name, options = timm_recipe(config, shape)
    if config.name == "vit_tiny":
        # Without memory nothing is drawn: timm would take four times as long for it as for real weights.
        drawn = torch.get_default_device().type != "meta"
        net = VisionTransformer(num_classes=0, weight_init="" if drawn else "skip", **options)
        net.apply(INITIALIZERS[config.init])
        if config.init == "normal":
            nn.init.normal_(net.cls_token, std=0.02)  # type: ignore[arg-type]
        net.pos_embed = nn.Parameter(sine_cosine(options["embed_dim"], *net.patch_embed.grid_size), requires_grad=False)
        return Encoder(net, shape)
    return _tried(name, shape, lambda: timm.create_model(name, num_classes=0, pretrained=False, **options))


def require_network(name: str) -> None:
    """Refuse a name of no network, for which neither images nor weights are needed."""
    if name != "vit_tiny" and not _is_ours(name) and not timm.is_model(name):
        raise unknown_name("encoder.name", name, ["vit_tiny", *TABLES["encoder"], *timm.list_models()])


def _is_ours(name: str) -> bool:
    """Whether an encoder of somebody's own is registered under this name."""
    return name != "vit_tiny" and is_registered("encoder", parse(name, "encoder.name")[0])


def _tried(name: str, shape: tuple[int, int, int], make: Callable[[], nn.Module]) -> Encoder:
    """An encoder that takes such images: some networks shrink small ones to nothing, and only running them tells."""
    try:
        encoder = Encoder(make(), shape)
        with torch.no_grad():
            prefix, tokens = encoder.eval()(torch.zeros(1, *shape))
        found = (*prefix.shape[::2], *tokens.shape[::2])
        width = encoder.width
        require(found == (1, width) * 2, "encoder.net", f"one of {width} numbers a token (num_features)", found)
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"encoder.name {name!r} cannot take images of shape {shape}: {error}") from error
    return encoder.train()


def is_vit_name(name: str) -> bool:
    """Whether this name builds a plain ViT, the only kind of encoder that can drop tokens."""
    return name == "vit_tiny" or (timm.is_model(name) and timm.model_entrypoint(name).__module__ in VIT_MODULES)


def require_vit(encoder: Encoder, name: str) -> None:
    """Refuse an encoder that cannot drop tokens."""
    if not encoder.is_vit:
        said = f"must have a ViT encoder, which can see only the visible patches; encoder.name is {name!r}"
        raise UserError(f"space.name 'pixels' (MAE) {said}; use a vit_* name, or space.name 'pca', which drops none")


def timm_recipe(config: EncoderConfig, shape: tuple[int, int, int]) -> tuple[str, dict[str, Any]]:
    """The registered name and the arguments with which timm builds the network of an encoder."""
    channels, height, width = shape
    options: dict[str, Any] = {"in_chans": channels}
    if is_vit_name(config.name):
        options |= {"img_size": (height, width), "patch_size": _patch(config, shape)}
    elif getattr(timm.get_pretrained_cfg(config.name), "fixed_input_size", False):
        options["img_size"] = (height, width)
    if config.name != "vit_tiny":
        return config.name, options
    dim, depth, heads = (getattr(config, key) or default for key, default in VIT_TINY.items())
    require(dim % heads == 0, "encoder.width", f"a multiple of encoder.heads ({heads})", dim)
    return "vit_tiny_patch16_224", options | {"embed_dim": dim, "depth": depth, "num_heads": heads}


def _patch(config: EncoderConfig, shape: tuple[int, int, int]) -> int | tuple[int, int]:
    _, height, width = shape
    patch = config.patch_size
    if patch is None:
        raise UserError("encoder.patch_size must be set or derived from the data before the encoder is built")
    rows, columns = patch_sides(patch, height)
    sides = f"the image's sides ({height}x{width})"
    require(rows <= height and columns <= width, "encoder.patch_size", f"at most {sides}", patch)
    if height == 1:
        sides = f"the signal's length ({width}: {', '.join(str(p) for p in range(1, width) if width % p == 0)})"
    require(height % rows == 0 and width % columns == 0, "encoder.patch_size", f"a divisor of {sides}", patch)
    return patch if rows == columns else (rows, columns)


def _initialize(module: nn.Module, draw: Callable[[Tensor], object]) -> None:
    if isinstance(module, nn.Linear | nn.Conv2d):
        draw(module.weight.view(len(module.weight), -1))
        if module.bias is not None:
            nn.init.zeros_(module.bias)


INITIALIZERS = {
    "xavier": partial(_initialize, draw=nn.init.xavier_uniform_),
    "normal": partial(_initialize, draw=partial(nn.init.normal_, std=0.02)),
}
"""As MAE starts, and as the paper's released code does."""


def patch_sides(patch: int, height: int) -> tuple[int, int]:
    """Rows and columns of a patch: a square, but one row high where the image is one row (a signal or a vector)."""
    return (1 if height == 1 else patch), patch


def patchify(x: Tensor, patch: int) -> Tensor:
    """(B, C, H, W) to (B, N, numbers of a patch), channels last within a patch."""
    batch, channels, height, width = x.shape
    rows, columns = patch_sides(patch, height)
    x = x.reshape(batch, channels, height // rows, rows, width // columns, columns)
    return x.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def unpatchify(patches: Tensor, patch: int, shape: tuple[int, int, int]) -> Tensor:
    channels, height, width = shape
    rows, columns = patch_sides(patch, height)
    x = patches.unflatten(1, (height // rows, width // columns)).unflatten(3, (rows, columns, channels))
    return x.permute(0, 5, 1, 3, 2, 4).reshape(-1, channels, height, width)


def sine_cosine(width: int, rows: int, columns: int, prefix: int = 1) -> Tensor:
    """Fixed positions (1, prefix + rows * columns, width): half of the width encodes the column, half the row.

    Sines and cosines have wavelengths from 2 pi to 10,000 times that; prefix tokens get 0.
    """
    require(width % 4 == 0, "width", "a multiple of 4 for sine-cosine positions", width)
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    frequency = 10000.0 ** (-torch.arange(width // 4, dtype=torch.float64) / (width / 4))
    angles = [at.flatten().double()[:, None] * frequency for at in (column, row)]
    waves = [wave for angle in angles for wave in (angle.sin(), angle.cos())]
    return torch.cat([torch.zeros(prefix, width), torch.cat(waves, dim=1).float()])[None]


def layer_depths(names: list[str]) -> dict[str, int]:
    """How deep each parameter sits: embeddings 0, block i at i + 1, what follows them last; 0 for all but a ViT."""
    blocks = {name: re.search(r"(?:^|\.)blocks\.(\d+)\.", name) for name in names}
    last = max((int(found.group(1)) + 2 for found in blocks.values() if found), default=0)
    first = re.compile(r"patch_embed|norm_pre|" + "|".join(UNDECAYED))
    return {
        name: int(found.group(1)) + 1 if found else 0 if first.search(name) else last for name, found in blocks.items()
    }


def set_drop_path(encoder: nn.Module, rate: float) -> None:
    """Stochastic depth (Huang et al. 2016), up to `rate` at the last block, where timm has places for it."""
    places = {block: [name for name, _ in block.named_children() if name in DROP_PATHS] for block in encoder.modules()}
    blocks = [block for block, names in places.items() if rate and names]
    for position, block in enumerate(blocks):
        for name in places[block]:
            setattr(block, name, DropPath(rate * position / max(1, len(blocks) - 1)))
