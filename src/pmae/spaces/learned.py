"""A basis that trains with the model: a rotation of the leading principal components."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from pmae.config import SpaceConfig
from pmae.spaces.pca import Recombined


class Learned(Recombined):
    """An orthonormal basis that turns towards components which are hard to predict from the others.

    The model minimizes the unexplained share of the hidden variance, 1 - R2; the rotation *maximizes* it, by gradient
    reversal, in the same step of the same optimizer (predictability minimization). Minimizing it, too, would be
    trivial: strongly correlated components can be filled in by regression (`space.rotate_towards` "easy" does it, for
    comparison). It cannot win by hiding more: the mask keeps to its share of the variance, R2 is relative to the energy
    that was hidden, and an orthonormal basis keeps the total however it turns.
    """

    learns = True

    def __init__(self, shape: tuple[int, int, int], config: SpaceConfig | None = None) -> None:
        super().__init__(shape, config)
        # One number for each pair of axes. All 0 is PCA. A vector, as weight decay is for matrices.
        self.angles = nn.Parameter(torch.zeros(self.count * (self.count - 1) // 2))

    @property
    def rotation(self) -> Tensor:
        """(count, count), a new basis vector a row: Cayley's transform of the skew-symmetric matrix S of the angles.

        (1 - S / 2)^-1 (1 + S / 2) is orthogonal whatever S is; solved in float64 it is so to float32's last digit.
        """
        angles: Tensor = self.angles
        if self.config.rotate_towards == "hard":
            angles = 2 * angles.detach() - angles  # The same value, and minus the gradient.
        one = torch.eye(self.count, dtype=torch.float64, device=angles.device)
        row, column = torch.triu_indices(self.count, self.count, 1, device=angles.device)
        upper = torch.zeros_like(one).index_put((row, column), angles.double())
        half = (upper - upper.T) / 2
        # `solve_ex`, because `solve` asks the device whether it went well, which a CUDA graph forbids. It always does.
        return torch.linalg.solve_ex(one - half, one + half).result.to(angles.dtype)

    def recombination(self) -> tuple[Tensor, Tensor]:
        rotation = self.rotation
        return rotation, rotation.T

    @property
    def variance(self) -> Tensor:  # type: ignore[override]
        """(K,) the diagonal of R diag(v) R^T for the leading components, v for the others.

        Without a gradient: shares decide which components a mask takes.
        """
        variance = self.pca.variance
        with torch.no_grad():
            return torch.cat([self.rotation.square() @ variance[: self.count], variance[self.count :]])

    @torch.no_grad()
    def fit(self, batches: Iterable[Tensor]) -> None:
        self.pca.fit(batches)
        self.angles.zero_()
