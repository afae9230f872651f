"""The run folder: the one thing that reports, resumption, evaluation and export read.

config.json        resolved settings          metrics.jsonl   one line per logging interval
environment.json   versions, device, commit   results.json    what evaluation found, merged section by section
fitted.safetensors standardization and space  samples.safetensors  a few pictures and the spectrum
checkpoints/epoch_0010/  encoder, decoder, optimizer, a space that learns (safetensors); state.json with their checksums
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pmae.config import Config
from pmae.config_file import from_dict, of_older_versions, to_dict
from pmae.errors import UserError
from pmae.files import disk_errors, lock, read_json, write_json
from pmae.results import Evaluation
from pmae.results_file import read_evaluations
from pmae.run_files import read_environment, read_results, read_state, whole_lines


class Run:
    """A run folder that exists; whatever takes a run takes its path too."""

    def __init__(self, path: "Path | str | Run") -> None:
        self.path: Path = path.path if isinstance(path, Run) else Path(path).expanduser()
        if not (self.path / "config.json").is_file():
            raise UserError(f"run must be a folder that pretraining wrote (with a config.json), got {str(self.path)!r}")

    @property
    def config(self) -> Config:
        """The settings the run was made with."""
        return read_config(self.path / "config.json")

    @property
    def environment(self) -> dict[str, Any]:
        """Versions, device, commit and data of the run, as `run_files.Environment` says."""
        return read_environment(self.path / "environment.json")

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of the images that were trained on."""
        channels, height, width = self.environment["data"]["shape"]
        return channels, height, width

    @property
    def results(self) -> dict[str, Any]:
        """What has been evaluated so far, as `run_files.Results` says; empty if nothing was."""
        return read_results(self.path / "results.json")

    @property
    def evaluations(self) -> list[Evaluation]:
        """Every evaluation in results.json, oldest first."""
        return read_evaluations(self.results, self.path / "results.json")

    def add_results(self, **sections: Any) -> None:
        """Merge sections into results.json."""
        self._change_results(lambda known: sections)

    def add_evaluation(self, evaluation: Evaluation) -> None:
        """Add one to results.json; what earlier ones recorded stays as it is."""
        self._change_results(lambda known: {"evaluations": [*known.get("evaluations", []), evaluation.to_json()]})

    def _change_results(self, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """Read, change and write, one process at a time."""
        path = self.path / "results.json"
        with lock(path):
            known = self.results
            write_json(path, {**known, **change(known)})

    def metrics(self) -> list[dict[str, Any]]:
        """Every whole line of metrics.jsonl."""
        path = self.path / "metrics.jsonl"
        return [line for _, line in whole_lines(path)] if path.exists() else []

    def checkpoints(self) -> list[Path]:
        """Whole checkpoint folders, oldest first."""
        folders = (state.parent for state in (self.path / "checkpoints").glob("epoch_*/state.json"))
        found = {folder: _step(folder) for folder in folders}
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


def _step(checkpoint: Path) -> int | None:
    """The step that a checkpoint was taken at; None if its state is damaged, so that it is passed over."""
    try:
        return int(read_state(checkpoint)["step"])
    except UserError:
        return None


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


def read_config(path: Path) -> Config:
    """The settings in a file, of this version or an older one."""
    return from_dict(of_older_versions(read_json(path)))
