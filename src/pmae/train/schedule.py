"""The learning rate as a function of the position in training, in epochs."""

import math


def rate(schedule: str, position: float, epochs: int, warmup: float) -> float:
    """Fraction of the peak rate at `position` epochs (a real number: schedules move every step).

    cosine: linear from 0 over the warm-up, then half a cosine to 0. constant: the same warm-up, then 1.
    released: 10^-(warmup - epoch) while warming up, stepping once an epoch, then the cosine.
    """
    if schedule == "released":
        position = math.floor(position)
        if position < warmup:
            return float(10.0 ** -(warmup - position))
    elif position < warmup:
        return position / warmup
    if schedule == "constant":
        return 1.0
    remaining = max(epochs - warmup, 1e-9)
    return 0.5 * (1 + math.cos(math.pi * min((position - warmup) / remaining, 1.0)))
