"""Losses beside masked prediction: NT-Xent between two crops of an image (SimCLR), and tokens of a teacher.

The student sees masked crops, the teacher whole ones. A momentum encoder, as in data2vec, moves in the forward pass of
a training step, so that plain, captured, resumed and distributed runs have the same one; it is saved with the decoder
and thrown away with it. A finished encoder, as in distillation, stays as it is, and is read from where it lies.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from pmae.config import ObjectiveConfig
from pmae.errors import UserError, require
from pmae.models.described import described_weights, require_encoder
from pmae.models.encoder import Encoder, build_encoder
from pmae.models.maps import to_maps, token_maps
from pmae.models.weights import load_weights, require_weights
from pmae.plugins import find, register
from pmae.validation import Count, UpToOne

HIDDEN, OUT = 1024, 128  # widths of the projection head
LAYERS = 4  # how many of a ViT's last blocks make a token's target

Gather = Callable[[Tensor], Tensor]
"""From the features (2b, width) of this process to those of all (2B, width)."""


class ProjectionHead(nn.Module):
    """Features (2B, width) to points (2B, 128) on the unit sphere: two layers, standardized over the batch between."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, HIDDEN), nn.Linear(HIDDEN, OUT)
        for layer in (self.first, self.second):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.first(features).float()
        hidden = (hidden - hidden.mean(0)) / (hidden.var(0, correction=0) + 1e-5).sqrt()
        return functional.normalize(self.second(functional.gelu(hidden)).float(), dim=1)


def nt_xent(z: Tensor, temperature: float) -> Tensor:
    """NT-Xent (SimCLR, Chen et al. 2020) of points (2B, D) on the unit sphere; rows i and i + B are of one image."""
    count, device = len(z), z.device
    similarity = z @ z.t() / temperature
    itself = torch.eye(count, dtype=torch.bool, device=device)
    partner = torch.arange(count, device=device).roll(count // 2)
    return functional.cross_entropy(similarity.masked_fill(itself, float("-inf")), partner)


def info_nce(queries: Tensor, keys: Tensor, temperature: float) -> Tensor:
    """InfoNCE (van den Oord et al. 2018) of points (2B, D) on the unit sphere, first views first.

    Each query is to find the key of the other view of its image among those of all B.
    """
    q, k = queries.unflatten(0, (2, -1)), keys.unflatten(0, (2, -1)).flip(0)
    partner = torch.arange(q.shape[1], device=q.device).repeat(2)
    return functional.cross_entropy((q @ k.mT / temperature).flatten(0, 1), partner)


class NTXent(ProjectionHead):
    """NT-Xent of projected features: a view is to find the other one of its image among all of the batch."""

    takes_local = True

    def __init__(self, width: int, temperature: float) -> None:
        super().__init__(width)
        self.temperature = temperature

    def forward(self, features: Tensor, x: Tensor | None = None, local: Sequence[Tensor] = ()) -> Tensor:
        project = super().forward
        z, windows = project(features), [project(each) for each in local]
        with torch.autocast(z.device.type, enabled=False):
            found = [nt_xent(z, self.temperature), *(info_nce(each, z, self.temperature) for each in windows)]
            return torch.stack(found).mean()


def token_targets(layers: list[Tensor]) -> Tensor:
    """Tokens (B, N, width) of several layers, each normalized over its features, on average (data2vec)."""
    return torch.stack([functional.layer_norm(each.float(), each.shape[2:]) for each in layers]).mean(0)


class Teacher(nn.Module):
    """An encoder whose weights are exponential moving averages of the student's."""

    def __init__(self, encoder: Encoder, momentum: float, layers: int) -> None:
        super().__init__()
        self.encoder = copy.deepcopy(encoder).requires_grad_(False)
        self.momentum, self.layers = momentum, layers
        # The fp32 master weights: a captured step computes with bf16 copies of them in the layers' places.
        self._masters: list[Tensor] = list(self.parameters())
        self._students: list[Tensor] = list(encoder.parameters())

    @torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
    def forward(self, x: Tensor) -> list[Tensor]:
        """The tokens of whole crops after each of the last blocks."""
        with torch.no_grad():
            if self.training:
                self._move()
            return self.encoder.layers(x, self.layers)[1]

    def _move(self) -> None:
        torch._foreach_lerp_(self._masters, self._students, 1 - self.momentum)
        copies = [pair for pair in zip(self.parameters(), self._masters, strict=True) if pair[0] is not pair[1]]
        if copies:
            torch._foreach_copy_([mine for mine, _ in copies], [master for _, master in copies])


class TokenPredictor(nn.Sequential):
    """Two layers from the student's tokens to the teacher's, compared by smooth L1."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__(nn.Linear(width, width), nn.GELU(), nn.Linear(width, out))

    def loss(self, tokens: Tensor, layers: list[Tensor]) -> Tensor:
        """How far the predictions are from the targets of every position."""
        return functional.smooth_l1_loss(self(tokens).float(), token_targets(layers))


@register("contrastive", "data2vec")
class Data2Vec(nn.Module):
    """data2vec (Baevski et al. 2022): at each position of a masked crop, the teacher's token of the whole one."""

    takes_tokens = True

    def __init__(self, encoder: Encoder, *, momentum: UpToOne = 0.99, layers: Count = LAYERS) -> None:
        super().__init__()
        self.token_predictor = TokenPredictor(encoder.width, encoder.width)
        self.teacher = Teacher(encoder, momentum, layers)

    def forward(self, tokens: Tensor, x: Tensor, gather: Gather) -> Tensor:
        return self.token_predictor.loss(tokens, self.teacher(x))


@register("contrastive", "distill")
class Distill(nn.Module):
    """Distillation: at each position of a masked crop, the token that a finished encoder has of the whole one there."""

    takes_tokens = True
    scale: Tensor  # from the images as the student sees them to those that the teacher learned from
    shift: Tensor

    def __init__(self, encoder: Encoder, *, teacher: str) -> None:
        super().__init__()
        self.path = teacher
        self._teacher = [finished_encoder(teacher, encoder.shape)]  # in a list: neither trained nor saved with the rest
        self.token_predictor = TokenPredictor(encoder.width, self.teacher.width)
        self.register_buffer("scale", torch.ones(()), persistent=False)
        self.register_buffer("shift", torch.zeros(()), persistent=False)

    @property
    def teacher(self) -> Encoder:
        """The finished encoder, frozen."""
        return self._teacher[0]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """To another device or type, with the teacher."""
        self.teacher._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def forward(self, tokens: Tensor, x: Tensor, gather: Gather) -> Tensor:
        rows, columns = to_maps(tokens, x).shape[2:]
        return self.token_predictor.loss(tokens, [self.targets(x, (rows, columns))])

    @torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
    def targets(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """The teacher's tokens (B, N, width) of whole crops, averaged or repeated to the student's grid."""
        with torch.no_grad():
            seen, sides = x * self.scale + self.shift, self.teacher.shape[1:]
            if seen.shape[2:] != sides:
                seen = functional.interpolate(seen, sides, mode="bicubic", antialias=True)
            maps = token_maps(self.teacher, seen)
            return functional.adaptive_avg_pool2d(maps.float(), grid).flatten(2).transpose(1, 2)


def finished_encoder(path: str, shape: tuple[int, int, int]) -> Encoder:
    """The encoder of a run, or of weights that timm or Hugging Face wrote, frozen, for images of about this shape.

    Sides that its patches do not divide are rounded to ones that they do, as 96 to 98 for patches of 14.
    """
    try:
        require_weights(path)
        config = require_encoder(described_weights(path), path)
        patch = config.patch_size or 1
        height, width = (side if side == 1 else patch * max(1, round(side / patch)) for side in shape[1:])
        with torch.random.fork_rng(devices=[]):  # initial weights, which are not kept, are drawn
            encoder = build_encoder(config, (shape[0], height, width))
        encoder.net.load_state_dict(load_weights(path, encoder).tensors, assign=True)
    except UserError as error:
        raise UserError(f"objective.contrastive distill: {str(error).replace('encoder.weights', 'teacher')}") from error
    return encoder.requires_grad_(False).eval()


def draw_windows(count: int, grid: tuple[int, int], device: torch.device) -> Tensor:
    """Positions (count, M) of the patches in windows of half a grid's rows and columns, each anywhere in it."""
    (rows, columns), (height, width) = grid, (max(1, side // 2) for side in grid)
    top = torch.randint(rows - height + 1, (count, 1, 1), device=device) + torch.arange(height, device=device)[:, None]
    left = torch.randint(columns - width + 1, (count, 1, 1), device=device) + torch.arange(width, device=device)
    return (top * columns + left).flatten(1)


class Contrastive:
    """The loss between two crops of every image, each with its own hidden part: its module, weight and batch.

    No module: the method registers the one inside where its weights are saved.
    """

    def __init__(self, config: ObjectiveConfig, encoder: Encoder) -> None:
        self.weight, self.name = config.contrastive_weight or 0.0, config.contrastive
        self.module: nn.Module
        if self.name == "nt_xent":
            self.module = NTXent(encoder.width, config.temperature)
        else:
            self.module = find("contrastive", self.name, "objective.contrastive")(encoder)
        rule = "a torch module, called with features and images"
        require(isinstance(self.module, nn.Module), f"objective.contrastive {self.name!r}", rule, type(self.module))
        self.gather: Gather = nn.Identity()
        """From the features of this process to those of all, where there are several and the loss is over them."""
        self.gathers = bool(getattr(self.module, "gathers", True))
        self.has_teacher = any(isinstance(part, Teacher) for part in self.module.modules())
        self.predicts_tokens = any(isinstance(part, TokenPredictor) for part in self.module.modules())
        self.distill = self.module if isinstance(self.module, Distill) else None
        self.encoder, self.local_views = encoder, config.local_views or 0
        takes = encoder.is_vit and getattr(self.module, "takes_local", False)
        rule = "0 unless encoder.name is a ViT and objective.contrastive nt_xent"
        require(takes or not self.local_views, "objective.local_views", rule, self.local_views)

    def __call__(self, tokens: Tensor, x: Tensor) -> Tensor:
        """The weighted loss of tokens (2B, N, width), first views before second ones, of the whole images (2B, ...)."""
        given = ([self.gather(each) for each in self.windows(x)],) if self.local_views else ()
        if getattr(self.module, "takes_tokens", False):
            found = self.module(tokens, x, self.gather, *given)
        else:
            found = self.module(self.gather(tokens.mean(1)), x, *given)
        require(found.shape == (), f"objective.contrastive {self.name!r}", "one number", tuple(found.shape))
        return self.weight * found

    def windows(self, x: Tensor) -> Sequence[Tensor]:
        """Features (2B, width) of a window of each image, once for each local view; one pass for all."""
        net: Any = self.encoder.net
        keep = draw_windows(self.local_views * len(x), net.patch_embed.grid_size, x.device)
        _, tokens = self.encoder(x, keep)
        return tokens.mean(1).chunk(self.local_views)
