"""Contrastive learning beside masked prediction: a projection head and NT-Xent, as in SimCLR (Chen et al. 2020)."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from pmae.config import ObjectiveConfig

HIDDEN, OUT = 1024, 128  # widths of the projection head


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


class Contrastive:
    """NT-Xent between two crops of every image, each with its own hidden part: head, weight and the batch it is over.

    No module: the method registers the head where its weights are saved.
    """

    def __init__(self, config: ObjectiveConfig, width: int) -> None:
        self.weight, self.temperature = config.contrastive_weight or 0.0, config.temperature
        self.head = ProjectionHead(width)
        self.gather: Callable[[Tensor], Tensor] | None = None
        """From the features of this process to those of all, where there are several."""

    def project(self, features: Tensor) -> Tensor:
        """Points of the whole batch's features (2B, width): all first views, then all second ones."""
        return self.head(features if self.gather is None else self.gather(features))

    def loss(self, z: Tensor) -> Tensor:
        """Weighted NT-Xent of the points."""
        return self.weight * nt_xent(z, self.temperature)


def build_contrastive(config: ObjectiveConfig, width: int) -> Contrastive | None:
    """The loss for features so wide, where the settings give it a weight."""
    return Contrastive(config, width) if config.contrastive_weight else None
