"""Independent components: FastICA (parallel, logcosh) on the leading principal components."""

import warnings
from collections.abc import Iterable

import torch
from torch import Tensor

from pmae.config import SpaceConfig
from pmae.errors import require
from pmae.spaces.moments import signs
from pmae.spaces.pca import Recombined

SHARE = 0.9
"""Of the variance: what the components that are unmixed hold, where the settings do not say how many."""
RANK = 1e-6
IMAGES = 2**15
"""Bound of the sample that the rotation is found on; variances follow from it, and are exact over all images."""
ITERATIONS, CHANGE = 200, 1e-8


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
        count = self._how_many(variance)
        std = variance[:count].sqrt()
        rotation = fast_ica(self._sample(batches, count) / std)
        energy, order = (rotation.square() @ variance[:count]).sort(descending=True)
        length = energy.sqrt()
        rotation = rotation[order] * signs(rotation[order] * std)
        self.unmixing.copy_(torch.eye(self.count))
        self.mixing.copy_(torch.eye(self.count))
        self.unmixing[:count, :count] = length[:, None] * rotation / std
        self.mixing[:count, :count] = std[:, None] * rotation.T / length
        self.variance.copy_(torch.cat([energy, variance[count:]]))

    def _how_many(self, variance: Tensor) -> int:
        """Components to unmix: those that the settings ask for, or that hold most of the variance, if they vary."""
        varying = int((variance > RANK * variance[0]).sum())
        enough = 1 + int((variance.cumsum(0) < SHARE * variance.sum()).sum())
        wanted = self.count if self.config.components else min(self.count, enough)
        return max(1, min(wanted, varying))

    def _sample(self, batches: Iterable[Tensor], count: int) -> Tensor:
        """(N, count) leading coefficients of every n-th image, float64; n doubles whenever N passes the bound."""
        mean, axes = self.pca.mean.double(), self.pca.components[:count].double()
        kept, step, seen = mean.new_zeros(0, count), 1, 0
        for batch in batches:
            chosen = batch[-seen % step :: step].flatten(1).double()
            kept = torch.cat([kept, (chosen - mean) @ axes.T])
            seen += len(batch)
            while len(kept) > IMAGES:
                kept, step = kept[::2], 2 * step
        require(len(kept) > 0, "batches", "iterable a second time, as space 'ica' is fitted in several passes", batches)
        return kept


def fast_ica(white: Tensor) -> Tensor:
    """The rotation (M, M) whose rows are the directions of independent sources in whitened data (N, M).

    Every iterate is a rotation, so where data has no independent directions the last one is as good a basis as any.
    """
    # Heavy to import, and most runs use another space.
    from sklearn.decomposition import fastica
    from sklearn.exceptions import ConvergenceWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        _, rotation, _ = fastica(white.cpu().numpy(), whiten=False, max_iter=ITERATIONS, tol=CHANGE, random_state=0)
    return torch.from_numpy(rotation).to(white.device)
