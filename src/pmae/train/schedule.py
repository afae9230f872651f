"""What depends on the position in training alone: the learning rate and the seed of a step."""

import math
from hashlib import blake2b

from pmae.config import OptimConfig


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


def rate_of_step(config: OptimConfig, step: int, steps: int, epochs: int) -> float:
    """Fraction of the peak learning rate for step `step`, the first being 0, of `steps` an epoch."""
    warmup = config.warmup_epochs if config.warmup_steps is None else config.warmup_steps / steps
    # The released schedule steps once an epoch, so it is asked for the epoch that is running.
    now = step // steps if config.schedule == "released" else step // steps + (step % steps + 1) / steps
    if config.schedule == "cosine" and steps * epochs == 1:
        now = 0.5  # at its end, which is that of the run, a single step would have a rate of 0 and train nothing
    return rate(config.schedule, now, epochs, warmup or 0.0)


def step_seed(seed: int, epoch: int, step: int) -> int:
    """A 63-bit seed for one step of one epoch; neighbouring steps share nothing."""
    digest = blake2b(f"{seed}/{epoch}/{step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
