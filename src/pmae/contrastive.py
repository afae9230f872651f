"""The loss beside masked prediction: NT-Xent between two crops of an image (SimCLR), a teacher's tokens, or yours."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pmae.config import ObjectiveConfig
from pmae.errors import require
from pmae.models import Encoder
from pmae.plugins import find
from pmae.teacher import Distill, Teacher, TokenPredictor

HIDDEN, OUT = 1024, 128  # widths of the projection head

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
