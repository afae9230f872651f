"""A published file from the first of its hosts that has it, resumed where a connection broke off, and checked."""

import hashlib
import http.client
import os
import shutil
import stat
import tarfile
import urllib.error
import urllib.request
import zipfile
from pathlib import Path
from typing import BinaryIO, NamedTuple

from rich.console import Console
from rich.progress import wrap_file

from pmae.errors import UserError, failing_as, require
from pmae.system import take_lock

TIMEOUT_SECONDS = 30
TRIES = 100  # of one host whose connections break off, as long as each of them brought something


class Archive(NamedTuple):
    """A file to download: hosts that are asked in turn, and its SHA-256, or its MD5 where only that is published."""

    urls: tuple[str, ...]
    digest: str

    @property
    def file(self) -> str:
        """Its name, on every host and on the disk."""
        return self.urls[-1].rpartition("/")[2]

    def mismatch(self, path: Path) -> str | None:
        """What is wrong with a file that should be this one, in words."""
        kind = "SHA-256" if len(self.digest) == 64 else "MD5"
        found = checksum(path, kind)
        return None if found == self.digest else f"its {kind} must be {self.digest}, got {found}"


def checksum(path: Path, kind: str) -> str:
    """Checksum of a file's bytes; MD5 tells a damaged or different file, not a forged one."""
    with path.open("rb") as file:
        new = {"MD5": hashlib.md5, "SHA-256": hashlib.sha256}[kind]
        return hashlib.file_digest(file, lambda: new(usedforsecurity=False)).hexdigest()


def download(archive: Archive, part: Path) -> list[str]:
    """Bring a file from the first host that has it, and say what each host did; what broke off is kept and resumed."""
    lines = list[str]()
    require(not part.is_symlink(), "the file to download into", "no link", str(part))
    with failing_as(f"cannot write to {part}"), part.open("ab") as file:
        _hold(file, part)
        for url in archive.urls:
            try:
                with failing_as(f"cannot fetch {url}"):
                    _complete(archive, url, file)
                return [*lines, f"fetched {url}"]
            except UserError as error:
                lines.append(str(error))
        kept = file.seek(0, os.SEEK_END)
    if not kept:
        part.unlink()
    keeps = f"; {part} keeps {kept:,} bytes, and the same command goes on from there" if kept else ""
    raise UserError("; ".join(lines) + keeps)


def _hold(file: BinaryIO, part: Path) -> None:
    try:
        take_lock(file.fileno(), wait=False)
    except BlockingIOError as error:
        raise UserError(f"{part} is being fetched by another process") from error
    except (ImportError, OSError):  # a system or a file system without locks
        pass


def _complete(archive: Archive, url: str, file: BinaryIO) -> None:
    """Bring the rest of a file and check the whole; a beginning that does not fit is brought again too."""
    for _ in range(2):
        resumed = file.seek(0, os.SEEK_END) > 0
        _receive(url, file)
        wrong = archive.mismatch(Path(file.name))
        if wrong is None:
            return
        _empty(file)
        if not resumed:
            break
    raise UserError(f"cannot fetch {url}: {wrong}")


def _receive(url: str, file: BinaryIO) -> None:
    """Append what a host still has to send, over as many connections as it takes."""
    for _ in range(TRIES):
        before = file.tell()
        try:
            return _append(url, file)
        except (OSError, http.client.HTTPException) as error:
            broken = error
            if file.tell() <= before:
                break
    raise broken


def _append(url: str, file: BinaryIO) -> None:
    start, console = file.tell(), Console(stderr=True)
    # Some hosts turn away the standard library's default agent.
    headers = {"User-Agent": "pmae", **({"Range": f"bytes={start}-"} if start else {})}
    try:
        response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return  # nothing is left to send
        raise
    if response.status != http.HTTPStatus.PARTIAL_CONTENT:
        _empty(file)
        start = 0
    size = int(response.headers["Content-Length"] or 0)
    with wrap_file(response, size, description=url, console=console, disable=not console.is_terminal) as arriving:
        shutil.copyfileobj(arriving, file)
    file.flush()
    if file.tell() - start < size:
        raise ConnectionError(f"it broke off after {file.tell():,} of {start + size:,} bytes")


def _empty(file: BinaryIO) -> None:
    file.seek(0)
    file.truncate()


def extract(archive: Path, folder: Path) -> None:
    """Unpack a .zip or a tar file; a member that would land outside the folder is refused."""
    with failing_as(f"cannot unpack {archive.name}"):
        if not zipfile.is_zipfile(archive):
            with tarfile.open(archive) as members:
                members.extractall(folder, filter="data")
            return
        with zipfile.ZipFile(archive) as files:
            for member in files.infolist():
                inside = (folder / member.filename).resolve().is_relative_to(folder.resolve())
                if not inside or stat.S_ISLNK(member.external_attr >> 16):
                    raise UserError(f"cannot unpack {archive.name}: the member {member.filename!r} leaves the folder")
            files.extractall(folder)
