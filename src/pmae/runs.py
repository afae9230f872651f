"""The run folder: the one thing that reports, resumption, evaluation and export read.

config.json        resolved settings          metrics.jsonl   one line per logging interval
environment.json   versions, device, commit   results.json    what evaluation found, merged section by section
fitted.safetensors standardization and space  samples.safetensors  a few pictures and the spectrum
checkpoints/epoch_0010/  encoder, decoder, optimizer, a space that learns (safetensors); state.json with their checksums
"""

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pmae.config import Config
from pmae.config_file import from_dict, of_older_versions, to_dict
from pmae.errors import UserError, require
from pmae.results import Evaluation
from pmae.results_file import read_evaluations

REASONS = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "the disk is full"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR), "it cannot be written"),
    errno.EFBIG: "a file may not grow this large",
}
"""Why a file cannot be written, in words."""


LONGEST, LONGEST_PATH = 255, 3900
"""Bytes of a file's name, and of a folder's path so that its files' paths still fit."""


class Run:
    """A run folder that exists."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        if not (self.path / "config.json").is_file():
            raise UserError(f"run must be a folder that pretraining wrote (with a config.json), got {str(path)!r}")

    @property
    def config(self) -> Config:
        """The settings the run was made with."""
        return read_config(self.path / "config.json")

    @property
    def environment(self) -> dict[str, Any]:
        """Versions, device, commit and data of the run."""
        return read_object(self.path / "environment.json")

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of the images that were trained on."""
        data = self.environment.get("data")
        shape: Any = data.get("shape") if isinstance(data, dict) else None
        whole = isinstance(shape, list) and len(shape) == 3 and all(type(n) is int and n > 0 for n in shape)
        require(whole, "data.shape in environment.json", "three counts: channels, height and width", shape)
        return shape[0], shape[1], shape[2]

    @property
    def results(self) -> dict[str, Any]:
        """What has been evaluated so far; empty if nothing was."""
        path = self.path / "results.json"
        return read_object(path) if path.exists() else {}

    def add_results(self, **sections: Any) -> None:
        """Merge sections into results.json."""
        write_json(self.path / "results.json", {**self.results, **sections})

    @property
    def evaluations(self) -> list[Evaluation]:
        """Every evaluation in results.json, oldest first."""
        return read_evaluations(self.results, self.path / "results.json")

    def add_evaluation(self, evaluation: Evaluation) -> None:
        """Add one to results.json; what earlier ones recorded stays as it is."""
        known = self.results.get("evaluations", [])
        if not isinstance(known, list):
            raise UserError(f"evaluations must be a list in {str(self.path / 'results.json')!r}")
        self.add_results(evaluations=[*known, evaluation.to_json()])

    def metrics(self) -> list[dict[str, Any]]:
        """Every whole line of metrics.jsonl."""
        path = self.path / "metrics.jsonl"
        return [line for _, line in whole_lines(path)] if path.exists() else []

    def checkpoints(self) -> list[Path]:
        """Whole checkpoint folders, oldest first."""
        found = {state.parent: _step(state) for state in (self.path / "checkpoints").glob("epoch_*/state.json")}
        return [path for step, path in sorted((step, path) for path, step in found.items() if step is not None)]

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


def _step(state: Path) -> int | None:
    """The step that a checkpoint was taken at; None if its state is damaged, so that it is passed over."""
    try:
        step = read_object(state).get("step")
    except UserError:
        return None
    return step if type(step) is int and step >= 0 else None


def folder_path(given: Path | str, parameter: str = "out") -> Path:
    """A path that a person wrote, with `~` expanded; refused where no file system could take it."""
    require(str(given) != "", parameter, "a path", given)
    path = Path(given).expanduser()
    longest = max(len(os.fsencode(part)) for part in path.parts) if path.parts else 0
    require(longest <= LONGEST, parameter, f"a path of names of at most {LONGEST} bytes", f"one of {longest}")
    whole = len(os.fsencode(path))
    require(whole <= LONGEST_PATH, parameter, f"a path of at most {LONGEST_PATH:,} bytes", f"one of {whole:,}")
    for each in (path, *path.parents):
        dangling = each.is_symlink() and not each.exists()
        require(not dangling, parameter, "a path whose links lead somewhere", str(each))
    return path


def require_vacant(path: Path) -> None:
    """Refuse a folder that holds a run, and a file in its place."""
    if (path / "config.json").exists():
        raise UserError(f"out must be a folder without a run, got {str(path)!r}; continue it with --resume")
    if path.exists() and not path.is_dir():
        raise UserError(f"out must be a folder, got the file {str(path)!r}")


def create_run(path: Path | str, config: Config, environment: dict[str, Any]) -> Run:
    """Start a run in a folder that holds none yet."""
    path = Path(path)
    require_vacant(path)
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
    # Numbers too long and nesting too deep are not JSONDecodeErrors.
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"file must be readable JSON, got {str(path)!r}: {error}") from error


def read_config(path: Path) -> Config:
    """The settings in a file, of this version or an older one."""
    return from_dict(of_older_versions(read_json(path)))


def read_object(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise UserError(f"file must hold a JSON object, got {str(path)!r}")
    return value


def whole_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The lines of a metrics.jsonl, as text and as what they say; a last one without its end is not whole."""
    try:
        lines = path.read_bytes().decode("utf-8").split("\n")[:-1]
        said = [json.loads(line) for line in lines]
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"file must hold a JSON object a line, got {str(path)!r}: {error}") from error
    for number, value in enumerate(said, 1):
        if not isinstance(value, dict) or not isinstance(value.get("step"), int):
            raise UserError(f"file must hold a JSON object with a step a line, got {str(path)!r}, line {number}")
    return zip(lines, said, strict=True)


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
        # Rust's errors, such as those of safetensors, carry the number in their text alone.
        told = re.search(r"os error (\d+)", str(error))
        number = int(told[1]) if told else getattr(error, "errno", None)
        if number not in REASONS:
            raise
        raise UserError(
            f"writing {str(path)!r} failed because {REASONS[number]}; what was there before is intact"
        ) from error
