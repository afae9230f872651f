"""Settings that follow from the data: every `None` becomes a value, with the reason in words."""

import dataclasses
import math

from pmae.config import Config, DecoderConfig, EncoderConfig, replace
from pmae.errors import UserError, require

IMAGES_SEEN, SEEN_TWICE = 5_000_000, 7_500_000
"""How many a run sees; on a GPU with a second view of each, where longer runs pay."""
TOKENS_A_SIDE = 8
TOKENS_A_ROW = 12
FEWEST, MOST = 4, 64
"""Tokens of a signal that a derived patch may leave."""
BASE_LR, BOLD_LR, LARGE_BATCH = 1.5e-4, 6e-4, 512
"""The paper's rate, the one that suits a second view, and the batch from which they count."""
ENOUGH = 8 * LARGE_BATCH
"""From how many images on a second view is the default: the smallest set we tried has 7,007."""
PAIR = {
    "encoder.width": 96,
    "encoder.depth": 4,
    "encoder.heads": 6,
    "decoder.width": 96,
    "decoder.depth": 1,
    "decoder.heads": 6,
}
"""Networks for a machine without a GPU, where the paper's learn nothing in the time these need to learn something."""
UNORDERED = "columns of vectors have neither an order nor a unit in common"


def resolve(
    config: Config, count: int, shape: tuple[int, int, int], vectors: bool = False, gpu: bool = True
) -> tuple[Config, dict[str, str]]:
    """The configuration with nothing left open for `count` images (C, H, W), and a reason per derived setting."""
    require(count >= 2, "data", "at least 2 images", count)
    reasons: dict[str, str] = {}

    def settle(name: str, value: object, reason: str) -> None:
        nonlocal config
        section, key = name.split(".")
        if getattr(getattr(config, section), key) is None:
            config = replace(config, **{f"{section}__{key}": value})
            reasons[name] = reason

    pixels = config.space.name == "pixels"
    settle("objective.target", "patches" if pixels else "components", f"space.name is {config.space.name}")
    if config.masking.ratio_schedule == "fixed" and pixels:
        settle("masking.masked_patches", 0.75, "the usual share for patches")
    elif config.masking.ratio_schedule == "fixed":
        settle("masking.masked_variance", 0.2, "best or near best on every data set of the paper")
    if config.space.name in ("kernel_pca", "diffusion"):
        settle("space.landmarks", min(2048, count), f"2,048, or all of {count:,} images")
    if config.encoder.patch_size is None:
        patch = patch_for(*shape[1:])
        rows = max(1, shape[1] // patch)
        settle("encoder.patch_size", patch, f"{rows}x{shape[2] // patch} tokens of {shape[1]}x{shape[2]}")
    if not gpu and _networks_open(config):
        for name, size in PAIR.items():
            settle(name, size, "no GPU: small networks, unless you give a size of one")
    config = _overrule(config, shape, vectors, reasons)
    settle("objective.contrastive_weight", *contrast_for(config, count, shape))
    twice = bool(config.objective.contrastive_weight)
    settle("decoder.name", *decoder_for(twice, gpu))
    if twice and count >= ENOUGH:
        settle("train.batch_size", LARGE_BATCH, "many others, among which a view finds its partner")
    settle("train.batch_size", batch_for(count), f"about 64 steps an epoch of {count:,} images")
    settle("optim.base_lr", *base_lr_for(config.train.batch_size or 1, twice))
    # Without a GPU a second view halves the images, so that a run takes no longer for it.
    seen = IMAGES_SEEN if not twice else SEEN_TWICE if gpu else IMAGES_SEEN // 2
    settle("train.epochs", epochs_for(count, seen), f"about {seen:,} images seen, 10 to 800 epochs")
    if config.optim.warmup_steps is None:
        settle("optim.warmup_epochs", round(0.05 * (config.train.epochs or 0), 2), "5% of the epochs")
    settle("train.checkpoint_every", max(1, (config.train.epochs or 1) // 10), "a tenth of the epochs")
    settle("probe.every", max(1, (config.train.epochs or 1) // 10), "a tenth of the epochs")
    steps = max(1, count // (config.train.batch_size or 1))
    # Each line waits for the device: of a long run a thousand will do, and the ends of its epochs.
    apart = max(1, steps // 10, steps * (config.train.epochs or 1) // 1000)
    settle("train.log_every", min(50, apart), f"{steps} steps an epoch")
    _check(config, count)
    return config, reasons


def patch_for(height: int, width: int) -> int:
    """The divisor of both sides, 2 to 16, that comes closest to eight tokens along the shorter side.

    Where the image is one row, the divisor of its length that comes closest to twelve tokens, within 4 and 64.
    """
    if height == 1:
        return _patch_of_row(width)
    common = math.gcd(height, width)
    divisors = [p for p in range(2, 17) if common % p == 0 and p < min(height, width)]
    if not divisors:
        raise UserError(
            f"encoder.patch_size must divide the image's sides; {height}x{width} have no common divisor from 2 to 16: "
            f"set data.resize (say {max(8, round(min(height, width) / 8) * 8)}) or encoder.patch_size"
        )
    return min(divisors, key=lambda p: abs(math.log(min(height, width) / p / TOKENS_A_SIDE)))


def _patch_of_row(length: int) -> int:
    divisors = [p for p in range(1, length) if length % p == 0 and min(FEWEST, length) <= length // p <= MOST]
    if not divisors:
        below = length - length % FEWEST or FEWEST
        raise UserError(
            f"encoder.patch_size must divide the signal's length; no divisor of {length} leaves {FEWEST} to {MOST} "
            f"tokens: cut or pad the signals (to {below} or {below + FEWEST}, say) or set encoder.patch_size"
        )
    return min(divisors, key=lambda p: abs(math.log(length / p / TOKENS_A_ROW)))


def batch_for(count: int) -> int:
    """The largest power of two that makes 64 steps an epoch, within 16 and 512 and no more than the images."""
    power = 1 << int(math.log2(max(count / 64, 1)))
    return min(max(16, min(512, power)), count)


def contrast_for(config: Config, count: int, shape: tuple[int, int, int]) -> tuple[float, str]:
    """The weight of the second task, and why."""
    if shape[1] == 1 or not config.augment.crop:
        return 0.0, "no crops of images, so no two views of one"
    if count < ENOUGH:
        return 0.0, f"fewer than {ENOUGH:,} images: a second view is not tried there"
    return 1.0, "two views of an image find each other: better or level on every set we tried"


def decoder_for(twice: bool, gpu: bool) -> tuple[str, str]:
    """The decoder's size, and why."""
    if twice:
        return "small", "enough beside a second task"
    return ("released", "as in the authors' code") if gpu else ("small", "no GPU")


def base_lr_for(batch: int, twice: bool = False) -> tuple[float, str]:
    """The rate for a batch of 256, so that the peak rate of small batches is no lower than that of 512; and why."""
    peak = (BOLD_LR if twice else BASE_LR) * max(batch, LARGE_BATCH) / 256
    return float(f"{peak * 256 / batch:.3g}"), f"a peak rate of {peak:g} with batches of {batch}"


def epochs_for(count: int, seen: int = IMAGES_SEEN) -> int:
    """Enough epochs to see so many images."""
    return min(800, max(10, round(seen / count)))


def _networks_open(config: Config) -> bool:
    """Whether nothing at all was said about the sizes of the two networks."""
    plain = EncoderConfig(patch_size=config.encoder.patch_size)
    return config.encoder == plain and config.decoder == DecoderConfig()


def _overrule(config: Config, shape: tuple[int, int, int], vectors: bool, reasons: dict[str, str]) -> Config:
    """Defaults meant for images that mean nothing for data of one row; each change adds its reason."""
    rules: dict[str, tuple[object, str]] = {}
    if shape[1] == 1:
        rules["augment.flip"] = (False, "signals are rarely natural backwards")
    if vectors:
        rules |= {"augment.crop": (False, UNORDERED), "data.standardize": ("pixel", UNORDERED)}
    if shape[:2] == (1, 1) and config.encoder.patch_size == 1:
        rules["objective.normalize_patches"] = (False, "a patch of one number has no deviation")
    for name, (value, reason) in rules.items():
        section, key = name.split(".")
        if getattr(getattr(config, section), key) != value:
            config, reasons[name] = replace(config, **{f"{section}__{key}": value}), reason
    return config


def _check(config: Config, count: int) -> None:
    """Contradictions that only show once the data is known."""
    batch, epochs, warmup = config.train.batch_size or 1, config.train.epochs or 1, config.optim.warmup_epochs
    require(batch <= count, "train.batch_size", f"at most the number of training images ({count})", batch)
    require(warmup is None or warmup <= epochs, "optim.warmup_epochs", f"at most train.epochs ({epochs})", warmup)


def describe(config: Config, reasons: dict[str, str]) -> str:
    """The resolved settings as aligned lines, derived ones with their reason."""
    lines = []
    for section in dataclasses.fields(config):
        part = getattr(config, section.name)
        for entry in dataclasses.fields(part):
            name, value = f"{section.name}.{entry.name}", getattr(part, entry.name)
            reason = f"   <- {reasons[name]}" if name in reasons else ""
            if value is not None:
                lines.append(f"  {name:<29} {_plain(value)}{reason}")
    return "\n".join(lines)


def _plain(value: object) -> str:
    return " to ".join(map(str, value)) if isinstance(value, tuple) else str(value)
