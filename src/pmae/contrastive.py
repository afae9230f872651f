"""From features to the sphere on which two views of an image are told from those of others."""

from torch import Tensor, nn
from torch.nn import functional

from pmae.models.encoder import xavier

HIDDEN, POINTS = 1024, 128


class Projector(nn.Module):
    """Two layers with the batch standardized between them; thrown away with the decoder."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, HIDDEN), nn.Linear(HIDDEN, POINTS)
        self.apply(xavier)

    def forward(self, features: Tensor) -> Tensor:
        """(2B, width) to points (2B, 128) of length 1."""
        hidden = self.first(features).float()
        hidden = (hidden - hidden.mean(0)) / (hidden.var(0, correction=0) + 1e-5).sqrt()
        return functional.normalize(self.second(functional.gelu(hidden)).float(), dim=1)
