"""Leading principal components recombined: unmixed into independent sources (FastICA), or by a rotation that learns."""

import warnings
from abc import abstractmethod
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from pmae.config import SpaceConfig
from pmae.errors import require
from pmae.spaces import moments
from pmae.spaces.base import Space
from pmae.spaces.pca import PCA

MOST = 128  # how many leading components are recombined where the settings do not say
WHOLE = 16_384
"""Up to so many pixels the components that are not recombined stay apart; above, they are one mask group, the rest."""
SHARE = 0.9  # of the variance: what the components that are unmixed hold, where the settings do not say how many
RANK = 1e-6
IMAGES = 2**15
"""Bound of the sample that the rotation is found on; variances follow from it, and are exact over all images."""
ITERATIONS, CHANGE = 200, 1e-8


class Recombined(Space):
    """The `count` leading coefficients of PCA multiplied by an invertible matrix; the others stay as they are."""

    def __init__(self, shape: tuple[int, int, int], config: SpaceConfig | None = None) -> None:
        super().__init__(shape, config)
        self.count = self.config.components or min(MOST, self.size)
        require(self.count <= self.size, "space.components", f"at most the number of pixels, {self.size}", self.count)
        self.pca = PCA(shape, SpaceConfig("pca", components=None if self.size <= WHOLE else self.count))
        self.tolerance = self.pca.tolerance
        if self.pca.mask_groups is not None:
            self.set_mask_groups(self.pca.mask_groups, self.pca.mask_group_count)

    @abstractmethod
    def recombination(self) -> tuple[Tensor, Tensor]:
        """(count, count) from leading principal coefficients to recombined ones, and its inverse."""

    def project(self, x: Tensor) -> Tensor:
        z = self.pca.project(x)
        return torch.cat([z[:, : self.count] @ self.recombination()[0].T, z[:, self.count :]], 1)

    def reconstruct(self, z: Tensor) -> Tensor:
        leading = z[:, : self.count] @ self.recombination()[1].T
        return self.pca.reconstruct(torch.cat([leading, z[:, self.count :]], 1))


class ICA(Recombined):
    """Leading principal components unmixed into sources that are as independent as a linear map can make them.

    Sources are a rotation of the *whitened* coefficients, so their directions in pixel space are not orthogonal. Each
    source is measured along its own direction at unit length, so its variance is the energy that it adds to an image,
    and because sources are uncorrelated these energies sum to the variance of the images: hiding a share of the
    variance means what it does in PCA. The squared error of a coefficient, though, is no longer that of its pixels.
    """

    unmixing: Tensor
    mixing: Tensor

    def __init__(self, shape: tuple[int, int, int], config: SpaceConfig | None = None) -> None:
        super().__init__(shape, config)
        self.register_buffer("unmixing", torch.eye(self.count))
        self.register_buffer("mixing", torch.eye(self.count))
        self.register_buffer("variance", torch.ones_like(self.pca.variance))

    def recombination(self) -> tuple[Tensor, Tensor]:
        return self.unmixing, self.mixing

    def fit(self, batches: Iterable[Tensor]) -> None:
        self.pca.fit(batches)
        variance = self.pca.variance.double()
        # What the settings ask for, or what holds most of the variance, if it varies.
        varying = int((variance > RANK * variance[0]).sum())
        enough = 1 + int((variance.cumsum(0) < SHARE * variance.sum()).sum())
        count = max(1, min(self.config.components or enough, self.count, varying))
        std = variance[:count].sqrt()
        mean, axes = self.pca.mean.double(), self.pca.components[:count].double()
        coefficients = ((batch.flatten(1).double() - mean) @ axes.T for batch in batches)
        rotation = fast_ica(moments.sample(coefficients, IMAGES) / std)
        energy, order = (rotation.square() @ variance[:count]).sort(descending=True)
        length = energy.sqrt()
        rotation = rotation[order] * moments.signs(rotation[order] * std)
        self.unmixing.copy_(torch.eye(self.count))
        self.mixing.copy_(torch.eye(self.count))
        self.unmixing[:count, :count] = length[:, None] * rotation / std
        self.mixing[:count, :count] = std[:, None] * rotation.T / length
        self.variance.copy_(torch.cat([energy, variance[count:]]))


def fast_ica(white: Tensor) -> Tensor:
    """The rotation (M, M) whose rows are the directions of independent sources in whitened data (N, M)."""
    # Heavy to import, and most runs use another space.
    from sklearn.decomposition import fastica
    from sklearn.exceptions import ConvergenceWarning

    # Every iterate is a rotation: where data has no independent directions the last one is as good a basis as any.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        _, rotation, _ = fastica(white.cpu().numpy(), whiten=False, max_iter=ITERATIONS, tol=CHANGE, random_state=0)
    return torch.from_numpy(rotation).to(white.device)


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
        """(count, count), a new basis vector a row: Cayley's transform of the skew-symmetric matrix of the angles."""
        angles: Tensor = self.angles
        if self.config.rotate_towards == "hard":
            angles = 2 * angles.detach() - angles  # The same value, and minus the gradient.
        one = torch.eye(self.count, dtype=torch.float64, device=angles.device)
        row, column = torch.triu_indices(self.count, self.count, 1, device=angles.device)
        upper = torch.zeros_like(one).index_put((row, column), angles.double())
        half = (upper - upper.T) / 2
        # (1 - S / 2)^-1 (1 + S / 2) is orthogonal whatever S is; solved in float64 it is so to float32's last digit.
        # `solve_ex`, because `solve` asks the device whether it went well, which a CUDA graph forbids. It always does.
        return torch.linalg.solve_ex(one - half, one + half).result.to(angles.dtype)

    def recombination(self) -> tuple[Tensor, Tensor]:
        rotation = self.rotation
        return rotation, rotation.T

    @property
    def variance(self) -> Tensor:  # type: ignore[override]
        """(K,) the diagonal of R diag(v) R^T for the leading components, v for the others."""
        variance = self.pca.variance
        # Shares decide which components a mask takes.
        with torch.no_grad():
            return torch.cat([self.rotation.square() @ variance[: self.count], variance[self.count :]])

    @torch.no_grad()
    def fit(self, batches: Iterable[Tensor]) -> None:
        self.pca.fit(batches)
        self.angles.zero_()
