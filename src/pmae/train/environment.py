"""The machine a run is on: which device, arithmetic and engine to use, and what to write down about it."""

import contextlib
import errno
import os
import platform
import signal
import socket
import subprocess
import threading
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from pmae import fast
from pmae.config import TrainConfig
from pmae.data.images import ImageSet, Splits, fingerprint
from pmae.errors import UserError, require
from pmae.files import clear_stale, disk_errors, lives


def pick_device(name: str) -> torch.device:
    """The named device, or the first CUDA device, or the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"train.device must be auto, cpu, cuda or cuda:N, got {name!r}") from error
    require(device.type in ("cpu", "cuda"), "train.device", "auto, cpu, cuda or cuda:N", name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"train.device must be a device of this machine, got {name!r}; choices: auto, cpu")
    return device


def pick_precision(name: str, device: torch.device) -> torch.dtype:
    """bfloat16 on CUDA and on CPUs with matrix units for it (AMX), where a step takes 0.5 to 0.8 of float32's time."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" or _has_bf16_units() else torch.float32
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def _has_bf16_units() -> bool:
    """Whether this CPU multiplies matrices in bfloat16 (AMX)."""
    known = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return bool(known and known())


def pick_engine(config: TrainConfig, device: torch.device) -> str:
    """The graph engine on CUDA unless told otherwise, or where a setting needs the plain one; it needs our kernels."""
    if config.engine == "graph" and device.type != "cuda":
        raise UserError(f"train.engine 'graph' must run on CUDA, got {device.type!r}; choices here: auto, plain")
    captures = fast.can_capture(device, config.kernels)
    if config.engine == "graph" and not captures:
        rule = f"plain or auto without Triton, or where {fast.VARIABLE} turns kernels off"
        raise UserError(f"train.engine must be {rule}, got 'graph'")
    if config.engine == "auto":
        return "graph" if captures and not (config.shard or config.deterministic) else "plain"
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


def describe_environment(splits: Splits, device: torch.device) -> dict[str, Any]:
    """Versions, device, commit and data, for environment.json."""
    packages = ("pmae", "torch", "torchvision", "timm", "numpy", "scikit-learn")
    parts = {name: getattr(splits, name) for name in ("train", "val", "test")}
    cuda = device.type == "cuda"
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "packages": {name: _version(name) for name in packages},
        "device": torch.cuda.get_device_name(device) if cuda else f"CPU, {torch.get_num_threads()} threads",
        "threads": torch.get_num_threads(),
        "commit": _commit(),
        "data": {
            "name": splits.name,
            "shape": list(splits.train.shape),
            "dtype": str(splits.train.images.dtype),
            "counts": {name: len(part) for name, part in parts.items() if isinstance(part, ImageSet)},
            "classes": list(splits.train.classes),
            "notes": list(splits.notes),
            "fingerprint": fingerprint(splits),
        },
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except ModuleNotFoundError:
        return "not installed"


def _commit() -> str:
    """The commit of the source tree, if the package runs from one."""
    here = Path(__file__).resolve().parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


class StopSignal:
    """The number of the signal that asked a run to stop; 0 if none did."""

    number = 0


@contextlib.contextmanager
def stop_signals() -> Iterator[StopSignal]:
    """Inside, Ctrl-C, SIGTERM and SIGHUP (a closed terminal, a lost ssh) are noted instead of obeyed.

    Only the main thread may catch signals, and one that is ignored, as under nohup, stays so.
    """
    stop = StopSignal()

    def note(number: int, _frame: object) -> None:
        stop.number = number

    known = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    caught = known if threading.current_thread() is threading.main_thread() else []
    before = {each: signal.signal(each, note) for each in caught if signal.getsignal(each) != signal.SIG_IGN}
    try:
        yield stop
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


LOCK = ".lock"
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)
"""What a file system says that knows no locks."""


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[Callable[[], None]]:
    """Hold a folder, made if need be, so that one process at a time trains into it, and clear what a killed one left.

    Yields a check that refuses to go on when the folder was renamed, deleted or replaced meanwhile.
    """
    path = folder / LOCK
    with disk_errors(folder):
        made = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        handle = _held(path)

    def is_ours() -> bool:
        return path.exists() and os.path.samestat(os.fstat(handle), path.stat())

    def require_held() -> None:
        rule = "left where it is while a run trains into it; it was renamed, deleted or replaced, and training stops"
        require(is_ours(), "out", rule, str(folder))

    try:
        clear_stale(folder)
        clear_stale(folder / "checkpoints")
        yield require_held
    finally:
        # Taken away while it is still held, so that nobody else's is; Windows lets nobody take away an open file.
        ours = is_ours()
        if ours and os.name != "nt":
            path.unlink()
        os.close(handle)
        if ours:
            path.unlink(missing_ok=True)
        if made and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def _held(path: Path) -> int:
    """An open file that this process alone has locked, with the process written in it."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
        try:
            _lock(handle, path)
            # Between opening and locking, its last holder may have taken the file away: then it holds nothing.
            if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
                os.truncate(handle, 0)
                os.lseek(handle, 0, os.SEEK_SET)
                os.write(handle, f"{os.getpid()} on {socket.gethostname()}\n".encode())
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _lock(handle: int, path: Path) -> None:
    """By the system's lock, which it lets go of when the process dies; else by the process that the file names."""
    holder = os.read(handle, 200).decode(errors="replace").strip()
    try:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    except ImportError:
        number, _, host = holder.partition(" on ")
        alive = number.isdigit() and (host != socket.gethostname() or lives(int(number)))
        if not alive or number == str(os.getpid()):
            return
    except BlockingIOError:
        pass
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        warnings.warn(f"{str(path.parent)!r} cannot be locked: start no second process on it", stacklevel=2)
        return
    rule = f"a run that no other process is training, got {str(path.parent)!r}, held by process {holder or 'unknown'}"
    raise UserError(f"out must be {rule}")


HOST = ("can't allocate memory", "not enough memory")
"""How torch words it for the host's memory, where it has no exception of its own."""


class OutOfMemory(UserError):
    """A batch is too large for the memory there is."""


@contextlib.contextmanager
def memory_errors(batch_size: int, device: torch.device) -> Iterator[None]:
    """Name the batch size that failed and half of it, the next that fits where memory grows with the batch."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not (isinstance(error, torch.OutOfMemoryError | MemoryError) or any(words in str(error) for words in HOST)):
            raise
        smaller = max(batch_size // 2, 1)
        advice = f"{smaller} would take half of the memory" if smaller < batch_size else "make the encoder smaller"
        raise OutOfMemory(
            f"train.batch_size must fit in the memory of {device}, got {batch_size}, which does not; {advice}"
        ) from error
