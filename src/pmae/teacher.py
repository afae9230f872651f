"""Tokens of a teacher as targets: the student sees masked crops, the teacher whole ones.

A momentum encoder, as in data2vec, moves in the forward pass of a training step, so that plain, captured, resumed and
distributed runs have the same one; it is saved with the decoder and thrown away with it. A finished encoder, as in
distillation, stays as it is, and is read from where it lies.
"""

import copy
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from pmae.errors import UserError
from pmae.models import Encoder, build_encoder
from pmae.models.described import described_weights, require_encoder
from pmae.models.maps import to_maps, token_maps
from pmae.models.weights import load_weights, require_weights
from pmae.plugins import register
from pmae.validation import Count, UpToOne

LAYERS = 4  # how many of a ViT's last blocks make a token's target


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

    def forward(self, tokens: Tensor, x: Tensor, gather: object) -> Tensor:
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

    def forward(self, tokens: Tensor, x: Tensor, gather: object) -> Tensor:
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
