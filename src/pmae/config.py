"""Every setting of a run, typed, frozen and checked on construction; `None` means "derived from the data".

The same classes are the Python API and, through tyro, the command line. `derive.resolve` fills in the derived ones.
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from pmae.errors import UserError, require, unknown_name

RENAMED = {"masking.ratio": "masking.ratio_schedule", "objective.contrast": "objective.contrastive_weight"}
"""Settings that had another name in earlier versions: refused with the new one, translated in files of old runs."""


class Settings:
    """A section of settings: a keyword that is none of them is refused with the nearest, or with its new name."""

    def __new__(cls, *_: Any, **given: Any) -> Self:
        """Look at the keywords before the dataclass does, whose error would be a plain TypeError."""
        check_names(cls, given)
        return super().__new__(cls)


def check_names(kind: type, given: Iterable[str]) -> None:
    """Refuse names that are no settings of a section, or no sections of the whole."""
    section = kind.__name__.removesuffix("Config").lower()
    known = [entry.name for entry in dataclasses.fields(kind)]
    for name in given:
        check_not_renamed(f"{section}.{name}")
        if name not in known:
            raise unknown_name(f"setting of {section}" if section else "section", name, known)


def check_not_renamed(name: str) -> None:
    """Refuse a setting by the name it had."""
    if name in RENAMED:
        raise UserError(f"setting {name} is now called {RENAMED[name]}")


@dataclass(frozen=True)
class DataConfig(Settings):
    """Where the images come from and how they are laid out."""

    source: str = "photos"
    """A named set, or the path of a folder, .npy or .npz file, or shards: tar, parquet or Arrow files, or a pattern."""
    root: str = "data"
    """Folder that holds the files of named sets."""
    layout: Literal["auto", "NHWC", "NCHW", "NCL", "ND"] = "auto"
    """Axis order of arrays: images, signals (NCL) or vectors (ND). auto takes two axes of floats as vectors, three as
    grey images, and of four the smaller of the outer candidates as channels; it refuses a tie."""
    labels: Literal["none", "folders"] = "none"
    """For a folder of images: whether its subfolders are classes."""
    resize: int | None = None
    """Resize every image of a folder or of shards to this side; without it, sizes must agree."""
    channels: Literal[1, 3] | None = None
    """Convert every image of a folder or of shards to this many channels; without it, channels must agree."""
    max_unreadable: int = 10
    """How many unreadable files may be skipped before the run is refused."""
    standardize: Literal["channel", "pixel"] = "channel"
    """One mean and deviation per channel, or per pixel and channel (as the released code)."""
    keep_on: Literal["auto", "device", "host"] = "auto"
    """Where the images wait; auto puts them on the device when they fit in half of its free memory, and leaves shards
    on the disk."""
    threads: int | None = None
    """How many threads decode shards; as many as there are cores if not given. The batches do not depend on it."""

    def __post_init__(self) -> None:
        require(bool(self.source), "data.source", "a name or a path", self.source)
        _at_least("data.resize", 1, self.resize)
        _at_least("data.max_unreadable", 0, self.max_unreadable)
        _at_least("data.threads", 1, self.threads)


@dataclass(frozen=True)
class AugmentConfig(Settings):
    """Random resized crop and flip, one box per image, in whole batches on the device; vectors are left as they are."""

    crop: bool = True
    """Whether to crop at all."""
    crop_scale: tuple[float, float] = (0.2, 1.0)
    """Smallest and largest share of the image's area, or of a signal's length, that a crop keeps."""
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    """How a crop is resized back to the full size."""
    flip: bool = True
    """Mirror half of the images left to right; never signals, which are rarely natural backwards."""

    def __post_init__(self) -> None:
        low, high = self.crop_scale
        require(0 < low <= high <= 1, "augment.crop_scale", "two increasing shares in (0, 1]", self.crop_scale)


@dataclass(frozen=True)
class SpaceConfig(Settings):
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
            _at_least(f"space.{key}", 0 if key == "gamma" else 1, value)
            rule = f"left unset unless space.name is {' or '.join(map(repr, names))} (it is {self.name!r})"
            require(value is None or self.name in names, f"space.{key}", rule, value)


@dataclass(frozen=True)
class MaskingConfig(Settings):
    """How much is hidden, and of what."""

    masked_variance: float | None = None
    """Share of the variance to hide, in a space of components; 0.2 if not given."""
    masked_patches: float | None = None
    """Share of the patches to hide, in pixel space; 0.75 if not given."""
    ratio_schedule: Literal["fixed", "uniform"] = "fixed"
    """One ratio for all batches, or a new one for each batch, uniform in `ratio_range`."""
    ratio_range: tuple[float, float] = (0.1, 0.9)
    """Range of the uniform ratio."""
    per: Literal["image", "batch"] = "image"
    """One mask per image (ours), or one for the whole batch (the paper)."""
    prefix: Literal["closest", "shorter"] = "closest"
    """The prefix whose share is closest to the ratio, or the released code's, one component shorter."""

    def __post_init__(self) -> None:
        _ratio("masking.masked_variance", self.masked_variance)
        _ratio("masking.masked_patches", self.masked_patches)
        low, high = self.ratio_range
        require(0 < low < high < 1, "masking.ratio_range", "two increasing shares between 0 and 1", self.ratio_range)


@dataclass(frozen=True)
class ObjectiveConfig(Settings):
    """What the prediction is compared with."""

    target: Literal["components", "pixels", "patches"] | None = None
    """Hidden components, the hidden image in pixels, or hidden patches; follows from the space if not given."""
    normalize_patches: bool = True
    """For patches: compare with pixels standardized within each patch (the text), or raw (the released default)."""
    scale: Literal["constant", "sum", "mean"] = "constant"
    """Divide by ratio x total variance, by nothing (the paper's norm), or by the batch's hidden count (released)."""
    contrastive_weight: float | None = None
    """Weight of a contrastive loss (NT-Xent) between two crops of every image, each with its own hidden part. 0 leaves
    it out (the paper); if not given, 1 for many images."""
    temperature: float = 0.2
    """For the contrastive loss: its softmax temperature."""

    def __post_init__(self) -> None:
        _at_least("objective.contrastive_weight", 0, self.contrastive_weight or 0)
        require(self.temperature > 0, "objective.temperature", "above 0", self.temperature)


@dataclass(frozen=True)
class EncoderConfig(Settings):
    """The encoder that is kept after pretraining."""

    name: str = "vit_tiny"
    """vit_tiny (192 wide, 12 blocks, 12 heads, as in the paper) or any timm image model."""
    patch_size: int | None = None
    """Side of a patch in pixels, or length in samples; derived from the data's size if not given."""
    width: int | None = None
    """Width of vit_tiny's tokens; 192 if not given, or 96 without a GPU if no size of either network is given."""
    depth: int | None = None
    """Number of vit_tiny's blocks; 12 if not given, or 4 in the same case."""
    heads: int | None = None
    """Number of vit_tiny's attention heads; 12 if not given, or 6 in the same case."""
    weights: str | None = None
    """Start from a run folder, or from a local safetensors file or folder that timm or Hugging Face wrote."""

    def __post_init__(self) -> None:
        for key in ("patch_size", "width", "depth", "heads"):
            _at_least(f"encoder.{key}", 1, getattr(self, key))
        shaped = self.width or self.depth or self.heads
        require(
            not shaped or self.name == "vit_tiny",
            "encoder.width, depth and heads",
            "left unset unless encoder.name is vit_tiny (a timm name fixes its own shape)",
            self.name,
        )


@dataclass(frozen=True)
class DecoderConfig(Settings):
    """The decoder that is thrown away after pretraining."""

    name: Literal["released", "text", "small"] | None = None
    """released: 512 wide, 8 blocks, 16 heads; text: 192, 12, 12; small: 192, 4, 12. If not given, released, or small
    without a GPU."""
    width: int | None = None
    """Overrides the named width."""
    depth: int | None = None
    """Overrides the named number of blocks."""
    heads: int | None = None
    """Overrides the named number of heads."""

    def __post_init__(self) -> None:
        for key in ("width", "depth", "heads"):
            _at_least(f"decoder.{key}", 1, getattr(self, key))


@dataclass(frozen=True)
class OptimConfig(Settings):
    """AdamW and its schedule."""

    base_lr: float | None = None
    """Rate for a batch of 256; the peak rate is base_lr x batch_size / 256. If not given, 1.5e-4 for batches of 512 and
    more, and for smaller ones what keeps the peak rate from falling."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of AdamW's two moments."""
    weight_decay: float = 0.05
    """Decoupled weight decay, on matrices only."""
    schedule: Literal["cosine", "released", "constant"] = "cosine"
    """Linear warm-up then cosine; the released code's 10^-(warmup - epoch) then cosine; or warm-up then constant."""
    warmup_epochs: float | None = None
    """Length of the warm-up; 5% of the epochs if not given."""
    warmup_steps: int | None = None
    """The same in steps, instead of epochs (the paper's text says 40 steps)."""
    clip_norm: float | None = None
    """Largest norm of the gradient; no clipping if not given."""

    def __post_init__(self) -> None:
        require(self.base_lr is None or self.base_lr > 0, "optim.base_lr", "above 0", self.base_lr)
        require(all(0 <= b < 1 for b in self.betas), "optim.betas", "two numbers in [0, 1)", self.betas)
        _at_least("optim.weight_decay", 0, self.weight_decay)
        _at_least("optim.warmup_epochs", 0, self.warmup_epochs)
        _at_least("optim.warmup_steps", 0, self.warmup_steps)
        both = self.warmup_epochs is not None and self.warmup_steps is not None
        require(not both, "optim.warmup_steps", "unset where optim.warmup_epochs is set", self.warmup_steps)
        require(self.clip_norm is None or self.clip_norm > 0, "optim.clip_norm", "above 0", self.clip_norm)


@dataclass(frozen=True)
class TrainConfig(Settings):
    """Length, batch, seed and machine."""

    epochs: int | None = None
    """Passes over the images; derived from their number if not given."""
    batch_size: int | None = None
    """Images in a step; derived from their number if not given."""
    seed: int = 0
    """All randomness is a function of the seed, the epoch and the step."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Arithmetic of the networks; auto is bfloat16 on CUDA and on CPUs with AMX, float32 elsewhere."""
    engine: Literal["auto", "plain", "graph"] = "auto"
    """plain: eager, readable, the reference; graph: compiled, the whole step in one CUDA graph; auto: graph on CUDA."""
    shard: bool = False
    """Divide weights, gradients and moments among the processes of torchrun (FSDP2), for encoders that outgrow a card;
    the plain engine alone."""
    deterministic: bool = False
    """On a GPU, only kernels that give the same bits every time: slower, the plain engine alone. CPUs always do."""
    log_every: int | None = None
    """Steps between two lines of metrics.jsonl; about ten lines an epoch, at most every 50 steps, if not given."""
    checkpoint_every: int | None = None
    """Epochs between checkpoints; a tenth of the epochs if not given."""
    keep: int = 2
    """How many checkpoints keep decoder and optimizer for resuming; older ones keep the encoder alone."""
    track: Literal["none", "tensorboard", "wandb"] = "none"
    """Draw the metrics in TensorBoard or Weights & Biases (offline) too, in the run folder."""

    def __post_init__(self) -> None:
        for key in ("epochs", "batch_size", "log_every", "checkpoint_every", "keep"):
            _at_least(f"train.{key}", 1, getattr(self, key))
        _at_least("train.seed", 0, self.seed)
        for key in ("shard", "deterministic"):
            rule = f"plain or auto where train.{key} is on"
            require(not getattr(self, key) or self.engine != "graph", "train.engine", rule, self.engine)


@dataclass(frozen=True)
class ProbeConfig(Settings):
    """How the encoder is watched while it learns; labels are used for this alone."""

    every: int | None = None
    """Epochs between two looks; a tenth of the epochs if not given."""
    data: str | None = None
    """A labelled set to probe on, if not the one that is trained on: a name or a path."""

    def __post_init__(self) -> None:
        _at_least("probe.every", 1, self.every)


@dataclass(frozen=True)
class Config(Settings):
    """A whole pretraining run."""

    data: DataConfig = field(default_factory=DataConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    space: SpaceConfig = field(default_factory=SpaceConfig)
    masking: MaskingConfig = field(default_factory=MaskingConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    decoder: DecoderConfig = field(default_factory=DecoderConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    probe: ProbeConfig = field(default_factory=ProbeConfig)

    def __post_init__(self) -> None:
        pixels, masking, target = self.space.name == "pixels", self.masking, self.objective.target
        if pixels and masking.masked_variance is not None:
            raise UserError(
                "masking.masked_variance belongs to a space of components; "
                f"space.name is 'pixels', which takes masking.masked_patches (got {masking.masked_variance})"
            )
        if not pixels and masking.masked_patches is not None:
            raise UserError(
                "masking.masked_patches belongs to space.name 'pixels'; "
                f"space.name is {self.space.name!r}, which takes masking.masked_variance (got {masking.masked_patches})"
            )
        if target is not None and pixels != (target == "patches"):
            raise UserError(
                f"objective.target {target!r} does not fit space.name {self.space.name!r}; "
                + ("choices there: patches" if pixels else "choices there: components, pixels")
            )
        constant = self.space.name != "learned" or self.objective.scale == "constant"
        rule = "'constant' where space.name is 'learned', whose loss is relative to the hidden energy"
        require(constant, "objective.scale", rule, self.objective.scale)


def replace(config: Config, **dotted: Any) -> Config:
    """A copy with fields changed by dotted name, dots written as two underscores: `replace(c, train__epochs=3)`."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in dotted.items():
        section, _, name = key.partition("__")
        sections.setdefault(section, {})[name] = value
    changed = {s: dataclasses.replace(getattr(config, s), **values) for s, values in sections.items()}
    return dataclasses.replace(config, **changed)


def _ratio(parameter: str, value: float | None) -> None:
    """Refuse what is no share."""
    require(value is None or 0 < value < 1, parameter, "a share between 0 and 1, both excluded", value)


def _at_least(parameter: str, low: float, value: float | None) -> None:
    """Refuse what is below a bound."""
    require(value is None or value >= low, parameter, f"at least {low:g}", value)
