"""The device under the clock: the limit of its matrix multiplications, its memory, and waiting for it."""

import contextlib
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

Steps = Callable[[int], None]
"""A function that takes so many training steps."""


NOMINAL = {"H200": 989e12, "H100 80GB HBM3": 989e12, "A100": 312e12}
"""Operations a second of dense bfloat16 matrix multiplications as makers state them, by a part of the card's name."""
PROCESS = 4 * 2**30
"""Bytes of the host's memory that a process with a card may take."""


def settle(device: torch.device) -> None:
    """What is the same for all on CUDA: the device, and float32 matrix multiplications that may round to TF32."""
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
        torch.set_float32_matmul_precision("high")


def memory(device: torch.device) -> int:
    """Bytes of a card."""
    return torch.cuda.get_device_properties(device).total_memory


def processes() -> int:
    """How many systems this host bears at once: two a core, if its memory holds them."""
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(2 * (os.cpu_count() or 1), host // PROCESS))


def nominal(device: torch.device, precision: str) -> float | None:
    """The limit that the maker states, if we know it."""
    if device.type != "cuda" or precision != "bfloat16":
        return None
    return next((value for key, value in NOMINAL.items() if key in torch.cuda.get_device_name(device)), None)


def wait(device: torch.device) -> None:
    """Until everything asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(steps: Steps, count: int, device: torch.device) -> float:
    """How long so many steps take."""
    wait(device)
    began = time.perf_counter()
    steps(count)
    wait(device)
    return time.perf_counter() - began


def limit(device: torch.device, precision: str, side: int | None = None, repeats: int = 5) -> float:
    """Operations a second of one large square product in some precision, the best of some."""
    cuda = device.type == "cuda"
    side = side or (8192 if cuda else 2048)
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    count = 20 if cuda else 1

    def gemms(number: int) -> None:
        for _ in range(number):
            a @ b

    settle(device)
    gemms(3)
    return 2 * side**3 * count / min(seconds(gemms, count, device) for _ in range(repeats))


def name_of(device: torch.device) -> str:
    """What the device is called."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s' if threads > 1 else ''}"


def forget_peak(device: torch.device) -> None:
    """Count the peak of the memory from now on, where the system lets us."""
    if device.type == "cuda":
        torch.cuda.init()  # its counters do not exist before
        torch.cuda.reset_peak_memory_stats(device)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(device: torch.device) -> int:
    """The most memory held since `forget_peak`: tensors on CUDA, the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return 1024 * int(line.split()[1])
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
