"""The machine a run is on: which device, arithmetic and engine to use, and what to write down about it."""

import contextlib
import gc
import os
import platform
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from pmae.config import TrainConfig
from pmae.data.color import hues_of
from pmae.data.images import Splits, fingerprint
from pmae.errors import UserError, require
from pmae.system import STOPS, is_out_of_memory, keep_freed_memory

PACKAGES = ("pmae", "torch", "torchvision", "timm", "numpy", "scikit-learn")
BY_CALLBACK = 1000  # beyond all signals


def pick_device(name: str) -> torch.device:
    """The named device, or the first CUDA device, or the CPU, for whose work this process keeps what it frees."""
    name = ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
    known = re.fullmatch(r"(cpu|cuda)(:(0|[1-9]\d?))?|mps", name)
    require(known is not None, "train.device", "auto, cpu, cuda, cuda:N or mps", name)
    device = torch.device(name)
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not there[device.type]:
        raise UserError(f"train.device must be a device of this machine, got {name!r}; choices: auto, cpu")
    if device.type == "cpu":
        keep_freed_memory()
    return device


def pick_precision(name: str, device: torch.device) -> torch.dtype:
    """bfloat16 on CUDA and on CPUs with matrix units for it (AMX), where a step takes 0.5 to 0.8 of float32's time."""
    if name == "auto":
        has_amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
        return torch.bfloat16 if device.type == "cuda" or has_amx() else torch.float32
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def pick_engine(config: TrainConfig, device: torch.device, pixels: float = 0.0) -> str:
    """On CUDA a captured step, compiled for a run over many pixels, unless told otherwise or where a setting needs the
    plain one; it needs our kernels."""
    from pmae import fast  # and timm with it, seconds that those who ask for a device alone need not wait
    from pmae.fast.graph import COMPILE_FROM

    captures = fast.can_capture(device, config.kernels)
    if config.engine == "auto":
        fastest = "compiled" if pixels >= COMPILE_FROM else "graph"
        return fastest if captures and not config.needs_plain else "plain"
    if config.engine != "plain" and device.type != "cuda":
        told = f"train.engine {config.engine!r} must run on CUDA, got {device.type!r}"
        raise UserError(f"{told}; choices here: auto, plain")
    rule = f"plain or auto without Triton, or where {fast.VARIABLE} turns kernels off"
    require(config.engine == "plain" or captures, "train.engine", rule, config.engine)
    return config.engine


@contextlib.contextmanager
def same_bits(wanted: bool) -> Iterator[None]:
    """Inside, if wanted, no kernel whose bits depend on the order in which threads come; one without other fails."""
    if not wanted:
        yield
        return
    # Read when cuBLAS is first used: a workspace that streams do not share.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True):
            yield
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        said = str(error).partition(",")[0]
        raise UserError(f"train.deterministic must be off for these settings on this device: {said}") from error
    finally:
        torch.use_deterministic_algorithms(before)


@contextlib.contextmanager
def kept_precision() -> Iterator[None]:
    """Inside, the precision of matrix multiplications may be changed: what runs after this is not ours to change."""
    before = torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def steady_matmuls(precision: torch.dtype, device: torch.device) -> Iterator[None]:
    """Inside, a CPU without bfloat16 multiplies in one way, whatever this process did before.

    At the first bfloat16 matmul that oneDNN cannot do, torch turns oneDNN off for the rest of the process, and
    those of float32 round otherwise from then on.
    """
    has_bfloat16 = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    if device.type != "cpu" or not torch.backends.mkldnn.is_available() or has_bfloat16():
        yield
        return
    before = torch.backends.mkldnn.set_flags(precision == torch.float32)
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(before[0])


@contextlib.contextmanager
def memory_errors(config: TrainConfig, device: torch.device) -> Iterator[None]:
    """Name the batch size that failed and half of it, the next that fits where memory grows with the batch."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        half = (config.batch_size or 1) // 2
        advice = f"{half} would take half of the memory" if half else "make the encoder smaller"
        slower = ", and train.activation_checkpointing keeps the batch for a slower step"
        advice += "" if config.activation_checkpointing else slower
        said = f"train.batch_size must fit in the memory of {device}, got {config.batch_size}, which does not"
        raise UserError(f"{said}; {advice}{others_on(device)}") from error


def release_memory() -> None:
    """Give back what a run that has ended still holds, before the next one looks how much is free.

    A compiled step refers to itself: its model and graphs wait for the collector, and so does the memory they hold.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def others_on(device: torch.device) -> str:
    """What other processes hold of a GPU's memory, where it is enough to matter."""
    if device.type != "cuda":
        return ""
    free, total = torch.cuda.mem_get_info(device)
    theirs = total - free - torch.cuda.memory_reserved(device)
    return f"; other processes hold {theirs / 2**30:.0f} of its {total / 2**30:.0f} GiB" if theirs > total / 8 else ""


class StopSignal:
    """The number of the signal that asked a run to stop; 0 if none did, and `BY_CALLBACK` if a callback did."""

    number = 0
    reason = ""


@contextlib.contextmanager
def stop_signals() -> Iterator[StopSignal]:
    """Inside, Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 are noted instead of obeyed; one ignored, as by nohup, stays so."""
    stop = StopSignal()

    def note(number: int, _frame: object) -> None:
        stop.number = number

    caught = STOPS if threading.current_thread() is threading.main_thread() else []
    before = {each: signal.signal(each, note) for each in caught if signal.getsignal(each) != signal.SIG_IGN}
    try:
        yield stop
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def describe_environment(splits: Splits, device: torch.device) -> dict[str, Any]:
    """Versions, device, commit and data, for environment.json."""
    cuda, packages = device.type == "cuda", dict.fromkeys(PACKAGES, "not installed")
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            packages[name] = version(name)
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "packages": packages,
        "device": torch.cuda.get_device_name(device) if cuda else f"CPU, {torch.get_num_threads()} threads",
        "threads": torch.get_num_threads(),
        "commit": os.environ.get("PMAE_COMMIT") or _commit() or f"version {packages['pmae']}",
        "data": {
            "name": splits.name,
            "shape": list(splits.train.shape),
            "dtype": str(splits.train.images.dtype),
            "vectors": splits.train.vectors,
            "hues": hues_of(splits.train),
            "counts": {name: len(part) for name, part in splits.parts.items()},
            "classes": list(splits.train.classes),
            "unlabelled": [name for name, part in splits.parts.items() if part.labels is None],
            "notes": list(splits.notes),
            "fingerprint": fingerprint(splits),
        },
    }


def _commit() -> str | None:
    """The commit of the source tree, if the package runs from one; of a copy of it, PMAE_COMMIT may say it."""
    here = Path(__file__).resolve()
    command = ["git", "-C", str(here.parent), "describe", "--always", "--dirty", "--abbrev=12"]
    # Not of whatever repository an installed copy lies in, as in a .venv of another project.
    own = os.environ | {"GIT_CEILING_DIRECTORIES": str(here.parents[2].parent.parent)}
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True, env=own).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
