"""Maps that are cheap at any size: pixels as they are, cosines, Fourier, wavelets, and what others build on."""

from abc import abstractmethod
from collections.abc import Iterable
from math import comb

import numpy as np
import torch
from torch import Tensor

from pmae.config import SpaceConfig
from pmae.errors import UserError, require_known
from pmae.spaces.base import Space
from pmae.spaces.moments import covariance_of, mean_and_variance, principal_axes

RINGS = 24
FEW_CHANNELS = 4  # channels whose mixtures are sums rather than a GEMM
MOMENTS = {"haar": 1, **{f"db{moments}": moments for moments in range(2, 9)}}
"""Vanishing moments of each wavelet; a filter has twice as many taps."""


class Pixels(Space):
    """Every pixel of every channel is its own coefficient, as in MAE; fitting measures their variances."""

    tolerance = 0.0

    def __init__(self, shape: tuple[int, int, int], config: SpaceConfig | None = None) -> None:
        super().__init__(shape, config)
        self.register_buffer("variance", torch.ones(self.size))

    def fit(self, batches: Iterable[Tensor]) -> None:
        pixels = (batch.flatten(1) for batch in self.distributed.part(batches))
        self.variance.copy_(mean_and_variance(pixels, self.distributed)[1])

    def project(self, x: Tensor) -> Tensor:
        return x.flatten(1)

    def reconstruct(self, z: Tensor) -> Tensor:
        return z.unflatten(1, self.shape)


class Orthonormal(Space):
    """Coefficients of an orthonormal map of the image, about their mean over the training images."""

    mean: Tensor
    tolerance = 1e-5
    has_bands = True
    may_round = False

    def __init__(self, shape: tuple[int, int, int], config: SpaceConfig | None = None) -> None:
        super().__init__(shape, config)
        self.register_buffer("mean", torch.zeros(self.size))
        self.register_buffer("variance", torch.ones(self.size))

    def learn(self, batches: Iterable[Tensor]) -> None:
        """Fit whatever of the map depends on the data; nothing, where it is fixed."""

    @abstractmethod
    def forward_transform(self, x: Tensor) -> Tensor:
        """Images (B, C, H, W) to as many numbers, flattened or not."""

    @abstractmethod
    def inverse_transform(self, z: Tensor) -> Tensor:
        """The inverse, which is the transpose: images of coefficients (B, C H W)."""

    def fit(self, batches: Iterable[Tensor]) -> None:
        """One pass for the map, where it depends on the data, and one for the moments of its coefficients."""
        self.learn(batches)
        part, dtype = self.distributed.part(batches), self.mean.dtype
        numbers = (self.forward_transform(batch.to(dtype)).flatten(1) for batch in part)
        mean, variance = mean_and_variance(numbers, self.distributed)
        self.mean.copy_(mean)
        self.variance.copy_(variance)

    def project(self, x: Tensor) -> Tensor:
        return self.forward_transform(x).flatten(1) - self.mean

    def reconstruct(self, z: Tensor) -> Tensor:
        return self.inverse_transform(z + self.mean)

    def allow_bf16(self) -> None:
        self.may_round = True

    def project_bf16(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.may_round):
            return self.project(x).to(x.dtype)

    def reconstruct_bf16(self, z: Tensor) -> Tensor:
        with torch.autocast(z.device.type, torch.bfloat16, enabled=self.may_round):
            return self.reconstruct(z).to(z.dtype)

    def group_by(self, labels: np.ndarray) -> None:
        """One mask group a label; labels have one number a coefficient, in any order and with gaps."""
        kinds, index = np.unique(labels, return_inverse=True)
        self.set_mask_groups(torch.as_tensor(index.reshape(-1)), len(kinds))


class FixedBasis(Orthonormal):
    """A fixed basis for each channel, after the channels are turned to their principal axes.

    Every level multiplies the upper left corner that the level before it left, down and across.
    """

    colour: Tensor
    """(C, C) the rotation, one axis a row, largest variance first."""

    def __init__(self, shape: tuple[int, int, int], config: SpaceConfig | None = None) -> None:
        super().__init__(shape, config)
        self.register_buffer("colour", torch.eye(shape[0]))
        matrices, bands = self.basis()
        self.levels = len(matrices)
        for level, (down, across) in enumerate(matrices):
            self.register_buffer(f"down_{level}", torch.tensor(down, dtype=torch.float32), persistent=False)
            self.register_buffer(f"across_{level}", torch.tensor(across, dtype=torch.float32), persistent=False)
        if self.config.grouped:
            self.group_by(bands + (bands.max() + 1) * np.arange(shape[0])[:, None, None])

    @abstractmethod
    def basis(self) -> tuple[list[tuple[np.ndarray, np.ndarray]], np.ndarray]:
        """Orthonormal matrices (h, h) and (w, w) of every level, one basis vector a row, and bands (H, W) by number."""

    def learn(self, batches: Iterable[Tensor]) -> None:
        if self.shape[0] > 1:
            colours = (batch.movedim(1, -1).flatten(0, 2) for batch in self.distributed.part(batches))
            self.colour.copy_(principal_axes(covariance_of(colours, self.distributed)[1])[1])

    def forward_transform(self, x: Tensor) -> Tensor:
        z = mix_channels(self.colour, x)
        for level in range(self.levels):
            down, across = self._matrices(level)
            z = _with_corner(z, down @ (z[..., : len(down), : len(across)] @ across.T))
        return z

    def inverse_transform(self, z: Tensor) -> Tensor:
        z = z.unflatten(1, self.shape)
        for level in reversed(range(self.levels)):
            down, across = self._matrices(level)
            z = _with_corner(z, down.T @ (z[..., : len(down), : len(across)] @ across))
        return mix_channels(self.colour.T, z)

    def _matrices(self, level: int) -> tuple[Tensor, Tensor]:
        return getattr(self, f"down_{level}"), getattr(self, f"across_{level}")


def mix_channels(matrix: Tensor, x: Tensor) -> Tensor:
    """Each output channel a weighted sum of the channels of x (B, C, H, W): one row of the matrix (C, C)."""
    if len(matrix) > FEW_CHANNELS:
        return torch.einsum("dc,bchw->bdhw", matrix, x)
    # A GEMM of three rows leaves a GPU idle, 5 ms of a step at 224 pixels; sums are fused with what is around them.
    return (matrix[:, :, None, None] * x[:, None]).sum(2)


def _with_corner(z: Tensor, corner: Tensor) -> Tensor:
    if corner.shape == z.shape:
        return corner
    down, across = corner.shape[-2:]
    upper = torch.cat([corner, z[..., :down, across:]], -1)
    return torch.cat([upper, z[..., down:, :]], -2)


class Cosine(FixedBasis):
    """The orthonormal two-dimensional DCT-II of every channel; bands are rings of frequency."""

    def basis(self) -> tuple[list[tuple[np.ndarray, np.ndarray]], np.ndarray]:
        (down, per_row), (across, per_column) = map(cosines, self.shape[1:])
        return [(down, across)], rings(per_row, per_column)


class Fourier(FixedBasis):
    """The real orthonormal Fourier basis of every channel; bands are rings of frequency.

    A product of two of its waves is the real or imaginary part of sums of the complex waves (f, g) and (f, -g): what
    each pair of frequencies spans is the same, in real numbers.
    """

    def basis(self) -> tuple[list[tuple[np.ndarray, np.ndarray]], np.ndarray]:
        (down, per_row), (across, per_column) = map(fourier_waves, self.shape[1:])
        return [(down, across)], rings(per_row, per_column)


def cosines(size: int) -> tuple[np.ndarray, np.ndarray]:
    """(size, size) half-waves that end flat at the borders, one a row, and (size,) their cycles per pixel."""
    order, place = np.arange(size)[:, None], np.arange(size) + 0.5
    waves = np.sqrt(2 / size) * np.cos(np.pi * order * place / size)
    waves[0] = size**-0.5
    return waves, np.arange(size) / (2 * size)


def fourier_waves(size: int) -> tuple[np.ndarray, np.ndarray]:
    """The same of cosine and sine of every frequency in turn: 1, cos 1, sin 1, cos 2, sin 2."""
    index = np.arange(size)[:, None]
    angle = 2 * np.pi * ((index + 1) // 2) * np.arange(size) / size
    waves = np.sqrt(2 / size) * np.where(index % 2 == 1, np.cos(angle), np.sin(angle))
    waves[0] = size**-0.5
    if size % 2 == 0:
        # The highest frequency of an even number of samples has no sine: it alternates.
        waves[-1] = size**-0.5 * (-1.0) ** np.arange(size)
    return waves, (np.arange(size) + 1) // 2 / size


def rings(down: np.ndarray, across: np.ndarray) -> np.ndarray:
    """(H, W) of the ring that each pair of frequencies lies in: 0 is the mean alone, the others widen outwards."""
    radius = np.hypot(down[:, None], across[None, :])
    lowest = radius.min(initial=1.0, where=radius > 0)
    # By a constant factor: the power of photographs falls with the square of the frequency, so these share it evenly.
    octaves = np.log2(np.maximum(radius, lowest) / lowest)
    ring = 1 + np.floor((RINGS - 1) * octaves / max(octaves.max(), 1e-12))
    return np.where(radius > 0, ring.clip(max=RINGS - 1), 0).astype(np.int64)


class Wavelet(FixedBasis):
    """Daubechies' orthogonal wavelets of every channel, periodised, over several levels.

    Each level splits what the last one averaged into an average, in the upper left quarter, and three details.
    """

    def basis(self) -> tuple[list[tuple[np.ndarray, np.ndarray]], np.ndarray]:
        _, height, width = self.shape
        levels, name = count_levels(height, width, self.config.levels), self.config.wavelet
        sides = [(max(1, height >> level), width >> level) for level in range(levels)]
        return [(filter_bank(name, down), filter_bank(name, across)) for down, across in sides], subbands(sides)


def low_pass(name: str) -> np.ndarray:
    """The low-pass filter of smallest phase with `MOMENTS[name]` zeros at the highest frequency."""
    require_known("space.wavelet", [name], MOMENTS)
    moments = MOMENTS[name]
    # Its power is cos^2p times a polynomial in y = sin^2 of half the frequency; each root y is a pair z, 1/z with
    # y = (2 - z - 1/z) / 4, and the filter takes the one inside the unit circle.
    roots = np.roots([comb(moments - 1 + k, k) for k in reversed(range(moments))]).astype(complex)
    middle, apart = 1 - 2 * roots, 2 * np.sqrt(roots * (roots - 1))
    inside = np.where(abs(middle + apart) < 1, middle + apart, middle - apart)
    taps = np.poly(np.concatenate([-np.ones(moments), inside])).real
    return np.asarray(np.sqrt(2) * taps / taps.sum())


def filter_bank(name: str, size: int) -> np.ndarray:
    """(size, size) orthonormal: the upper half averages an even number of periodic samples, the lower takes details."""
    # Across a signal, which is one row, there is nothing to filter.
    if size == 1:
        return np.eye(1)
    low = low_pass(name)
    high = low[::-1] * (-1.0) ** np.arange(len(low))
    bank = np.zeros((2, size // 2, size))
    step = np.arange(size // 2)
    for tap, (average, detail) in enumerate(zip(low, high, strict=True)):
        # A filter longer than the signal wraps around and meets the same sample again.
        place = (2 * step + tap + 1 - len(low) // 2) % size
        bank[0, step, place] += average
        bank[1, step, place] += detail
    return bank.reshape(size, size)


def subbands(sides: list[tuple[int, int]]) -> np.ndarray:
    """(H, W) of subbands, from the sides that each level splits: 0 is the last average, then three details a level."""
    band = np.zeros(sides[0], np.int64)
    for level, (height, width) in enumerate(sides):
        down, across = max(1, height // 2), width // 2
        band[:down, across:width] = 3 * level + 1
        band[down:height, :across] = 3 * level + 2
        band[down:height, across:width] = 3 * level + 3
    return band


def count_levels(height: int, width: int, wanted: int | None) -> int:
    """How many levels: those wanted, or as many as both sides can be halved; of a signal, one row, only the length."""
    sides = width if height == 1 else height | width
    deepest = (sides & -sides).bit_length() - 1
    if deepest == 0 or (wanted or 0) > deepest:
        asked = "at least 1" if wanted is None else str(wanted)
        rule = f"at most {deepest} for images of {height}x{width}, because each level halves both sides"
        instead = "use data.resize, or space.name 'cosine', which takes any size"
        raise UserError(f"space.levels must be {rule}, got {asked}; {instead}")
    return wanted or deepest
