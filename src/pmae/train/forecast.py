"""What the fit of a space will take on this device: said before it starts, and refused where memory is too small."""

import time

import torch

from pmae.data.readers.memory import available_bytes
from pmae.errors import UserError
from pmae.spaces import Space

SIDE = 1024
QUICK, SOON = 1e11, 5.0
"""Operations and seconds below which there is nothing to say of a fit."""


def foretell_fit(space: Space, images: int, device: torch.device) -> str:
    """Refuse a fit that memory is too small for, with the bytes; of one that takes a while, a line that says so."""
    need, operations = space.fit_cost(images)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_bytes()
    what = f"the fit of space {space.config.name!r} to {images:,} images"
    if need > free:
        raise UserError(f"{what} needs {need:,} bytes, and {free:,} are free on {device}; {space.way_out}")
    seconds = operations / _speed(device) if operations > QUICK else 0.0
    if seconds < SOON:
        return ""
    about = (
        f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes" if seconds < 7200 else _hours(seconds)
    )
    return f"{what} takes about {about} and {need / 1e9:.1f} GB on {device}"


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:,.0f} hours"


def _speed(device: torch.device) -> float:
    """Operations a second of a product as fits do them: float64 on CUDA, float32 on a CPU; the better of two."""
    a = torch.ones(SIDE, SIDE, device=device, dtype=torch.float64 if device.type == "cuda" else torch.float32)
    float((a @ a)[0, 0])
    spent = []
    for _ in range(2):
        began = time.perf_counter()
        float((a @ a)[0, 0])
        spent.append(time.perf_counter() - began)
    return 2 * SIDE**3 / max(min(spent), 1e-9)
