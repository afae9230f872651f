"""How much memory there is, asked before it is filled."""

import os
from pathlib import Path

from pmae.errors import UserError


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
