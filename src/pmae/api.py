"""The front door in Python: from a name, a path or an array to a finished run folder, and from there to evidence."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pmae.budget import require_minutes
from pmae.classify.labels import as_splits, read_labelled
from pmae.classify.table import Columns
from pmae.config import Config, DataConfig, require_config
from pmae.config_file import to_dict
from pmae.data.images import Splits, require_finite
from pmae.data.sets import load
from pmae.embed import embed
from pmae.errors import UserError, require
from pmae.evaluate import suite
from pmae.evaluate.baselines import baselines as baselines_of
from pmae.evaluate.baselines import random_weights
from pmae.evaluate.duplicates import duplicates, require_apart
from pmae.evaluate.feature_map import save_feature_map
from pmae.evaluate.features import complete
from pmae.evaluate.protocols import Protocols, preset, without_augmentation
from pmae.evaluate.segment import Tokens, pixels_like, read_masked, segmentation_probe, tokens_of
from pmae.export import export
from pmae.files import temporary_folder
from pmae.models import build_encoder
from pmae.paper.recipes import with_patches
from pmae.plugins import require_plugins
from pmae.pretraining import prepare
from pmae.remote import Mirror, is_remote, mirrored, push_back
from pmae.report.page import save_figures
from pmae.results import Duplicates, Evaluation, Segmentation, SegmentationScore
from pmae.runs import Run, require_vacant
from pmae.standing import primary_pooling, scores_of
from pmae.train.checkpoint import load_encoder, load_standardize, run_or_weights
from pmae.train.distributed import is_main, local_device, process_group, was_restarted
from pmae.train.environment import pick_device
from pmae.train.journal import say
from pmae.train.start import reading_for, run_to_score, trained_on

__all__ = ["embed", "evaluate", "export", "pretrain", "pretrain_twin", "segment"]


def pretrain(
    config: Config | None = None,
    images: Any = None,
    out: Path | str = "runs/pmae",
    resume: bool = False,
    quiet: bool = False,
    until: int | None = None,
    figures: bool = True,
    verbose: bool = False,
    minutes: float | None = None,
    began: float | None = None,
) -> Run:
    """Pretrain on what `config.data` names, or on `images` in memory, into the run folder `out`.

    `out` may be an address in a store, as s3://bucket/a: the run is trained in runs/a and copied at every checkpoint.

    Images are an array or a tensor, or a torch `Dataset` or `DataLoader`, which is read once into memory.

    With `until` it stops after that epoch of its schedule (the second stage's, of two), to be resumed later or never.
    The `figures` of a run take seconds, which count where there are many runs. All settings are printed if `verbose`,
    else those that differ.

    With `minutes`, whatever `config` says of epochs, a short trial finds how many fit into that time on this machine,
    from this call on or from when it `began` by `time.monotonic()`; the run is then one of so many epochs.
    """
    began = time.monotonic() if began is None else began
    config = Config() if config is None else config
    require_config(config)
    require_minutes(minutes, resume)
    require(until is None or until >= 1, "until", "an epoch, from 1 on", until)
    require_plugins(config)
    if not (resume or is_remote(out) or was_restarted(Path(out).expanduser())):
        require_vacant(Path(out).expanduser())  # before the images are read, which may take long
    prepared = prepare(config, images, resume, save_figures if figures else None)
    quiet = quiet or not is_main()
    with ExitStack() as held:
        if minutes is not None:
            if not quiet:
                say("a short trial tells how many epochs fit into the time")
            place = held.enter_context(temporary_folder("pmae-fit-"))
            prepared = prepared.within(minutes, began, place / "run", quiet)
        if not quiet:
            say(prepared.described(verbose))
        folder, again, on_checkpoint = held.enter_context(_mirrored(out, resume))
        return prepared.train(prepared.config, folder, again, quiet, until, on_checkpoint)


@contextmanager
def _mirrored(out: Path | str, resume: bool) -> Iterator[tuple[Path | str, bool, Callable[[], None]]]:
    """The folder to train in, whether a run is there, and how it is copied to its store, where it has one."""
    folder = None if is_remote(out) else Path(out).expanduser()
    url = str(out) if folder is None else mirrored(folder).get("url") if resume else None
    if url is None:
        yield out, resume, lambda: None
        return
    mirror = Mirror(url, folder)
    if folder is None:  # else the copy here was asked for, wherever its store stands
        resume = resume or was_restarted(mirror.folder)
        mirror.pull() if resume else mirror.require_vacant()
    with mirror if is_main() else nullcontext():
        yield mirror.folder, resume, mirror.push


def evaluate(
    path: Run | Path | str,
    protocols: Protocols | None = None,
    splits: Splits | None = None,
    epochs: Sequence[int | None] = (None,),
    baselines: bool = True,
    seeds: Sequence[int] = (0,),
    device: str = "auto",
    say: Callable[[str], None] = lambda message: None,
    figures: bool = True,
    data: DataConfig | Path | str | None = None,
    out: Path | str | None = None,
    encoder: str | None = None,
    labels: Path | str | None = None,
    columns: Mapping[str, str] | None = None,
) -> Run:
    """Score a run's encoder, at its last checkpoint or at several epochs, and what it must beat; into results.json.

    Labelled images are the run's own unless `splits` are given, or `data` to read: a folder whose subfolders are
    classes, a table of files, an .npz file, shards or a named set. `labels` is a table of the files in a folder, and
    `columns` what it calls them: {"file": "image_id", "label": "diagnosis", "group": "patient"}.

    `path` may also be weights that timm or Hugging Face wrote, to be scored as they are: `out` is then a new folder, a
    run of no epochs; `encoder` names their timm network where no config.json does. The same call goes on where it was
    interrupted.
    """
    place = run_or_weights(path)
    given, reading = _to_score(place, splits, data, encoder, labels, columns)
    splits, protocols = complete(given), protocols or preset("strong")
    if isinstance(place, Run):
        for epoch in epochs:
            place.checkpoint(epoch)  # of one that is not there it is told now, not when the others are scored
    for name, part in splits.parts.items():
        require_finite(f"the {name} images", part.images)
    classes = len(set(np.asarray(splits.train.labels)))  # of a single class, everybody would be right
    require(classes >= 2, f"data {splits.name!r}", "of two classes or more to be evaluated", classes)
    where = local_device(pick_device(device))
    # Splits that the user made must have hardly any duplicates, chance may put copies in others.
    held_out = {name: part for name, part in splits.parts.items() if name != "train"}
    shared = duplicates(splits.train, held_out, where)
    require_apart(shared, {name: part for name, part in held_out.items() if part is given.parts.get(name)})
    with run_to_score(place, splits, reading, out, encoder, where, str(path)) as (run, begun):
        done = run.evaluations if begun else []
        _evaluate(run, protocols, splits, shared, epochs, baselines, seeds, where, say, done)
        if is_main():
            table = {"labels": str(labels)} if labels else {}
            where_labelled = {"source": reading.source, **table, "columns": dict(columns or {})} if data else {}
            run.add_results(labelled=where_labelled)
            if figures:
                save_figures(run)
            push_back(run.path)
    return run


def _to_score(
    place: Run | Path,
    splits: Splits | None,
    data: DataConfig | Path | str | None,
    encoder: str | None,
    labels: Path | str | None = None,
    columns: Mapping[str, str] | None = None,
) -> tuple[Splits, DataConfig]:
    """The images to score on, and how they were read: `data` where splits are given too."""
    require(data is not None or not (labels or columns), "data", "given beside labels or columns", data)
    if data is not None:
        given = data if isinstance(data, DataConfig) else reading_for(place, str(data), encoder)
        if splits is not None:
            return splits, given
        reading, found = read_labelled(given, labels, Columns.named(columns or {}))
        return as_splits(found), reading
    own = trained_on(place, encoder).data
    if splits is not None:
        return splits, dataclasses.replace(own, source=splits.name)
    if not isinstance(place, Run):
        raise UserError("data must be given for weights, which have none of their own, got None")
    name = place.environment["data"]["name"]
    # Settings that were left alone name the embedded photos, which images in memory were given in place of.
    known = own.source != DataConfig().source or name == own.source
    require(known, "data", f"given for a run of images in memory ({name!r}), or their splits, with labels", None)
    return load(own), own


def _evaluate(
    run: Run,
    protocols: Protocols,
    splits: Splits,
    shared: dict[str, Duplicates],
    epochs: Sequence[int | None],
    baselines: bool,
    seeds: Sequence[int],
    where: torch.device,
    say: Callable[[str], None],
    done: Sequence[Evaluation],
) -> None:
    """Score the run and its baselines, but for what is `done`, into results.json, and write the map of its report."""
    last = int(run.checkpoint().name.removeprefix("epoch_").split("_")[0])
    config, standardize = run.config, load_standardize(run).to(where)
    protocols = without_augmentation(protocols) if splits.train.vectors else protocols
    own = ((run.method, e or last, load_encoder(run, e)[1].to(where), protocols) for e in epochs)
    others = ((name, 0, made, some) for name, made, some in baselines_of(config, splits, standardize, protocols))
    # Random weights, raw pixels and PCA features where heads are trained on them, and fine-tuning from scratch.
    frozen = bool(protocols.few or set(protocols.kinds) - {"finetune"})
    total, began = len(epochs) + baselines * (3 * frozen + bool(protocols.finetune)), time.monotonic()
    with process_group(where) as world:
        for count, (name, epoch, represent, some) in enumerate(chain(own, others if baselines else ())):
            if count and world.main:
                left = (time.monotonic() - began) / count * (total - count)
                say(f"{count} of {total} representations scored, about {timedelta(seconds=round(left))} left")
            if any(one.answers_to(name, epoch, splits.name, to_dict(some), seeds) for one in done):
                continue
            how = (some, name, epoch, seeds, run.path / "finetune", say, world, shared)
            found = suite.evaluate(represent, splits, standardize, *how)
            with world.all_agree():
                if world.main:
                    run.add_evaluation(found)
    if is_main():
        chosen = primary_pooling(scores_of(run.evaluations))
        save_feature_map(run, load_encoder(run, epochs[-1])[1].to(where), splits, standardize, chosen)


def segment(
    path: Run | Path | str,
    masks: Path | str,
    splits: Splits | None = None,
    baselines: bool = True,
    device: str = "auto",
    say: Callable[[str], None] = lambda message: None,
    data: DataConfig | None = None,
    out: Path | str | None = None,
    encoder: str | None = None,
) -> Run:
    """Score a run's patch tokens, and what they must beat, by a linear segmentation probe; into results.json.

    `path` may also be weights, as for `evaluate`.
    """
    place, where = run_or_weights(path), pick_device(device)
    splits, reading = _to_score(place, splits, data, encoder)
    with run_to_score(place, splits, reading, out, encoder, where, str(path)) as (run, _):
        seed, standardize = run.config.train.seed, load_standardize(run).to(where)
        found, scores = read_masked(splits, masks, seed, reading), dict[str, SegmentationScore]()
        counts = {"train": len(found.train.images), "test": len(found.test.images)}
        for note in (f"images with masks: {counts['train']:,} to fit on, {counts['test']:,} to score", *found.notes):
            say(note)
        for name, tokens in _tokens(run, baselines, where).items():
            scores[name] = segmentation_probe(tokens, standardize, found)
            say(f"  {name:<16} mIoU {scores[name].in_words()}")
        told = Segmentation(splits.name, counts, found.values, scores, found.notes)
        run.add_results(segmentation=dataclasses.asdict(told))
        push_back(run.path)
    return run


def _tokens(run: Run, baselines: bool, where: torch.device) -> dict[str, Tokens]:
    """The patch tokens of a run's encoder and of what it must beat, by name."""
    config, encoder, _ = load_encoder(run)
    epoch = int(run.checkpoint().name.split("_")[1])
    own = {f"{run.method} epoch {epoch}" if epoch else run.method: tokens_of(encoder.to(where))}
    if not baselines:
        return own
    untrained = random_weights(lambda: build_encoder(config.encoder, encoder.shape), config.train.seed)
    return own | {"random weights": tokens_of(untrained.to(where).eval()), "raw pixels": pixels_like(encoder)}


def pretrain_twin(path: Run | Path | str, splits: Splits | None = None) -> Run:
    """The MAE twin of a run, in the folder beside it; found again if it was finished, continued if it was not."""
    run = Run(path)
    out = run.path.with_name(f"{run.path.name}-mae")
    return pretrain(with_patches(run.config), splits, out, resume=(out / "config.json").exists())
