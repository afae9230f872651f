"""One process at a time trains into a run folder; the system lets go of the lock when the process dies."""

import contextlib
import errno
import fcntl
import os
import shutil
import socket
import warnings
from collections.abc import Iterator
from pathlib import Path

from pmae.errors import UserError
from pmae.runs import disk_errors

NAME = ".lock"
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)
"""What a file system says that knows no locks."""


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder, made if need be, and clear what a killed process left half-written in it."""
    with disk_errors(folder):
        made = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        handle = _held(folder / NAME)
    try:
        _clear(folder)
        yield
    finally:
        # Taken away while it is still held, so that nobody else's is.
        (folder / NAME).unlink(missing_ok=True)
        os.close(handle)
        if made and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def _held(path: Path) -> int:
    """An open file that this process alone has locked, with the process written in it."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _lock(handle, path)
            # Between opening and locking, its last holder may have taken the file away: then it holds nothing.
            if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
                os.truncate(handle, 0)
                os.write(handle, f"{os.getpid()} on {socket.gethostname()}\n".encode())
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _lock(handle: int, path: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.read(handle, 200).decode(errors="replace").strip() or "unknown"
        raise UserError(
            f"out must be a run that no other process is training, got {str(path.parent)!r}, held by process {holder}"
        ) from error
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        warnings.warn(f"{str(path.parent)!r} cannot be locked: start no second process on it", stacklevel=2)


def _clear(folder: Path) -> None:
    """Remove temporary files whose process is gone; one that lives may be evaluating the run right now."""
    for part in [*folder.glob(".*.part"), *folder.glob("checkpoints/.*.part")]:
        number = part.name.split(".")[-2]
        if number.isdigit() and not _lives(int(number)):
            shutil.rmtree(part, ignore_errors=True) if part.is_dir() else part.unlink(missing_ok=True)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    # A number too large for a process, or somebody else's process.
    except (OverflowError, PermissionError):
        return True
    return True
