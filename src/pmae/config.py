"""Every setting of a run, typed, frozen and checked; `None` follows from the data. Also the command line, by tyro."""

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pmae.config_training import Name
from pmae.config_training import OptimConfig as OptimConfig
from pmae.config_training import ProbeConfig as ProbeConfig
from pmae.config_training import TrainConfig as TrainConfig
from pmae.errors import UserTypeError, require
from pmae.validation import (
    BelowOne,
    Count,
    NonNegative,
    Positive,
    Proportion,
    Rule,
    Settings,
    Share,
    WholeNumber,
    check_names,
)

Width = Annotated[int, Rule("from 1 to 65,536", lambda n: 1 <= n <= 65_536)]
Depth = Annotated[int, Rule("from 1 to 1,024", lambda n: 1 <= n <= 1_024)]
CropScale = Annotated[tuple[float, float], Rule("two increasing shares in (0, 1]", lambda s: 0 < s[0] <= s[1] <= 1)]
RatioRange = Annotated[tuple[float, float], Rule("two increasing shares in (0, 1)", lambda s: 0 < s[0] < s[1] < 1)]
KERNEL_SPACES = ["kernel_pca", "diffusion"]
SPACES_OF = {"patch": ["patch_pca"], "levels": ["wavelet"], "gamma": KERNEL_SPACES, "landmarks": KERNEL_SPACES}
SPACES_OF |= {"components": ["pca", "ica", "learned", *KERNEL_SPACES], "keep_rest": KERNEL_SPACES}
SPACES_OF |= {"wavelet": ["wavelet"], "rotate_towards": ["learned"]}
VIT_TINY = {"width": 192, "depth": 12, "heads": 12}
AtLeastTwo = Annotated[int, Rule("at least 2", lambda n: n >= 2)]
CropMode = Literal["center", "squash"]
Interpolation = Literal["bicubic", "bilinear"]
Layout = Literal["auto", "NHWC", "NCHW", "NCL", "ND"]


@dataclass(frozen=True)
class DataConfig(Settings):
    """Where the images come from and how they are laid out."""

    source: Name = "photos"
    """A named set, or the path of a folder, .npy or .npz file, or shards: tar, parquet or Arrow files, or a pattern."""
    root: str = "data"
    """Folder that holds the files of named sets."""
    layout: Layout = "auto"
    """Axis order of arrays: images, signals (NCL) or vectors (ND); auto tells them by their axes, or refuses."""
    labels: Literal["none", "folders"] = "none"
    """For a folder of images: whether its subfolders are classes."""
    resize: Count | None = None
    """Make every image of a folder or of shards a square of this side; if not given, images stay as they are, or become
    squares of at most 224 where their sizes differ or their short side is longer than 256."""
    crop_mode: CropMode = "center"
    """How they become square: the short side is resized and the centre kept, or both sides are resized."""
    crop_pct: Proportion = 1.0
    """The share of the resized sides that is kept: with 0.875 they are resized to 256 for squares of 224. Weights that
    are used as they are bring their own."""
    interpolation: Interpolation = "bicubic"
    """How files are resized, with antialiasing."""
    channels: Literal[1, 3] | None = None
    """Convert every image of a folder or of shards to this many channels; if not given, 3 where only some are in color,
    and without transparency where only some have it."""
    max_images: AtLeastTwo | None = None
    """For a quick try: so many images of the training part, drawn at random, the same for every seed; all if not given.
    Val and test parts stay whole; a set without them is split as if it had only these. Not for shards."""
    max_unreadable: WholeNumber = 10
    """How many unreadable files may be skipped before the run is refused."""
    standardize: Literal["channel", "pixel"] = "channel"
    """One mean and standard deviation per channel, or per pixel and channel (as the released code)."""
    keep_on: Literal["auto", "device", "host"] = "auto"
    """Where the images wait; auto: on the device if they fit in half of its free memory, and shards on the disk."""
    cache: Name | None = None
    """Folder that keeps the pixels of files from which crops are cut, decoded once for all runs; its size is foretold.
    If not given, they are kept in memory where they fit, and else decoded for every batch."""
    threads: Count | None = None
    """How many threads decode shards; as many as there are cores if not given. The batches do not depend on it."""


@dataclass(frozen=True)
class AugmentConfig(Settings):
    """Random resized crop and flip, one box per image, in whole batches on the device; vectors are left as they are."""

    crop: bool = True
    """Whether to crop at all."""
    crop_scale: CropScale = (0.2, 1.0)
    """Smallest and largest share of the image's area, or of a signal's length, that a crop keeps."""
    crop_from: Literal["file", "square"] = "file"
    """Cut crops, while pretraining, from the pixels of image files that are larger than the squares made of them, or
    from the squares: blurred and without what lies beside the centre, but in less memory."""
    interpolation: Interpolation = "bicubic"
    """How a crop is resized back to the full size."""
    flip: bool = True
    """Mirror half of the images left to right; never signals, which are rarely natural backwards."""
    extra: tuple[str, ...] | None = None
    """Augmentations that come after, in their order: color_jitter, grayscale, blur, solarize or registered ones, with
    options as name(option=value); if not given, on a GPU the first two for photographs, else none."""


@dataclass(frozen=True)
class SpaceConfig(Settings):
    """Where masking happens."""

    name: str = "pca"
    """The masking space: pca (PMAE), ica, learned, patch_pca, kernel_pca (KMAE), diffusion, cosine, fourier,
    wavelet, pixels (MAE), or a registered one: name or name(option=value). Images of more than 32,768 numbers take
    patch_pca instead of pca unless `components` are given, photographs cosine."""
    grouped: bool = False
    """Hide whole bands as one: rings of frequencies, wavelet subbands, or a component of patch_pca everywhere."""
    components: Count | None = None
    """How many leading components. For pca: the others are one more, the rest; all if not given, or 512 without a GPU
    beyond 1,024 numbers. For ica and learned: how many are recombined; at most 128 if not given. For kernel_pca and
    diffusion: as many as landmarks if not given."""
    gamma: Positive | None = None
    """For kernel_pca and diffusion: of the kernel exp(-gamma |x - y|^2); 1 / median |x - y|^2 if not given."""
    landmarks: Count | None = None
    """For kernel_pca and diffusion: images that carry the kernel; 2,048, or all where there are fewer, if not given."""
    keep_rest: bool = True
    """For kernel_pca and diffusion: keep the part of an image visible that the coefficients cannot express."""
    patch: Count | None = None
    """For patch_pca: side of a patch; the largest divisor of both sides up to 16 if not given."""
    wavelet: str = "db2"
    """For wavelet: haar or db2 to db8."""
    levels: Count | None = None
    """For wavelet: how often the image is halved; as often as both sides are even if not given."""
    rotate_towards: Literal["hard", "easy"] = "hard"
    """For learned: whether the basis turns to components that are hard or easy to predict from the others."""

    def check(self) -> None:
        for key, names in SPACES_OF.items():
            rule = f"left unset unless space.name is {' or '.join(map(repr, names))} (it is {self.name!r})"
            # Unset, each has the class's default.
            unset = getattr(self, key) == getattr(SpaceConfig, key)
            require(unset or self.name in names, f"space.{key}", rule, getattr(self, key))


@dataclass(frozen=True)
class MaskingConfig(Settings):
    """How much is hidden, and of what."""

    masked_variance: Share | None = None
    """Share of the variance to hide, in a space of components; 0.2 if not given."""
    masked_patches: Share | None = None
    """Share of the patches to hide, in pixel space; 0.75 if not given."""
    ratio_schedule: Literal["fixed", "uniform"] = "fixed"
    """One ratio for all batches, or a new one for each batch, uniform in `ratio_range`."""
    ratio_range: RatioRange = (0.1, 0.9)
    """Range of the uniform ratio."""
    per: Literal["image", "batch"] = "image"
    """One mask per image (ours), or one for the whole batch (the paper)."""
    prefix: Literal["closest", "shorter"] = "closest"
    """The prefix whose share is closest to the ratio, or the released code's, one component shorter."""
    enabled: bool = True
    """Hide anything at all: off, the encoder sees whole images, as in SimCLR."""


@dataclass(frozen=True)
class ObjectiveConfig(Settings):
    """What the prediction is compared with."""

    target: Literal["components", "pixels", "patches"] | None = None
    """Hidden components, the hidden image in pixels, or hidden patches; follows from the space if not given."""
    normalize_patches: bool = True
    """For patches: compare with pixels standardized within each patch (the text), or raw (the released default)."""
    scale: Literal["constant", "sum", "mean"] = "constant"
    """Divide by ratio x total variance, by nothing (the paper's norm), or by the batch's hidden count (released)."""
    loss: str = "squared"
    """How a prediction is compared: by its squared error, or a registered objective, name or name(option=value)."""
    reconstruction_weight: NonNegative = 1.0
    """Weight of predicting what is hidden; 0 leaves the contrastive loss alone, and the decoder untrained."""
    contrastive_weight: NonNegative | None = None
    """Weight of the loss between two crops of every image; 0 leaves it out (the paper); 1 for many images."""
    contrastive: str = "nt_xent"
    """The loss between the two crops: nt_xent (SimCLR); or, of one crop, the token at each position that a teacher has
    of the whole crop: data2vec (options momentum, layers), an EMA of the encoder, or distill(teacher='PATH'), a run or
    weights as for encoder.weights; or a registered one."""
    temperature: Positive = 0.2
    """For NT-Xent: its softmax temperature."""
    local_views: WholeNumber | None = None
    """For nt_xent and a ViT: so many windows of each crop, of half its patches a side, are to find the image's other
    crop too (multi-crop, Caron et al. 2020); none if not given, or 2 for photographs."""


@dataclass(frozen=True)
class EncoderConfig(Settings):
    """The encoder that is kept after pretraining."""

    name: str = "vit_tiny"
    """vit_tiny (192 wide, 12 blocks, 12 heads, as in the paper), any timm image model, or a registered encoder."""
    patch_size: Count | None = None
    """Side of a patch in pixels, or length in samples; derived from the data's size if not given."""
    width: Width | None = None
    """Width of vit_tiny's tokens; 192 if not given, or 96 without a GPU if no size of either network is given."""
    depth: Depth | None = None
    """Number of vit_tiny's blocks; 12 if not given, or 4 in the same case."""
    heads: Depth | None = None
    """Number of vit_tiny's attention heads; 12 if not given, or 3 in the same case."""
    init: Literal["xavier", "normal"] = "xavier"
    """Initial weights of vit_tiny: Xavier-uniform, as MAE; or N(0, 0.02), as the released code."""
    drop_path: BelowOne = 0.0
    """Stochastic depth of vit_tiny while it is pretrained: the chance that an image skips its last block's branches."""
    weights: str | None = None
    """Start from a run, or weights of timm or Hugging Face: a .safetensors or .pth file, a folder, or hf://USER/NAME."""
    first_patch_size: WholeNumber | None = None
    """Begin with patches of this side, a larger multiple of patch_size, for as many tokens as all of train.epochs will
    see: a run of its own in the folder first, whose rate is kept and whose networks go on; 0: no such stage. If not
    given, twice patch_size beside a contrastive loss, on a GPU with Muon, else 0."""

    def check(self) -> None:
        ours, rule = self.name == "vit_tiny", "left unset unless encoder.name is vit_tiny (a timm name has its own)"
        require(ours or not (self.width or self.depth or self.heads), "encoder.width, depth and heads", rule, self.name)
        require(ours or self.init == "xavier", "encoder.init", rule, self.init)
        require(ours or not self.drop_path, "encoder.drop_path", rule, self.drop_path)

    @property
    def in_words(self) -> str:
        """Its name, or the sizes of a vit_tiny that has others."""
        width, depth, heads = (getattr(self, key) or usual for key, usual in VIT_TINY.items())
        if self.name != "vit_tiny" or [width, depth, heads] == [*VIT_TINY.values()]:
            return self.name
        return f"ViT, {width} wide, {depth} block{'s' * (depth > 1)}, {heads} head{'s' * (heads > 1)}"


@dataclass(frozen=True)
class DecoderConfig(Settings):
    """The decoder that is thrown away after pretraining."""

    name: Literal["released", "text", "small"] | None = None
    """released: 512 wide, 8 blocks, 16 heads; text: 192, 12, 12; small: 192, 4, 12. Derived if not given."""
    width: Width | None = None
    """Overrides the named width."""
    depth: Depth | None = None
    """Overrides the named number of blocks."""
    heads: Depth | None = None
    """Overrides the named number of heads."""
    init: Literal["xavier", "normal"] = "xavier"
    """Initial weights: Xavier-uniform, as MAE; or N(0, 0.02), as the released code."""


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

    @property
    def method(self) -> Literal["pmae", "mae"]:
        """pmae where components are hidden, mae where patches are."""
        return "mae" if self.space.name == "pixels" else "pmae"

    def check(self) -> None:
        space, masking, target = self.space.name, self.masking, self.objective.target
        pixels = self.method == "mae"
        wrong, right = ("masked_variance", "masked_patches") if pixels else ("masked_patches", "masked_variance")
        value, rule = getattr(masking, wrong), f"left unset where space.name is {space!r}, which takes masking.{right}"
        require(value is None, f"masking.{wrong}", rule, value)
        rule = f"{'patches' if pixels else 'components or pixels'} where space.name is {space!r}"
        require(target is None or pixels == (target == "patches"), "objective.target", rule, target)
        predicts = self.objective.reconstruction_weight > 0
        rule = "above 0 where objective.contrastive_weight is 0: something must be learned"
        require(predicts or self.objective.contrastive_weight != 0, "objective.reconstruction_weight", rule, 0)
        rule = "true unless objective.reconstruction_weight is 0 and components are hidden, not patches"
        require(masking.enabled or not (predicts or pixels), "masking.enabled", rule, masking.enabled)
        constant = self.space.name != "learned" or self.objective.scale == "constant"
        rule = "'constant' where space.name is 'learned', whose loss is relative to the hidden energy"
        require(constant, "objective.scale", rule, self.objective.scale)


def require_config(config: object) -> None:
    """Refuse what is no `Config`, such as a dictionary."""
    if not isinstance(config, Config):
        got = type(config).__name__
        raise UserTypeError(f"config must be a pmae.Config (see pmae.config_file.from_dict), got a {got}")


def replace(config: Config, **dotted: Any) -> Config:
    """A copy with fields changed by dotted name, dots written as two underscores: `replace(c, train__epochs=3)`."""
    require_config(config)
    sections: dict[str, dict[str, Any]] = {}
    for key, value in dotted.items():
        section, _, name = key.partition("__")
        check_names(Config, [section])
        sections.setdefault(section, {})[name] = value
    changed = {s: dataclasses.replace(getattr(config, s), **values) for s, values in sections.items()}
    return dataclasses.replace(config, **changed)
