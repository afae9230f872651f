"""Independent components: FastICA (parallel, logcosh) on the leading principal components."""

from collections.abc import Iterable

import torch
from torch import Tensor

from pmae.config import SpaceConfig
from pmae.errors import require
from pmae.spaces.moments import signs
from pmae.spaces.pca import Recombined

SHARE = 0.9
RANK = 1e-6
IMAGES = 2**15
ITERATIONS, CHANGE = 200, 1e-8


class ICA(Recombined):
    """Leading principal components unmixed into sources that are as independent as a linear map can make them.

    By default as many as hold 90% of the variance, 128 at most; `space.components` sets the number. Either is lowered
    to the components that vary at all.

    Sources are a rotation of the *whitened* coefficients, so their directions in pixel space are not orthogonal. Each
    source is measured along its own direction at unit length, so its variance is the energy that it adds to an image,
    and because sources are uncorrelated these energies sum to the variance of the images: hiding a share of the
    variance means what it does in PCA. The squared error of a coefficient, though, is no longer that of its pixels.

    After the fit of PCA one more pass takes the leading coefficients of at most 32,768 images, spread evenly over the
    data, and on those the rotation is found. Variances need nothing but the rotation, and are exact over all images.
    """

    variance: Tensor
    unmixing: Tensor
    mixing: Tensor

    def __init__(self, shape: tuple[int, int, int], config: SpaceConfig | None = None) -> None:
        super().__init__(shape, config)
        self.register_buffer("unmixing", torch.eye(self.count))
        self.register_buffer("mixing", torch.eye(self.count))
        self.register_buffer("variance", torch.ones_like(self.pca.variance))

    @property
    def analysis(self) -> Tensor:
        return self.unmixing

    @property
    def synthesis(self) -> Tensor:
        return self.mixing

    def fit(self, batches: Iterable[Tensor]) -> None:
        self.pca.fit(batches)
        variance = self.pca.variance.double()
        count = self._how_many(variance)
        deviation = variance[:count].sqrt()
        rotation = fast_ica(self._sample(batches, count) / deviation)
        energy = rotation.square() @ variance[:count]
        order = energy.argsort(descending=True)
        rotation, length = rotation[order], energy[order].sqrt()
        rotation = rotation * signs(rotation * deviation)
        self.unmixing.copy_(torch.eye(self.count)), self.mixing.copy_(torch.eye(self.count))
        self.unmixing[:count, :count] = (length[:, None] * rotation / deviation).to(self.unmixing.dtype)
        self.mixing[:count, :count] = (deviation[:, None] * rotation.T / length).to(self.mixing.dtype)
        self.variance.copy_(torch.cat([length.square(), variance[count:]]))

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
            kept, seen = torch.cat([kept, (chosen - mean) @ axes.T]), seen + len(batch)
            while len(kept) > IMAGES:
                kept, step = kept[::2], 2 * step
        require(len(kept) > 0, "batches", "iterable a second time, as space 'ica' is fitted in several passes", batches)
        return kept


def fast_ica(white: Tensor) -> Tensor:
    """The rotation (M, M) whose rows are the directions of independent sources in whitened data (N, M).

    Every iterate is a rotation, so where data has no independent directions the last one is as good a basis as any.
    """
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(white.shape[1], white.shape[1], generator=generator, dtype=white.dtype)
    rotation = _nearest_rotation(start.to(white.device))
    for _ in range(ITERATIONS):
        source = torch.tanh(white @ rotation.T)
        slope = 1 - source.square().mean(0)
        updated = _nearest_rotation(source.T @ white / len(white) - slope[:, None] * rotation)
        change = 1 - (updated * rotation).sum(1).abs().min()
        rotation = updated
        if float(change) < CHANGE:
            break
    return rotation


def _nearest_rotation(matrix: Tensor) -> Tensor:
    """The orthogonal matrix closest to a square one: its polar factor."""
    u, _, v = torch.linalg.svd(matrix)
    return u @ v
