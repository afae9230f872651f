"""A whole trained model in memory, and as a run folder."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pmae.config import Config
from pmae.data.augment import Standardize
from pmae.errors import require
from pmae.files import write_whole
from pmae.method import MaskedAutoencoder, build_method
from pmae.runs import Run, create_run
from pmae.train.checkpoint import contents, load_into, load_space, load_standardize, require_whole, save, save_fitted
from pmae.train.step import build_optimizer


class TrainedModel(NamedTuple):
    """All that a run learned, on the CPU: the settings, the data it saw, the model, its statistics and its journal."""

    config: Config
    environment: dict[str, Any]
    model: MaskedAutoencoder
    standardize: Standardize
    metrics: list[dict[str, Any]]
    results: dict[str, Any]

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.model.encoder.shape


def load_trained(run: Run) -> TrainedModel:
    """A run at its last checkpoint, leaving the caller's random state as it was."""
    config, environment, last = run.config, run.environment, run.checkpoint()
    with torch.random.fork_rng(devices=[]):
        model = build_method(config, run.shape, load_space(run))
    load_into(model.encoder.net, require_whole(last, "encoder.safetensors"))
    load_into(model.decoder, require_whole(last, "decoder.safetensors"))
    return TrainedModel(config, environment, model.eval(), load_standardize(run), run.metrics(), run.results)


def write_trained(path: Path | str, trained: TrainedModel, epoch: int = 0, step: int = 0) -> Run:
    """A run folder with these weights, statistics and space; resuming it at step 0 trains them on."""
    run = create_run(path, trained.config, trained.environment)
    save_fitted(run, trained.standardize, trained.model.space)
    optimizer = build_optimizer(trained.model, trained.config.optim, on_graph=False)
    state = {"epoch": epoch, "step": step}
    save(run, contents(trained.model, optimizer), f"epoch_{epoch:04d}", state, trained.config.train.keep)
    return run


def write_finished(path: Path | str, trained: TrainedModel) -> Run:
    """The folder of a finished run, as far as it is in memory: without samples and the optimizer's moments."""
    path = Path(path)
    require(not path.exists(), "path", "a folder that does not exist yet", str(path))

    def write(temporary: Path) -> None:
        last = max(line["step"] for line in trained.metrics)
        run = write_trained(temporary, trained, trained.config.train.epochs or 0, last)
        lines = (json.dumps(line) + "\n" for line in trained.metrics)
        (run.path / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
        run.add_results(**trained.results)

    write_whole(path, write)
    return Run(path)
