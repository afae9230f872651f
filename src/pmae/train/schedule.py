"""Learning rates: by the position in training and by the depth of a parameter; and the seed of a step."""

import math
import re
from hashlib import blake2b

from pmae.config import OptimConfig

UNDECAYED = ("cls_token", "reg_token", "pos_embed")


def rate(schedule: str, position: float, epochs: int, warmup: float) -> float:
    """Fraction of the peak learning rate at `position` epochs (a real number: schedules move every step).

    cosine: linear from 0 over the warm-up, then half a cosine to 0. constant: the same warm-up, then 1.
    released: 10^-(warmup - epoch) while warming up, stepping once an epoch, then half a cosine of `epochs` epochs: it
    begins after the warm-up, so training ends before it reaches 0.
    """
    if schedule == "released":
        position = math.floor(position)
        if position < warmup:
            return float(10.0 ** -(warmup - position))
    elif position < warmup:
        return position / warmup
    if schedule == "constant":
        return 1.0
    length = epochs if schedule == "released" else max(epochs - warmup, 1e-9)
    return 0.5 * (1 + math.cos(math.pi * min((position - warmup) / length, 1.0)))


def learning_rate(config: OptimConfig, epoch: int, step: int, steps: int, epochs: int) -> float:
    """Fraction of the peak learning rate at `step` out of `steps` of an epoch, as the settings say."""
    # The released schedule steps once an epoch, so it is asked for the epoch that is running.
    position = epoch if config.schedule == "released" else epoch + (step + 1) / steps
    warmup = config.warmup_epochs if config.warmup_steps is None else config.warmup_steps / steps
    return rate(config.schedule, position, epochs, warmup or 0.0)


def step_seed(seed: int, epoch: int, step: int) -> int:
    """A 63-bit seed for one step of one epoch; neighbouring steps share nothing."""
    digest = blake2b(f"{seed}/{epoch}/{step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def layer_depths(names: list[str]) -> dict[str, int]:
    """How deep each parameter sits: embeddings 0, block i at i + 1, what follows them last; 0 for all but a ViT."""
    blocks = {name: re.search(r"(?:^|\.)blocks\.(\d+)\.", name) for name in names}
    last = max((int(found.group(1)) + 2 for found in blocks.values() if found), default=0)
    first = re.compile(r"patch_embed|norm_pre|" + "|".join(UNDECAYED))
    return {
        name: int(found.group(1)) + 1 if found else 0 if first.search(name) else last for name, found in blocks.items()
    }
