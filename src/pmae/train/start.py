"""An encoder to begin with or to score, of a run or of weights that timm or Hugging Face wrote, for images at hand."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pmae.config import Config, DataConfig
from pmae.data.images import ImageSet, Splits, require_like
from pmae.data.sets import read_like
from pmae.errors import UserError, require
from pmae.files import disk_errors, folder_path, require_empty, write_tensors, write_whole
from pmae.runs import Run, create_run
from pmae.train.checkpoint import load_encoder, run_or_weights, save
from pmae.train.distributed import is_main, process_group
from pmae.train.environment import describe_environment
from pmae.train.given import Start, TrainedOn, given_images, load_given


def trained_on(source: Run | Path | str, name: str | None = None) -> TrainedOn:
    """The images that the encoder of a run or weights was trained on, without loading it.

    `name` is the timm network of weights that do not tell it.
    """
    place = run_or_weights(source)
    if not isinstance(place, Run):
        return given_images(place, name)
    require(name is None, "encoder", "left out for a run, which tells it", name)
    return TrainedOn(place.config.data, place.shape, place.environment["data"].get("dtype", "uint8"))


def reading_for(source: Run | Path | str, data: str, name: str | None = None) -> DataConfig:
    """How images are read for the encoder of a run or weights: as those that it was trained on."""
    own = trained_on(source, name)
    return read_like(replace(own.data, source=data, labels="none", max_images=None), own.shape)


def load_start(source: Run | Path | str, images: ImageSet, name: str | None = None) -> Start:
    """The encoder of a run or weights for these images; `name` is its timm network where weights do not tell it."""
    place = run_or_weights(source)
    if not isinstance(place, Run):
        return load_given(place, name, images=images)
    config, found, standardize = load_encoder(place)
    require_like("data", images, found.shape, trained_on(place).dtype)
    return Start(found, config.encoder, standardize)


@contextmanager
def run_to_score(
    place: Run | Path,
    splits: Splits,
    reading: DataConfig,
    out: Path | str | None,
    encoder: str | None,
    device: torch.device,
    source: str,
) -> Iterator[tuple[Run, bool]]:
    """A run to score, or weights as a run of no epochs in the new folder `out`, which goes if nothing is scored.

    `out` may also be what an interrupted call for the same weights and images left; then the second value is true.
    """
    if isinstance(place, Run):
        require(out is None, "out", "left out for a run, whose own folder takes the scores", out)
        require_like("data", splits.train, place.shape, trained_on(place).dtype)
        yield place, False
        return
    own, channels = trained_on(place, encoder).shape[0], splits.train.shape[0]
    rule = f"of images with the {own} channels of the weights, or grey"
    require(channels in (1, own), f"data {splits.name!r}", rule, channels)
    require(out is not None, "out", "a new folder for the scores of weights", out)
    path = folder_path(str(out))
    # What is there already may be a run of no epochs, of weights as these.
    begun = Run(path) if (path / "checkpoints").is_dir() else None
    if begun is None or begun.method != "weights":
        require_empty(path)
    start, environment = load_start(place, splits.train, encoder), describe_environment(splits, device)
    if begun:
        _require_same(begun, start, environment)
    with process_group(device) as world, world.all_agree():
        if world.main and not begun:
            write_given(path, start, reading, {**environment, "weights": source})
    run = Run(path)
    try:
        yield run, begun is not None
    except UserError:
        if is_main() and not (begun or run.results):
            shutil.rmtree(path)
        raise


def _require_same(begun: Run, start: Start, environment: dict[str, Any]) -> None:
    """Refuse to go on in a folder of other weights or images."""
    _, encoder, standardize = load_encoder(begun)
    parts = ((encoder.net, start.encoder.net), (standardize, start.standardize))
    both = ((known.state_dict(), given.state_dict()) for known, given in parts)
    same = all(a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a) for a, b in both)
    rule = "a new folder, or one where scoring of the same weights and images began"
    require(same, "out", rule, f"{begun.path}, of other weights")
    before, now = (each["data"].get("fingerprint") for each in (begun.environment, environment))
    require(before == now, "out", rule, f"{begun.path}, of other images ({begun.environment['data']['name']})")


def write_given(path: Path, start: Start, data: DataConfig, environment: dict[str, Any]) -> Run:
    """A run of no epochs: given weights as they are, and the statistics of their pixels."""

    def write(temporary: Path) -> None:
        config = Config(data=data, encoder=replace(start.config, weights=environment["weights"]))
        run = create_run(temporary, config, {**environment, "start": list(start.notes)})
        statistics = {f"standardize.{key}": value for key, value in start.standardize.state_dict().items()}
        write_tensors(run.path / "fitted.safetensors", statistics)
        save(run, {"encoder.safetensors": start.encoder.net.state_dict()}, "epoch_0000", {"epoch": 0, "step": 0}, 1)

    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, write)
    return Run(path)
