"""The lines of metrics.jsonl as curves in TensorBoard or Weights & Biases, under the same names.

Both draw into the run folder; Weights & Biases stays offline unless WANDB_MODE is set to online.
"""

import os
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

from pmae.config import Config
from pmae.config_file import to_dict
from pmae.errors import missing_extra
from pmae.runs import read_object, write_json

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb"}


class Tracker(Protocol):
    """Takes lines of metrics as they are written, and closes its file at the end."""

    def write(self, step: int, values: dict[str, float]) -> None:
        """Add a point to the curve of each value."""

    def close(self) -> None:
        """Flush and close."""


def require_tracker(name: str) -> None:
    """Refuse a tracker whose package is not there, before a run begins."""
    if name == "none":
        return
    # Wandb reports its own errors over the network unless told not to before it is imported.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    try:
        import_module(PACKAGES[name])
    except ImportError as error:
        raise missing_extra(f"train.track {name!r}", "tracking", error) from error


def open_tracker(config: Config, folder: Path, done: int) -> Tracker | None:
    """The tracker that the settings name, continuing after step `done` the curves that the run folder holds."""
    name = config.train.track
    require_tracker(name)
    if name == "tensorboard":
        return TensorBoard(folder / "tensorboard", done)
    return WeightsAndBiases(folder, config) if name == "wandb" else None


class TensorBoard:
    """Event files in the run's tensorboard/ folder, one for each time the run was started."""

    def __init__(self, folder: Path, done: int) -> None:
        writer: Any = import_module("torch.utils.tensorboard").SummaryWriter
        # Readers drop the points from `purge_step` on that an earlier start left: those steps are taken again.
        self._writer = writer(str(folder), purge_step=done + 1)

    def write(self, step: int, values: dict[str, float]) -> None:
        """Add a point to the curve of each value."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class WeightsAndBiases:
    """An offline run in the run's wandb/ folder; `wandb sync` uploads it. Each start has the same id, kept beside it.

    Steps that a resumed run takes again give the same values as before, so it does not matter which of them is kept.
    """

    def __init__(self, folder: Path, config: Config) -> None:
        wandb: Any = import_module("wandb")
        kept = folder / "wandb.json"
        if not kept.exists():
            write_json(kept, {"id": uuid4().hex})
        self._run = wandb.init(
            project="pmae",
            name=folder.name,
            id=read_object(kept)["id"],
            dir=str(folder),
            config=to_dict(config),
            mode="online" if os.environ.get("WANDB_MODE") == "online" else "offline",
            settings=wandb.Settings(silent=True, console="off", disable_git=True, save_code=False),
        )

    def write(self, step: int, values: dict[str, float]) -> None:
        """Add a point to the curve of each value."""
        self._run.log(values, step=step)

    def close(self) -> None:
        """Flush and close."""
        self._run.finish()
