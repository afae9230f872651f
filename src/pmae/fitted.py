"""A trained model in memory: taken from a run folder, and written to one from which training goes on."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pmae.config import Config
from pmae.data.augment import Standardize
from pmae.errors import require
from pmae.method import MaskedAutoencoder, build_method
from pmae.runs import Run, create_run, write_whole
from pmae.train import checkpoint
from pmae.train.step import build_optimizer


class Fitted(NamedTuple):
    """All that a run learned, on the CPU: the settings, the data it saw, the model, its statistics and its journal."""

    config: Config
    environment: dict[str, Any]
    model: MaskedAutoencoder
    standardize: Standardize
    metrics: list[dict[str, Any]]
    results: dict[str, Any]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of the images."""
        return self.model.encoder.shape


def read_fitted(run: Run) -> Fitted:
    """A run at its last checkpoint, leaving the caller's random state as it was."""
    config, environment, last = run.config, run.environment, run.checkpoint()
    channels, height, width = environment["data"]["shape"]
    with torch.random.fork_rng(devices=[]):
        model = build_method(config, (channels, height, width), checkpoint.load_space(run))
    checkpoint.load_into(model.encoder.net, last / "encoder.safetensors")
    checkpoint.load_into(model.decoder, last / "decoder.safetensors")
    return Fitted(config, environment, model.eval(), checkpoint.load_standardize(run), run.metrics(), run.results)


def write_start(path: Path | str, fitted: Fitted) -> Run:
    """A run folder at step 0 whose weights, statistics and space are those of `fitted`; resuming it trains them on."""
    return _write(path, fitted, 0, 0)


def write_finished(path: Path | str, fitted: Fitted) -> Run:
    """The folder of a finished run, as far as it is in memory: without samples and the optimizer's moments."""
    path = Path(path)
    require(not path.exists(), "path", "a folder that does not exist yet", str(path))
    lines = [json.dumps(line) + "\n" for line in fitted.metrics]

    def write(temporary: Path) -> None:
        run = _write(temporary, fitted, fitted.config.train.epochs or 0, max(line["step"] for line in fitted.metrics))
        (run.path / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
        run.add_results(**fitted.results)

    write_whole(path, write)
    return Run(path)


def _write(path: Path | str, fitted: Fitted, epoch: int, step: int) -> Run:
    run = create_run(path, fitted.config, fitted.environment)
    checkpoint.save_fitted(run, fitted.standardize, fitted.model.space)
    optimizer = build_optimizer(fitted.model, fitted.config.optim, on_graph=False)
    name, state = f"epoch_{epoch:04d}", {"epoch": epoch, "step": step}
    checkpoint.save(run, checkpoint.contents(fitted.model, optimizer), name, state, fitted.config.train.keep)
    return run
