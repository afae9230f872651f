"""What the files of a run must be: sizes and checksums, so that a damaged one is told from a whole one."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pmae.errors import UserError
from pmae.runs import read_object


def sealed(state: dict[str, Any], folder: Path, names: Iterable[str]) -> dict[str, Any]:
    """The state with the size and checksum of each file, and a checksum of itself."""
    paths = {name: folder / name for name in names}
    state = {
        **state,
        "files": {name: path.stat().st_size for name, path in paths.items()},
        "blake2b": {name: _file_digest(path) for name, path in paths.items()},
    }
    return {**state, "seal": _seal(state)}


def damage(folder: Path, only: Iterable[str] | None = None) -> str | None:
    """What is wrong with the files of a checkpoint, or with those asked for; None if nothing is.

    Checkpoints from before there were checksums are judged by the sizes they list.
    """
    try:
        state = read_object(folder / "state.json")
    except UserError as error:
        return str(error)
    sizes, digests = state.get("files", {}), state.get("blake2b", {})
    seal = state.pop("seal", None)
    if not (isinstance(sizes, dict) and isinstance(digests, dict)) or (seal is not None and seal != _seal(state)):
        return "state.json is not as it was written"
    listed = sizes if only is None else [name for name in only if name in sizes]
    wrong = [name for name in listed if not _same(folder / name, sizes[name], digests.get(name))]
    return f"{', '.join(wrong)} missing or not as written" if wrong else None


def require_whole(folder: Path, name: str) -> Path:
    """The path of one file of a checkpoint, refused if it is not what was written."""
    found = damage(folder, [name])
    if found:
        raise UserError(f"checkpoint must be whole, got {str(folder)!r}: {found}; use an earlier epoch")
    return folder / name


def _same(path: Path, size: object, digest: object) -> bool:
    try:
        return path.stat().st_size == size and (digest is None or _file_digest(path) == digest)
    # A name that is no name, from a file that is no manifest.
    except (OSError, ValueError):
        return False


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _seal(state: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(state, sort_keys=True).encode(), digest_size=16).hexdigest()
