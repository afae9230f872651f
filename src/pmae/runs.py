"""The run folder: the one thing that reports, resumption, evaluation and export read.

config.json        resolved settings          metrics.jsonl   one line per logging interval
environment.json   versions, device, commit   results.json    what evaluation found, merged section by section
fitted.safetensors standardization and space  samples.safetensors  a few pictures and the spectrum
checkpoints/epoch_0010/  encoder, decoder, optimizer, a space that learns (safetensors) and state.json
"""

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pmae.config import Config
from pmae.config_file import from_dict, to_dict
from pmae.errors import UserError


class Run:
    """A run folder that exists."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        if not (self.path / "config.json").is_file():
            raise UserError(f"run must be a folder that pretraining wrote (with a config.json), got {str(path)!r}")

    @property
    def config(self) -> Config:
        """The settings the run was made with."""
        config: Config = from_dict(read_json(self.path / "config.json"))
        return config

    @property
    def environment(self) -> dict[str, Any]:
        """Versions, device, commit and data of the run."""
        return read_object(self.path / "environment.json")

    @property
    def results(self) -> dict[str, Any]:
        """What has been evaluated so far; empty if nothing was."""
        path = self.path / "results.json"
        return read_object(path) if path.exists() else {}

    def add_results(self, **sections: Any) -> None:
        """Merge sections into results.json."""
        write_json(self.path / "results.json", {**self.results, **sections})

    def metrics(self) -> list[dict[str, Any]]:
        """Every whole line of metrics.jsonl."""
        path = self.path / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def checkpoints(self) -> list[Path]:
        """Whole checkpoint folders, oldest first."""
        found = (self.path / "checkpoints").glob("epoch_*/state.json")
        return sorted((state.parent for state in found), key=lambda p: int(read_object(p / "state.json")["step"]))

    def checkpoint(self, epoch: int | None = None) -> Path:
        """The last checkpoint, or the one of this epoch."""
        found = self.checkpoints()
        if epoch is not None:
            found = [p for p in found if p.name == f"epoch_{epoch:04d}"]
        if not found:
            raise UserError(
                f"run {str(self.path)!r} must hold a checkpoint{'' if epoch is None else f' of epoch {epoch}'}"
            )
        return found[-1]


def create_run(path: Path | str, config: Config, environment: dict[str, Any]) -> Run:
    """Start a run in a folder that holds none yet."""
    path = Path(path)
    if (path / "config.json").exists():
        raise UserError(f"out must be a folder without a run, got {str(path)!r}; continue it with --resume")
    if path.exists() and not path.is_dir():
        raise UserError(f"out must be a folder, got the file {str(path)!r}")
    with disk_errors(path):
        path.mkdir(parents=True, exist_ok=True)
        write_json(path / "environment.json", environment)
        write_json(path / "config.json", to_dict(config))
    return Run(path)


def discard(run: Run) -> None:
    """Take back a run that was refused before its first step; anything else in its folder stays."""
    for name in ("fitted.safetensors", "environment.json", "config.json"):
        (run.path / name).unlink(missing_ok=True)
    if not any(run.path.iterdir()):
        run.path.rmdir()


def read_json(path: Path) -> Any:
    """A JSON file, or an error that names it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"file must exist, got {str(path)!r}") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"file must be readable JSON, got {str(path)!r}: {error}") from error


def read_object(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise UserError(f"file must hold a JSON object, got {str(path)!r}")
    return value


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that a reader sees the old file or the new one, never half of one."""
    write_whole(path, lambda temporary: temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8"))


def write_text(path: Path, text: str) -> Path:
    """Write a text file whole or not at all."""
    write_whole(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
    return path


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file or folder beside `path`, flush it to the disk and rename it into place."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    with disk_errors(path):
        try:
            write(temporary)
            for part in [*temporary.rglob("*"), temporary] if temporary.is_dir() else [temporary]:
                _flush(part)
            if path.is_dir():
                shutil.rmtree(path)
            os.replace(temporary, path)
            _flush(path.parent)
        finally:
            if temporary.is_dir():
                shutil.rmtree(temporary, ignore_errors=True)
            temporary.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Say in one sentence that the disk is full or the folder cannot be written."""
    try:
        yield
    except Exception as error:
        number = getattr(error, "errno", None)
        full = number in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error)
        denied = isinstance(error, PermissionError | NotADirectoryError) or number == errno.EROFS
        if not (full or denied):
            raise
        reason = "the disk is full" if full else "it cannot be written"
        raise UserError(f"writing {str(path)!r} failed because {reason}; what was there before is intact") from error
