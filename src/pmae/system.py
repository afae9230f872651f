"""What differs between Linux, macOS and Windows, in one place: locks, signals, processes, memory and cores."""

import ctypes
import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

STOPS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name)]
"""Signals that ask a run to stop: Ctrl-C, the end of a session or a machine, and a scheduler's warning before it."""
ENDS = [each for each in STOPS if each != signal.SIGINT]
"""Those of them that end a program without an exception."""
NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")
"""How torch, CUDA and Triton word it, who have no exception in common."""
BEYOND = 2**30  # a byte to lock on Windows, behind all that is written: locked ones cannot be read there


def take_lock(handle: int, wait: bool) -> None:
    """Lock an open file, which the system unlocks when the process ends; BlockingIOError if another has it.

    ImportError or an OSError with ENOSYS or the like: this system, or its file system, knows no locks.
    """
    if sys.platform == "win32":
        import msvcrt

        os.lseek(handle, BEYOND, os.SEEK_SET)
        try:
            # Waiting gives up after ten seconds.
            msvcrt.locking(handle, msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
        except OSError as error:
            if not (wait and error.errno == errno.EDEADLK):
                raise BlockingIOError(errno.EWOULDBLOCK, "locked") from error
            take_lock(handle, wait)
        finally:
            os.lseek(handle, 0, os.SEEK_SET)
    else:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))


def lives(process: int) -> bool:
    """Whether there is a process of this number on this machine; where that cannot be told, yes."""
    if os.name == "nt":  # where signal 0 would interrupt the process instead of asking
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OverflowError, PermissionError):  # a number too large for a process, or somebody else's process
        pass
    return True


def end_family(process: "subprocess.Popen[str]") -> None:
    """End a process that began a session, and all that it started; on Windows itself alone."""
    os.killpg(process.pid, signal.SIGKILL) if hasattr(os, "killpg") else process.kill()


def flush(path: Path) -> None:
    """Wait until a file or a folder is on the disk."""
    if os.name == "nt" and path.is_dir():  # which cannot be opened there
        return
    # Windows flushes only what could be written.
    handle = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def keep_freed_memory() -> None:
    """Let this process keep what it frees, where its allocator is glibc's, instead of giving it back to the system.

    A training step on a CPU frees and takes the same gigabyte again, 100,000 pages that the system clears first: 7 to
    10% of the step's time, and nearly half of that of a convolutional network at 224 pixels. What is in use at once
    stays the same.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        trim_threshold, mmap_threshold = -1, -3  # as malloc.h has them
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_threshold, 2**30)


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory ran out, of the host or of a device."""
    told = isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY)
    return told or isinstance(error, MemoryError)


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def lacks_float64(device: "torch.device") -> bool:
    """Whether a device computes in float32 at best: what needs more, fits and probes, is done on the CPU."""
    return device.type == "mps"


def available_bytes() -> int:
    """Memory that can be taken without swapping."""
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    if sys.platform == "win32":
        # MEMORYSTATUSEX: two 32-bit numbers, its own length first, then seven of 64; the third of them is what is free.
        status = (ctypes.c_uint64 * 8)(64)
        ctypes.windll.kernel32.GlobalMemoryStatusEx(status)
        return int(status[2])
    # Not every system counts its free pages; then the installed ones are the only bound left.
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
