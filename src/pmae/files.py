"""Files written whole or not at all, read or refused in one sentence, and changed by one process at a time."""

import argparse
import contextlib
import errno
import glob
import hashlib
import json
import os
import platform
import re
import secrets
import shutil
import signal
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pmae.errors import UserError, first_line, require
from pmae.system import ENDS, flush, lives, take_lock

if TYPE_CHECKING:  # what only reads JSON does without torch
    from torch import Tensor

REASONS = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "the disk is full"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ELOOP), "it cannot be written"),
    errno.EEXIST: "a file is in its place",
    errno.EISDIR: "a folder is in its place",
    errno.ENOENT: "its folder is gone, or takes no files",
    errno.EFBIG: "a file may not grow this large",
    errno.ENAMETOOLONG: "its name is too long",
}
"""Why a file cannot be written, in words."""
LONGEST, LONGEST_PATH = 255, 3900  # bytes of a file's name, and of a folder's path so that its files' paths still fit
STATE_DICTS = ("model", "state_dict")
"""Under which MAE, DeiT and timm keep weights in files with more than those."""
HOST = f"{zlib.crc32(platform.node().encode()):08x}"
"""Stands for this machine in the names of temporary files: on a shared disk, only their own can tell who lives."""


def folder_path(given: Path | str, parameter: str = "out") -> Path:
    """A path that a person wrote, with `~` expanded; refused where no file system could take it."""
    require(str(given) != "" and "://" not in str(given), parameter, "a path on this machine", str(given))
    path = Path(given).expanduser()
    longest, whole = max((len(os.fsencode(part)) for part in path.parts), default=0), len(os.fsencode(path))
    require(longest <= LONGEST, parameter, f"a path of names of at most {LONGEST} bytes", f"one of {longest}")
    require(whole <= LONGEST_PATH, parameter, f"a path of at most {LONGEST_PATH:,} bytes", f"one of {whole:,}")
    for each in (path, *path.parents):
        dangling = each.is_symlink() and not each.exists()
        require(not dangling, parameter, "a path whose links lead somewhere", str(each))
    return path


def require_empty(path: Path) -> None:
    """Refuse a folder that holds anything, and a file in its place."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"out must be a new or an empty folder, got {str(path)!r}")


def read_json(path: Path) -> Any:
    """A JSON file, or an error that names it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"file must exist, got {str(path)!r}") from error
    # Numbers too long and nesting too deep are not JSONDecodeErrors.
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"file must be readable JSON, got {str(path)!r}: {error}") from error


def read_object(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise UserError(f"file must hold a JSON object, got {str(path)!r}")
    return value


def read_tensors(path: Path, prefix: str = "") -> dict[str, "Tensor"]:
    """Tensors of a safetensors file whose names start with `prefix`, without it; checked if it carries a checksum."""
    from safetensors.torch import load

    try:
        # Read, not memory-mapped: a mapped file that is cut short later kills the process without a message.
        data = path.read_bytes()
        tensors = load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        stated = header.get("__metadata__", {}).get("blake2b")
    # Beside its own error, the format's library lets out whatever an odd header trips over (KeyError, AssertionError).
    except Exception as error:
        raise UserError(f"file must be a readable safetensors file, got {str(path)!r}: {error}") from error
    if stated is not None and stated != tensors_digest(tensors):
        raise UserError(f"file must be as it was written, got {str(path)!r}, whose checksum differs: it is damaged")
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def read_torch(path: Path) -> dict[str, "Tensor"]:
    """Tensors of a state dict that `torch.save` wrote, alone or under a usual name; code in the file is not run."""
    import torch

    try:
        # MAE and DeiT keep their arguments beside the weights, which are words and numbers.
        with torch.serialization.safe_globals([argparse.Namespace]):
            found = torch.load(path, "cpu", weights_only=True)
    except Exception as error:
        told = f"{str(path)!r}: {first_line(error)}"
        raise UserError(f"file must hold tensors that torch.save wrote, got {told}") from error
    if isinstance(found, dict):
        found = next((found[key] for key in STATE_DICTS if isinstance(found.get(key), dict)), found)
    plain = isinstance(found, dict) and all(isinstance(value, torch.Tensor) for value in found.values())
    rule = f"a state dict, alone or under {' or '.join(STATE_DICTS)}"
    require(plain, f"file {str(path)!r}", rule, type(found).__name__)
    return {str(key).removeprefix("module."): value.contiguous() for key, value in found.items()}


def tensors_digest(tensors: Mapping[str, "Tensor"]) -> str:
    """A checksum of names, kinds, shapes and values."""
    import torch

    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def write_tensors(path: Path, tensors: Mapping[str, "Tensor"]) -> None:
    """Write a safetensors file, whole or not at all, that carries a checksum of its own content."""
    from safetensors.torch import save_file

    whole = {key: value.contiguous() for key, value in tensors.items()}
    seal = {"blake2b": tensors_digest(whole)}
    write_whole(path, lambda temporary: save_file(whole, temporary, seal))


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that a reader sees the old file or the new one, never half of one."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def write_text(path: Path, text: str) -> Path:
    write_whole(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
    return path


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file or folder beside `path`, flush it to the disk and rename it into place."""
    # Nobody can guess its name and plant a link there; what a killed process left is cleared by the next writer.
    token = secrets.token_hex(4)
    temporary = path.with_name(f".{path.name[:50]}.{HOST}-{token}.{os.getpid()}.part")
    with disk_errors(path), ending_in_order():
        clear_stale(path.parent, f".{path.name[:50]}.")
        try:
            # The permissions that the umask leaves to a new file; safetensors would make its files private.
            temporary.touch(exist_ok=False)
            mode = temporary.stat().st_mode & 0o777
            temporary.unlink()
            write(temporary)
            for part in [*temporary.rglob("*"), temporary] if temporary.is_dir() else [temporary]:
                if part.is_file():
                    part.chmod(mode)
                flush(part)
            if path.is_dir() and temporary.is_dir():  # a file never takes the place of a folder: that is an error
                shutil.rmtree(path)
            os.replace(temporary, path)
            flush(path.parent)
        finally:
            _remove(temporary)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def clear_stale(folder: Path, prefix: str = ".") -> None:
    """Remove temporary files whose process on this machine is gone; one that lives is still writing."""
    for part in folder.glob(f"{glob.escape(prefix)}*.part"):
        *_, whose, number, _suffix = ["", *part.name.split(".")]
        here = HOST in whose or "-" not in whose  # older versions did not name the machine
        if number.isdigit() and here and not lives(int(number)):
            with contextlib.suppress(OSError):
                _remove(part)


@contextlib.contextmanager
def ending_in_order() -> Iterator[None]:
    """Inside, SIGTERM, SIGHUP and SIGUSR1 end the program as exceptions do, so that what is half-written is removed."""

    def leave(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    # Handlers that others set, as training does, stay; and only the main thread may set any.
    main = threading.current_thread() is threading.main_thread()
    plain = [each for each in ENDS if main and signal.getsignal(each) == signal.SIG_DFL]
    for each in plain:
        signal.signal(each, leave)
    try:
        yield
    finally:
        for each in plain:
            signal.signal(each, signal.SIG_DFL)


@contextlib.contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """A folder that goes however its use ends, by the signals that end a program too."""
    with ending_in_order(), tempfile.TemporaryDirectory(prefix=prefix) as folder:
        yield Path(folder)


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """Inside, no other process is in here for the same path; waits its turn, and a process that dies lets go."""

    def wait(handle: int) -> None:
        with contextlib.suppress(ImportError, OSError):  # a system or a file system without locks
            take_lock(handle, wait=True)

    with locked_file(path.with_name(f".{path.name}.lock"), wait):
        yield


@contextlib.contextmanager
def locked_file(path: Path, take: Callable[[int], None]) -> Iterator[int]:
    """Hold an open file that `take` locks; it is removed afterwards."""
    while True:
        with disk_errors(path):
            handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
        try:
            with disk_errors(path):
                take(handle)
            # Its last holder may have removed the file between opening and locking: then it holds nothing.
            if is_at(handle, path):
                try:
                    yield handle
                finally:  # while it is still held, so that it is nobody else's
                    with contextlib.suppress(PermissionError):  # Windows removes no open file; it may stay
                        if is_at(handle, path):
                            path.unlink()
                return
        finally:
            os.close(handle)


def is_at(handle: int, path: Path) -> bool:
    """Whether an open file is still the one at this path."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Say in one sentence that the disk is full or the folder cannot be written."""
    try:
        yield
    except Exception as error:
        # Rust's errors, such as those of safetensors, carry the number in their text alone.
        told = re.search(r"os error (\d+)", str(error))
        number = int(told[1]) if told else getattr(error, "errno", None)
        if number not in REASONS:
            raise
        reason = f"failed because {REASONS[number]}; what was there before is intact"
        raise UserError(f"writing {str(path)!r} {reason}") from error
