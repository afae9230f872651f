"""Settings of what is hidden and compared: the masking space, the mask and the objective."""

from dataclasses import dataclass
from typing import Literal

from pmae.config.checks import at_least, ratio
from pmae.errors import require


@dataclass(frozen=True)
class SpaceConfig:
    """Where masking happens."""

    name: str = "pca"
    """The masking space: pca (PMAE), ica, learned, patch_pca, kernel_pca (KMAE), diffusion, cosine, fourier,
    wavelet, or pixels (MAE)."""
    grouped: bool = False
    """Hide whole bands as one: rings of frequencies, wavelet subbands, or a component of patch_pca everywhere."""
    components: int | None = None
    """For pca: keep only so many leading components and the orthogonal rest as one more; all if not given.
    For ica and learned: how many leading components are recombined; at most 128 if not given.
    For kernel_pca and diffusion: how many leading coefficients there are; as many as landmarks if not given."""
    gamma: float | None = None
    """For kernel_pca and diffusion: of the kernel exp(-gamma |x - y|^2); 1 / median |x - y|^2 if not given."""
    landmarks: int | None = None
    """For kernel_pca and diffusion: images that carry the kernel; 2,048, or all where there are fewer, if not given."""
    landmark_choice: Literal["random", "kmeans++"] = "random"
    """For kernel_pca and diffusion: landmarks are drawn evenly, or far from each other."""
    keep_rest: bool = True
    """For kernel_pca and diffusion: keep the part of an image visible that the coefficients cannot express."""
    patch: int | None = None
    """For patch_pca: side of a patch; the largest divisor of both sides up to 16 if not given."""
    wavelet: str = "db2"
    """For wavelet: haar or db2 to db8."""
    levels: int | None = None
    """For wavelet: how often the image is halved; as often as both sides are even if not given."""
    rotate_towards: Literal["hard", "easy"] = "hard"
    """For learned: whether the basis turns to components that are hard or easy to predict from the others."""

    def __post_init__(self) -> None:
        kernels = ("kernel_pca", "diffusion")
        owners = {"components": ("pca", "ica", "learned", *kernels), "patch": ("patch_pca",), "levels": ("wavelet",)}
        owners |= {"gamma": kernels, "landmarks": kernels}
        for key, names in owners.items():
            value = getattr(self, key)
            require(key != "gamma" or value is None or value > 0, "space.gamma", "above 0", value)
            at_least(f"space.{key}", 0 if key == "gamma" else 1, value)
            rule = f"left unset unless space.name is {' or '.join(map(repr, names))} (it is {self.name!r})"
            require(value is None or self.name in names, f"space.{key}", rule, value)


@dataclass(frozen=True)
class MaskingConfig:
    """How much is hidden, and of what."""

    masked_variance: float | None = None
    """Share of the variance to hide, in a space of components; 0.2 if not given."""
    masked_patches: float | None = None
    """Share of the patches to hide, in pixel space; 0.75 if not given."""
    ratio: Literal["fixed", "uniform"] = "fixed"
    """One ratio for all batches, or a new one for each batch, uniform in `ratio_range`."""
    ratio_range: tuple[float, float] = (0.1, 0.9)
    """Range of the uniform ratio."""
    per: Literal["image", "batch"] = "image"
    """One mask per image (ours), or one for the whole batch (the paper)."""
    prefix: Literal["closest", "shorter"] = "closest"
    """The prefix whose share is closest to the ratio, or the released code's, one component shorter."""

    def __post_init__(self) -> None:
        ratio("masking.masked_variance", self.masked_variance)
        ratio("masking.masked_patches", self.masked_patches)
        low, high = self.ratio_range
        require(0 < low < high < 1, "masking.ratio_range", "two increasing shares between 0 and 1", self.ratio_range)


@dataclass(frozen=True)
class ObjectiveConfig:
    """What the prediction is compared with."""

    target: Literal["components", "pixels", "patches"] | None = None
    """Hidden components, the hidden image in pixels, or hidden patches; follows from the space if not given."""
    normalize_patches: bool = True
    """For patches: compare with pixels standardized within each patch (the text), or raw (the released default)."""
    scale: Literal["constant", "sum", "mean"] = "constant"
    """Divide by ratio x total variance, by nothing (the paper's norm), or by the batch's hidden count (released)."""
    contrast: float | None = None
    """Weight of a second task: of two crops of every image, each with its own hidden part, find the partner among all
    others of the batch. 0 leaves it out (the paper); if not given, 1 for many images."""
    temperature: float = 0.2
    """For contrast: how sharply near ones are told apart."""

    def __post_init__(self) -> None:
        at_least("objective.contrast", 0, self.contrast or 0)
        require(self.temperature > 0, "objective.temperature", "above 0", self.temperature)
