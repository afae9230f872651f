"""How much memory there is, asked before it is filled, and how much of it all decoding threads may fill together."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image

from pmae.errors import UserError

BUDGET_BYTES = 2**30
"""What all images that are being unpacked may take together; a larger one waits until it is alone."""
SMALL_BYTES = 2**20
"""What is not counted: as many of these as there are threads are nothing."""


def available_bytes() -> int:
    """Memory that can be taken without swapping."""
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    # Not every system counts its free pages; then the installed ones are the only bound left.
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")


def require_room(need: int, what: str) -> None:
    """Refuse what would not fit in memory, with the bytes."""
    free = available_bytes()
    if need > free:
        raise UserError(
            f"data.source: {what} would take {need:,} bytes in memory, and {free:,} are available; "
            "make the images smaller (data.resize, for a folder) or save them as one .npy file, which is read from disk"
        )


_freed = threading.Condition()
_taken = 0


@contextmanager
def unpacking(values: int, bytes_each: int) -> Iterator[None]:
    """Inside, an image of so many values is unpacked; it waits for the other threads where all would take too much.

    A small file can unpack to more than a machine holds: Pillow's limit guards every format, from the header, before
    anything is unpacked. (Pillow itself only warns up to twice its limit, and many threads would unpack those at once.)
    """
    global _taken
    limit, need = Image.MAX_IMAGE_PIXELS, values * bytes_each
    if limit is not None and values > limit:
        raise ValueError(f"{values:,} values, more than {limit:,}; it may be a decompression bomb")
    if need <= SMALL_BYTES:
        yield
        return
    with _freed:
        _freed.wait_for(lambda: _taken == 0 or _taken + need <= BUDGET_BYTES)
        _taken += need
    try:
        if need > BUDGET_BYTES // 4 and need > available_bytes():
            raise ValueError(f"{need:,} bytes when unpacked, more than are available")
        yield
    finally:
        with _freed:
            _taken -= need
            _freed.notify_all()
