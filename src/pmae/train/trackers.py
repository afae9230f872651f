"""Where the curves of a run are drawn beside metrics.jsonl: TensorBoard, Weights & Biases, MLflow, or a plain CSV file.

All but MLflow with MLFLOW_TRACKING_URI, and W&B with WANDB_MODE=online, write into the run folder and send nothing.
"""

import csv
import json
import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import numpy as np

from pmae.config import Config
from pmae.config_file import flat, to_dict
from pmae.errors import UserError, first_line, optional
from pmae.files import read_object, write_json, write_text

QUIET = {
    "WANDB_ERROR_REPORTING": "false",  # wandb sends its own errors, unless told not to before it is imported
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ASYNC_LOGGING": "false",
    # A server that is gone is given up on within seconds, not an hour.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}


class Tracker(Protocol):
    """Draws a run: points of curves, pictures (H, W, 3) of bytes, and an end."""

    def write(self, step: int, values: dict[str, float]) -> None:
        """Add a point to the curve of each value."""

    def picture(self, step: int, name: str, pixels: np.ndarray) -> None:
        """Show a picture."""

    def close(self) -> None:
        """Write what is left, and let go."""


def require_tracker(name: str) -> None:
    """Refuse a tracker whose package is not there, before a run begins."""
    if name not in ("none", "csv"):
        for variable, value in QUIET.items():
            os.environ.setdefault(variable, value)
        optional(f"train.track {name!r}", "tracking", name)


def open_tracker(config: Config, folder: Path, done: int) -> Tracker | None:
    """The tracker that the settings name, continuing after step `done` what the run folder or its server holds."""
    name = config.train.track
    try:
        return TRACKERS[name](config, folder, done) if name in TRACKERS else None
    except (UserError, OSError):
        raise
    except Exception as error:  # each library has its own
        raise UserError(f"train.track {name!r} must be reachable, or none: {first_line(error)}") from error


class TensorBoard:
    """Event files in tensorboard/."""

    def __init__(self, config: Config, folder: Path, done: int) -> None:
        summary_writer: Any = import_module("torch.utils.tensorboard").SummaryWriter
        # Readers drop the points from `purge_step` on that an earlier start left: those steps are taken again.
        self._writer = summary_writer(str(folder / "tensorboard"), purge_step=done + 1)
        self._writer.add_text("config", f"```\n{json.dumps(to_dict(config), indent=1)}\n```", done)

    def write(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def picture(self, step: int, name: str, pixels: np.ndarray) -> None:
        self._writer.add_image(name, pixels, step, dataformats="HWC")

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """An offline run in wandb/, which `wandb sync` uploads; every start of a run has one id, kept beside it."""

    def __init__(self, config: Config, folder: Path, done: int) -> None:
        self._wandb: Any = import_module("wandb")
        kept = folder / "wandb.json"
        if not kept.exists():
            write_json(kept, {"id": uuid4().hex})
        self._run = self._wandb.init(
            project=config.train.project,
            name=folder.name,
            id=read_object(kept)["id"],
            resume="allow" if os.environ.get("WANDB_MODE") == "online" else None,
            dir=str(folder),
            config=to_dict(config),
            mode="online" if os.environ.get("WANDB_MODE") == "online" else "offline",
            settings=self._wandb.Settings(silent=True, console="off", disable_git=True, save_code=False),
        )

    def write(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def picture(self, step: int, name: str, pixels: np.ndarray) -> None:
        self._run.log({name: self._wandb.Image(pixels)}, step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run on the server that MLFLOW_TRACKING_URI names, or in mlflow/; its id is kept in mlflow.json."""

    def __init__(self, config: Config, folder: Path, done: int) -> None:
        client: Any = import_module("mlflow").MlflowClient
        # Its file store is in maintenance but needs nothing; a database needs a library that the extra leaves out.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        where = os.environ.get("MLFLOW_TRACKING_URI") or (folder / "mlflow").resolve().as_uri()
        self._client, kept = client(where), folder / "mlflow.json"
        if not kept.exists():
            found = self._client.get_experiment_by_name(config.train.project)
            experiment = found.experiment_id if found else self._client.create_experiment(config.train.project)
            self.run = self._client.create_run(experiment, run_name=folder.name).info.run_id
            for name, value in flat(config).items():
                self._client.log_param(self.run, name, str(value)[:500])
            write_json(kept, {"id": self.run})
        self.run = read_object(kept)["id"]
        self._client.update_run(self.run, status="RUNNING")

    def write(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._client.log_metric(self.run, name, value, step=step)

    def picture(self, step: int, name: str, pixels: np.ndarray) -> None:
        self._client.log_image(self.run, pixels, artifact_file=f"{name}.png")

    def close(self) -> None:
        self._client.set_terminated(self.run)


class CSV:
    """metrics.csv: a step, a name and a value a line, for a spreadsheet."""

    def __init__(self, config: Config, folder: Path, done: int) -> None:
        self._path = folder / "metrics.csv"
        lines = self._path.read_text(encoding="utf-8").split("\n")[1:-1] if self._path.exists() else []
        # Without the lines of steps that a resumed run will take again.
        kept = [line for line in lines if int(line.partition(",")[0]) <= done]
        write_text(self._path, "\n".join(["step,name,value", *kept, ""]))

    def write(self, step: int, values: dict[str, float]) -> None:
        with self._path.open("a", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([step, name, value] for name, value in values.items())

    def picture(self, step: int, name: str, pixels: np.ndarray) -> None:
        """Figures of a run are in its figures/."""

    def close(self) -> None:
        """Every line is written when it comes."""


TRACKERS: dict[str, Callable[[Config, Path, int], Tracker]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}
TRACKERS |= {"mlflow": MLflow, "csv": CSV}
