"""Settings that follow from the data and the machine: a table of rules, each with its reason."""

import math
from collections.abc import Callable
from typing import NamedTuple

from pmae.config import KERNEL_SPACES, Config, MaskingConfig, ObjectiveConfig, replace
from pmae.derive_case import ITS_BATCH, LARGE_BATCH, PHOTOGRAPH, Case
from pmae.errors import UserError, require
from pmae.plugins import sources

TOKENS_A_SIDE, TOKENS_A_ROW, FEWEST_TOKENS, MOST_TOKENS = 8, 12, 4, 64
ADAPTING_RATE, ADAPTING_DECAY = 0.1, 0.75
"""Of an encoder that starts from given weights: its share of the rate, and that of each block of the next one's."""
MANY_IMAGES = 8 * LARGE_BATCH
"""From how many images on the contrastive loss is the default: the smallest set we tried has 7,007."""
EXACT_ON_CPU, LEADING = 1024, 512
"""Numbers of an image from which all of its principal components cost a CPU too much, and how many are kept there: of
32x32x3 a step with patches of 8 takes 1.8 instead of 2.4 s, and at 64x64x3 the fit 0.3 instead of 4.8 GB."""
WHOLE_IMAGES = 2**15
"""Numbers of an image up to which components of whole images are the default: fitting all D takes 32 D^2 bytes, 24 GB
at 96x96x3 and 725 GB at 224x224x3, while those of patches take megabytes and come out level (`results/spaces.md`)."""
SMALL_NETWORKS = {"encoder.width": 96, "encoder.depth": 4, "encoder.heads": 3}
SMALL_NETWORKS |= {"decoder.width": 96, "decoder.depth": 1, "decoder.heads": 3}
"""For a machine without a GPU, where the paper's networks learn nothing in the time these need to learn something."""
BATCH_ON_CPU = 128
"""Of two views of images with as many pixels as photographs: 512 of 224 pixels take 17 GB."""
UNORDERED = "columns of vectors have neither an order nor a unit in common"


class Rule(NamedTuple):
    """A setting that is not given becomes `value` where the rule applies; one that `overrules`, given or not."""

    setting: str
    when: Callable[[Case], bool] | None
    value: object
    """Itself, or a function of the case."""
    reason: str
    """Printed, with the case as `c`; nothing, where it is so for most."""
    overrules: bool = False


# A rule sees what those above it settled; of several for one setting the first that applies counts.
RULES = (
    Rule("augment.flip", lambda c: c.shape[1] == 1, False, "signals are rarely natural backwards", overrules=True),
    Rule("augment.crop", lambda c: c.vectors, False, UNORDERED, overrules=True),
    Rule("data.standardize", lambda c: c.vectors, "pixel", UNORDERED, overrules=True),
    Rule("objective.contrastive_weight", lambda c: c.shape[1] == 1 or not c.config.augment.crop, 0.0,
         "no crops of images, so no two views of one"),
    # Whoever names another contrastive loss wants it.
    Rule("objective.contrastive_weight", lambda c: c.count < MANY_IMAGES
         and c.config.objective.contrastive == ObjectiveConfig().contrastive, 0.0,
         f"fewer than {MANY_IMAGES:,} images: two views are not tried there"),
    Rule("objective.contrastive_weight", None, 1.0,
         "two views of an image find each other: better or level on every set we tried"),
    Rule("augment.extra", lambda c: c.distorts_colors is True, ("color_jitter", "grayscale"),
         "or colors alone would tell which crops belong together; --augment.extra without a name adds none"),
    Rule("augment.extra", lambda c: c.distorts_colors is False, (),
         "hues are alike ({c.hues:.2f} of 1), unlike those of photographs, which color_jitter grayscale helps"),
    Rule("augment.extra", None, (), ""),
    Rule("objective.local_views", lambda c: c.photographs and c.takes_windows, 2,
         "8 points, linear and by k-NN, on photographs after thirty epochs; 4 are a little better and take longer"),
    Rule("objective.local_views", lambda c: c.distorts_colors is True and c.takes_windows, 2,
         "2 points linear, 4 by k-NN, on small photographs after thirty epochs, for a third more work"),
    Rule("objective.local_views", None, 0, ""),
    Rule("space.name", lambda c: c.photographs and c.whole_pca, "cosine",
         "nothing to fit, and on photographs level with patch_pca or better", overrules=True),
    Rule("space.name", lambda c: c.whole_pca and c.pixels > WHOLE_IMAGES and c.shape[1] > 1, "patch_pca",
         "all {c.pixels:,} components of whole images would take {c.fit_gigabytes:,.0f} GB to fit, those of patches "
         "megabytes; space.components 1024 keeps pca, with as many leading ones", overrules=True),
    Rule("objective.target", lambda c: c.patches, "patches", "space.name is pixels"),
    Rule("objective.target", None, "components", "space.name is {c.config.space.name}"),
    Rule("masking.masked_patches", lambda c: c.patches and c.fixed, 0.75, "the usual share for patches"),
    Rule("masking.masked_variance", lambda c: not c.patches and c.fixed and c.config.masking.enabled, 0.2,
         "best or near best on every data set of the paper"),
    Rule("space.landmarks", lambda c: c.config.space.name in KERNEL_SPACES, lambda c: min(2048, c.count),
         "2,048, or all of {c.count:,} images"),
    # The paper's losses (sum, mean) are over all components, so its recipes keep the exact basis.
    Rule("space.components", lambda c: not (c.gpu or c.settled) and c.pixels > EXACT_ON_CPU
         and c.config.space.name == "pca" and c.config.objective.scale == "constant", LEADING,
         "no GPU, where mapping to all {c.pixels:,} would take much of the time; {c.pixels} keeps all"),
    Rule("encoder.patch_size", None, lambda c: patch_for(*c.shape[1:]),
         "{c.grid[0]}x{c.grid[1]} tokens of {c.shape[1]}x{c.shape[2]}"),
    Rule("encoder.first_patch_size", lambda c: c.takes_stages, lambda c: 2 * (c.config.encoder.patch_size or 1),
         "large patches first teach most for the time: 6 points on CIFAR-10; 0 leaves them out"),
    Rule("encoder.first_patch_size", None, 0, ""),
    *(Rule(name, lambda c: not c.gpu and c.networks_open, size, "no GPU: small networks, unless you give a size of one")
      for name, size in SMALL_NETWORKS.items()),
    Rule("objective.normalize_patches", lambda c: c.shape[0] == c.config.encoder.patch_size == 1, False,
         "a patch of one number has no standard deviation", overrules=True),
    Rule("decoder.name", lambda c: c.two_views, "small", "enough beside a contrastive loss"),
    Rule("decoder.name", lambda c: c.gpu, "released", "as in the authors' code"),
    Rule("decoder.name", None, "small", "no GPU"),
    Rule("train.batch_size", lambda c: c.photographs and c.count >= ITS_BATCH, ITS_BATCH,
         "what photographs were measured with"),
    Rule("train.batch_size", lambda c: not c.gpu and c.two_views and min(c.shape[1:]) >= PHOTOGRAPH
         and c.count >= MANY_IMAGES, BATCH_ON_CPU, "no GPU: 512 large images would take some 17 GB"),
    Rule("train.batch_size", lambda c: c.two_views and c.count >= MANY_IMAGES, LARGE_BATCH,
         "many others, among which a view finds its partner"),
    Rule("train.batch_size", None, lambda c: batch_for(c.count),
         "about 64 steps an epoch of {c.count:,} images, 16 to 512 a step"),
    Rule("optim.name", lambda c: c.takes_muon, "muon",
         "ahead of adamw on CIFAR-10, skin and blood cells, by 6 points to none, and on photographs by 10 beside large "
         "patches first"),
    Rule("optim.name", None, "adamw", ""),
    Rule("optim.base_lr", None, lambda c: float(f"{c.peak_lr * 256 / c.batch:.3g}"),
         "a peak rate of {c.peak_lr:g} with batches of {c.batch}"),
    # The decoder is new and must learn; at its rate good weights would be gone before it has anything to teach.
    Rule("optim.encoder_rate", lambda c: c.adapts, ADAPTING_RATE, "given weights must hardly change"),
    Rule("optim.layer_decay", lambda c: c.adapts, ADAPTING_DECAY, "early blocks of given weights serve any images"),
    Rule("optim.encoder_rate", lambda c: c.goes_on, 1.0, "its weights learned from these very images, and go on"),
    Rule("optim.layer_decay", lambda c: c.goes_on, 1.0, ""),
    Rule("train.epochs", None, lambda c: min(800, max(10, round(c.images_seen / c.count))),
         "about {c.images_seen:,} images seen, 10 to 800 epochs; --minutes sets a time instead"),
    Rule("optim.warmup_epochs", lambda c: (c.adapts or c.goes_on) and c.config.optim.warmup_steps is None,
         lambda c: round(0.2 * c.epochs, 2), "20% of the epochs, as the encoder has learned before"),
    Rule("optim.warmup_epochs", lambda c: c.config.optim.warmup_steps is None, lambda c: round(0.05 * c.epochs, 2),
         "5% of the epochs"),
    Rule("train.checkpoint_every", None, lambda c: tenth(c.epochs), "a tenth of the epochs"),
    Rule("probe.every", None, lambda c: tenth(c.epochs), "a tenth of the epochs"),
    # Each line waits for the device: of a long run a thousand will do, and the ends of its epochs.
    Rule("train.log_every", None, lambda c: min(50, max(1, c.steps // 10, c.steps * c.epochs // 1000)),
         "{c.steps} steps an epoch"),
    Rule("train.plugins", None, lambda c: sources(c.config), "whose code the run uses", overrules=True),
)  # fmt: skip


def resolve(
    config: Config,
    count: int,
    shape: tuple[int, int, int],
    vectors: bool = False,
    gpu: bool = True,
    dtype: str = "uint8",
    hues: float | None = None,
    goes_on: bool = False,
) -> tuple[Config, dict[str, str]]:
    """The configuration with nothing left open for `count` images (C, H, W), and a reason per derived setting.

    `hues` tells how alike their hues are, from 0 to 1 (`pmae.data.color.hue_concentration`), where it is known; an
    encoder `goes_on` if its weights are those of a run on the same images.
    """
    require(count >= 2, "data", "at least 2 images", count)
    _require_used(config.masking)
    case, reasons = Case(config, count, shape, vectors, gpu, dtype, hues, goes_on), dict[str, str]()
    for rule in RULES:
        section, key = rule.setting.split(".")
        now = getattr(getattr(case.config, section), key)
        if (now is not None and not rule.overrules) or (rule.when and not rule.when(case)):
            continue
        if (value := rule.value(case) if callable(rule.value) else rule.value) != now:
            case.config = replace(case.config, **{f"{section}__{key}": value})
            reasons |= {rule.setting: rule.reason.format(c=case)} if rule.reason else {}
    warmup, images = case.config.optim.warmup_epochs or 0, f"at most the number of training images ({count})"
    require(case.batch <= count, "train.batch_size", images, case.batch)
    if first := case.config.encoder.first_patch_size:
        patch = case.config.encoder.patch_size or 1
        fits = shape[1] > 1 and first > patch and not (first % patch or shape[1] % first or shape[2] % first)
        sides = f"a larger multiple of encoder.patch_size ({patch}) that divides images of {shape[1]}x{shape[2]}"
        require(fits, "encoder.first_patch_size", sides, first)
    require(warmup <= case.epochs, "optim.warmup_epochs", f"at most train.epochs ({case.epochs})", warmup)
    return case.config, reasons


def _require_used(masking: MaskingConfig) -> None:
    """Refuse a share to hide where another one is drawn for each batch, or nothing is hidden."""
    why = "it is drawn from masking.ratio_range (masking.ratio_schedule is uniform)" if masking.enabled else None
    why = why or "nothing is hidden (masking.enabled is off)"
    for name in ("masked_variance", "masked_patches"):
        value, used = getattr(masking, name), masking.enabled and masking.ratio_schedule == "fixed"
        require(used or value is None, f"masking.{name}", f"left unset (None) where {why}", value)


def tenth(epochs: int) -> int:
    """After how many epochs a run is saved and looked at, ten times or a few more."""
    return max(1, epochs // 10)


def batch_for(count: int) -> int:
    """The largest power of two that makes 64 steps an epoch, within 16 and 512 and no more than the images."""
    power = 1 << int(math.log2(max(count / 64, 1)))
    return min(max(16, min(LARGE_BATCH, power)), count)


def patch_for(height: int, width: int) -> int:
    """The divisor of both sides, 2 to 16, nearest to eight tokens on the shorter; nearest to twelve on a signal."""
    if height == 1:
        side, tokens, fewest, most = width, TOKENS_A_ROW, FEWEST_TOKENS, MOST_TOKENS
        divisors = [p for p in range(1, width) if width % p == 0 and min(fewest, width) <= width // p <= most]
        below = width - width % fewest or fewest
        wrong = f"the signal's length; no divisor of {width} leaves {fewest} to {most} tokens: cut or pad the signals "
        wrong += f"(to {below} or {below + fewest}, say)"
    else:
        side, tokens = min(height, width), TOKENS_A_SIDE
        divisors = [p for p in range(2, 17) if height % p == width % p == 0 and p < side]
        wrong = f"the image's sides; {height}x{width} have no common divisor from 2 to 16: crop or resize them "
        wrong += f"(files by data.resize {max(8, round(side / 8) * 8)}, say)"
    if not divisors:
        raise UserError(f"encoder.patch_size must divide {wrong} or set encoder.patch_size")
    return min(divisors, key=lambda p: abs(math.log(side / p / tokens)))
