"""Targets from an EMA teacher (momentum encoder): InfoNCE as in MoCo v3, and the teacher's tokens as in data2vec.

The student sees masked crops, the teacher whole ones. It moves in the forward pass of a training step, so that plain,
captured, resumed and distributed runs have the same one; it is saved with the decoder and thrown away with it.
"""

import copy
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional

from pmae.models.encoder import Encoder
from pmae.plugins import register
from pmae.validation import Count, NonNegative, Positive, Rule

OUT = 256  # numbers of a query and of a key, as published
LAYERS = 4  # how many of a ViT's last blocks make a token's target

Gather = Callable[[Tensor], Tensor]
"""From the features (2b, width) of this process to those of all (2B, width)."""
Momentum = Annotated[float, Rule("in [0, 1]", lambda x: 0 <= x <= 1)]


def info_nce(queries: Tensor, keys: Tensor, temperature: float) -> Tensor:
    """Symmetric InfoNCE (MoCo v3, Chen et al. 2021) of points (2B, D) on the unit sphere, first views first.

    Each query is to find the key of the other view of its image among those of all B. The mean, without the paper's
    factor of 4 temperature.
    """
    q, k = queries.unflatten(0, (2, -1)), keys.unflatten(0, (2, -1)).flip(0)
    partner = torch.arange(q.shape[1], device=q.device).repeat(2)
    return functional.cross_entropy((q @ k.mT / temperature).flatten(0, 1), partner)


def token_targets(layers: list[Tensor]) -> Tensor:
    """Tokens (B, N, width) of several layers, each normalized over its features, on average (data2vec)."""
    return torch.stack([functional.layer_norm(each.float(), each.shape[2:]) for each in layers]).mean(0)


def mlp_head(*widths: int) -> nn.Sequential:
    """Linear layers with batch normalization; ReLU between them, and no affine map at the end (MoCo v3)."""
    layers: list[nn.Module] = []
    for depth, (before, after) in enumerate(pairwise(widths), 2):
        last = depth == len(widths)
        norm = nn.BatchNorm1d(after, affine=not last, track_running_stats=False)
        layers += [nn.Linear(before, after, bias=False), norm, *([] if last else [nn.ReLU()])]
    return nn.Sequential(*layers)


class Teacher(nn.Module):
    """An encoder and a head whose weights are exponential moving averages of the student's."""

    def __init__(self, encoder: Encoder, head: nn.Module, momentum: float, layers: int) -> None:
        super().__init__()
        self.encoder = copy.deepcopy(encoder).requires_grad_(False)
        self.head = copy.deepcopy(head).requires_grad_(False)
        self.momentum, self.layers = momentum, layers
        # The fp32 master weights: a captured step computes with bf16 copies of them in the layers' places.
        self._masters: list[Tensor] = list(self.parameters())
        self._students: list[Tensor] = [*encoder.parameters(), *head.parameters()]

    @torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
    def forward(self, x: Tensor, gather: Gather) -> tuple[Tensor, list[Tensor]]:
        """Keys (2B, D) of whole crops on the unit sphere, and their tokens after each of the last blocks."""
        with torch.no_grad():
            if self.training:
                self._move()
            tokens, layers = self.encoder.layers(x, self.layers)
            return functional.normalize(self.head(gather(tokens.mean(1))).float(), dim=1), layers

    def _move(self) -> None:
        torch._foreach_lerp_(self._masters, self._students, 1 - self.momentum)
        copies = [pair for pair in zip(self.parameters(), self._masters, strict=True) if pair[0] is not pair[1]]
        if copies:
            torch._foreach_copy_([mine for mine, _ in copies], [master for _, master in copies])


class TokenPredictor(nn.Sequential):
    """Two layers from the student's tokens to the teacher's, compared by smooth L1."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def loss(self, tokens: Tensor, layers: list[Tensor]) -> Tensor:
        """How far the predictions are from the targets of every position."""
        return functional.smooth_l1_loss(self(tokens).float(), token_targets(layers))


@register("contrastive", "moco")
class MoCo(nn.Module):
    """MoCo v3: masked crops as queries, whole ones as the teacher's keys; `tokens` is the weight of data2vec's loss."""

    takes_tokens = takes_local = True

    def __init__(
        self,
        encoder: Encoder,
        *,
        momentum: Momentum = 0.99,
        temperature: Positive = 0.2,
        tokens: NonNegative = 0.0,
        layers: Count = LAYERS,
        hidden: Count = 1024,
    ) -> None:
        super().__init__()
        self.projector = mlp_head(encoder.width, hidden, hidden, OUT)
        self.predictor = mlp_head(OUT, hidden, OUT)
        self.token_predictor = TokenPredictor(encoder.width) if tokens else None
        self.teacher = Teacher(encoder, self.projector, momentum, layers if tokens else 0)
        self.temperature, self.token_weight = temperature, tokens

    def forward(self, tokens: Tensor, x: Tensor, gather: Gather, local: Sequence[Tensor] = ()) -> Tensor:
        keys, layers = self.teacher(x, gather)
        found = [self.predictor(self.projector(each)).float() for each in (gather(tokens.mean(1)), *local)]
        with torch.autocast(x.device.type, enabled=False):
            queries = [functional.normalize(each, dim=1) for each in found]
            loss = torch.stack([info_nce(each, keys, self.temperature) for each in queries]).mean()
        if self.token_predictor is None:
            return loss
        return loss + self.token_weight * self.token_predictor.loss(tokens, layers)


@register("contrastive", "data2vec")
class Data2Vec(nn.Module):
    """data2vec (Baevski et al. 2022): at each position of a masked crop, the teacher's token of the whole one."""

    takes_tokens = True

    def __init__(self, encoder: Encoder, *, momentum: Momentum = 0.99, layers: Count = LAYERS) -> None:
        super().__init__()
        self.token_predictor = TokenPredictor(encoder.width)
        self.teacher = Teacher(encoder, nn.Identity(), momentum, layers)

    def forward(self, tokens: Tensor, x: Tensor, gather: Gather) -> Tensor:
        return self.token_predictor.loss(tokens, self.teacher(x, nn.Identity())[1])
