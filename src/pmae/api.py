"""The front door in Python: from a name, a path or an array to a finished run folder, and from there to evidence."""

import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from pmae.config import Config, DataConfig, SpaceConfig, replace
from pmae.data.batches import Batches
from pmae.data.images import ImageSet, Splits, with_held_out
from pmae.data.readers.arrays import from_arrays
from pmae.data.sets import load
from pmae.derive import describe, resolve
from pmae.errors import UserError
from pmae.evaluate import suite
from pmae.evaluate.baselines import RawPixels, fit_pca, random_weights
from pmae.evaluate.features import Part, Representation, extract
from pmae.evaluate.online import watch_with
from pmae.evaluate.protocols import Protocols, only, preset, without_augmentation
from pmae.evaluate.splits import complete
from pmae.models import build_encoder
from pmae.report.charts import save_figures
from pmae.runs import Run, write_whole
from pmae.train import loop
from pmae.train.checkpoint import load_encoder
from pmae.train.distributed import World, is_main, local_device, process_group
from pmae.train.environment import pick_device

MAPPED = 2000


def pretrain(
    config: Config | None = None,
    images: Any = None,
    out: Path | str = "runs/pmae",
    resume: bool = False,
    quiet: bool = False,
    until: int | None = None,
    figures: bool = True,
) -> Run:
    """Pretrain on what `config.data` names, or on `images` in memory, into the run folder `out`.

    With `until` it stops after that epoch of its schedule, to be resumed later or never. The `figures` of a run take
    seconds, which count where there are many runs.
    """
    config = config or Config()
    whole = load(config.data) if images is None else in_memory(images, config.data)
    splits, gpu = with_held_out(whole), pick_device(config.train.device).type == "cuda"
    config, reasons = resolve(config, len(splits.train), splits.train.shape, splits.train.vectors, gpu)
    probe = load(_probe_data(config, splits.train)) if config.probe.data else splits
    _same_shape("probe.data", splits.train.shape, probe.train)
    quiet = quiet or not is_main()
    if not quiet:
        print("\n".join([f"{splits.name}: {_counts(splits)}", *splits.notes, describe(config, reasons)]), flush=True)
    run = loop.pretrain(config, splits, out, resume, quiet, watch_with(probe), until)
    if is_main():
        if splits.val is not None and splits is not whole:
            run.add_results(held_out=list(splits.val.names))
        if figures:
            save_figures(run)
    return run


def evaluate(
    path: Path | str,
    protocols: Protocols | None = None,
    splits: Splits | None = None,
    epochs: Sequence[int | None] = (None,),
    baselines: bool = True,
    seeds: Sequence[int] = (0,),
    device: str = "auto",
    say: Callable[[str], None] = lambda message: None,
    figures: bool = True,
) -> Run:
    """Score a run's encoder, at its last checkpoint or at several epochs, and what it must beat; into results.json.

    Processes that `torchrun` started compute the features together, and the first one writes.
    """
    run, protocols, where = Run(path), protocols or preset("strong"), local_device(pick_device(device))
    config, encoder, standardize = load_encoder(run)
    splits = complete(splits or load(config.data))
    _same_shape("data", encoder.shape, splits.train)
    protocols = without_augmentation(protocols) if splits.train.vectors else protocols
    standardize = standardize.to(where)
    with process_group(where) as world:
        _require_no_finetuning(protocols, world)
        for epoch in epochs:
            _, encoder, _ = load_encoder(run, epoch)
            state = epoch or _last_epoch(run)
            label = f"{'mae' if config.space.name == 'pixels' else 'pmae'} epoch {state}"
            _score(run, label, encoder.to(where), splits, standardize, protocols, seeds, say, world)
        for label, (represent, chosen) in _baselines(run, splits, standardize, protocols).items() if baselines else ():
            _score(run, label, represent, splits, standardize, chosen, seeds, say, world)
    if is_main():
        _save_features(run, encoder, splits, standardize, where)
        if figures:
            save_figures(run)
    return run


def _require_no_finetuning(protocols: Protocols, world: World) -> None:
    if world.size > 1 and protocols.finetune:
        raise UserError(
            f"protocols must be linear, mlp or knn in several processes ({world.size}), got 'finetune': it trains the "
            "encoder, which one process does; run it without torchrun"
        )


def pretrain_twin(path: Path | str, splits: Splits | None = None) -> Run:
    """The MAE twin of a run, in the folder beside it; found again if it was finished, continued if it was not."""
    run = Run(path)
    out = run.path.with_name(f"{run.path.name}-mae")
    return pretrain(mae_twin(run.config), splits, out, resume=(out / "config.json").exists())


def mae_twin(config: Config) -> Config:
    """The same budget, model and data, with patches hidden instead of components."""
    pixels = {f"space__{key}": value for key, value in dataclasses.asdict(SpaceConfig("pixels")).items()}
    return replace(
        config,
        **pixels,
        masking__masked_variance=None,
        masking__masked_patches=0.75,
        objective__target="patches",
        objective__scale="mean",
    )


def score_table(run: Run) -> str:
    """Accuracies of everything evaluated in a run, as aligned lines."""
    lines = [f"  {'representation':<28} {'protocol':<9} {'pooling':<8} {'split':<6} {'accuracy':>8}   95% interval"]
    for label, found in run.results.get("evaluation", {}).items():
        for entry in found["results"]:
            score = entry["metrics"]["accuracy"]
            value, low, high = (float("nan") if score[k] is None else 100 * score[k] for k in ("value", "low", "high"))
            where = f"  {label:<28} {entry['protocol']:<9} {entry['pooling']:<8} {entry['split']:<6}"
            lines.append(f"{where} {value:8.1f}   {low:.1f} to {high:.1f}")
    return "\n".join(lines)


def in_memory(images: Any, config: DataConfig) -> Splits:
    """Arrays, tensors, an `ImageSet` or whole `Splits` as a data set."""
    if isinstance(images, Splits):
        return images
    return Splits("array", images if isinstance(images, ImageSet) else from_arrays(images, layout=config.layout))


def _score(
    run: Run,
    label: str,
    represent: Any,
    splits: Splits,
    standardize: Any,
    protocols: Protocols,
    seeds: Sequence[int],
    say: Callable[[str], None],
    world: World,
) -> None:
    """One representation through the suite, merged into results.json as soon as it is there."""
    # One a preset and data set: each is a fine-tuning of its own, to be gone on with by itself.
    folder = run.path / "finetune" / re.sub(r"[^\w.]+", "-", f"{label} {protocols.name} {splits.name}")
    found = suite.evaluate(
        represent,
        splits,
        standardize,
        protocols,
        device=standardize.mean.device,
        seeds=seeds,
        folder=folder,
        say=lambda message: say(f"{label}: {message}") if world.main else None,
        part=Part(world.rank, world.size, world.all_reduce),
    )
    with world.all_agree():
        if world.main:
            known, key = run.results.get("evaluation", {}), f"{label} [{protocols.name}]"
            run.add_results(evaluation={**known, key: _merged(known.get(key), found)})


def _merged(old: dict[str, Any] | None, new: dict[str, Any]) -> dict[str, Any]:
    """The new entries, and the old ones of other protocols on the same data."""
    if old is None or old["data"] != new["data"]:
        return new
    kinds = {entry["protocol"] for entry in new["results"]}
    kept = [entry for entry in old["results"] if entry["protocol"] not in kinds]
    return {**new, "results": kept + new["results"], "seconds": {**old["seconds"], **new["seconds"]}}


def _baselines(
    run: Run, splits: Splits, standardize: Any, protocols: Protocols
) -> dict[str, tuple[Representation, Protocols]]:
    """What needs no pretraining, by the names the report knows; from scratch is fine-tuning of random weights."""
    config, shape, device = run.config, splits.train.shape, standardize.mean.device
    untrained = random_weights(lambda: build_encoder(config.encoder, shape), config.train.seed).to(device)
    frozen = only(protocols, [kind for kind in ("linear", "mlp", "knn") if kind in kinds(protocols)])
    found: dict[str, tuple[Representation, Protocols]] = {}
    if "finetune" in kinds(protocols):
        found["from scratch"] = (untrained, only(protocols, ["finetune"]))
    if frozen.probe or frozen.knn:
        pca = fit_pca(Batches(splits.train.images, device), standardize, shape, untrained.width).to(device)
        found["random weights"] = (untrained, frozen)
        found["raw pixels"] = (RawPixels(shape, untrained.width), frozen)
        found["pca features"] = (pca, frozen)
    return found


def kinds(protocols: Protocols) -> list[str]:
    """The names of the protocols that are on."""
    probes = list(protocols.probe.kinds) if protocols.probe else []
    return probes + ["knn"] * bool(protocols.knn) + ["finetune"] * bool(protocols.finetune)


def _save_features(run: Run, encoder: Any, splits: Splits, standardize: Any, device: torch.device) -> None:
    """Mean features and labels of some test images, for the map in the report."""
    if splits.test is None or splits.test.labels is None:
        return
    part = splits.test.take(torch.linspace(0, len(splits.test) - 1, min(MAPPED, len(splits.test))).long().numpy())
    features = extract(encoder, Batches(part.images, device), standardize, compile=False)["mean"].cpu()
    tensors = {"features": features.contiguous(), "labels": torch.as_tensor(part.labels)}
    write_whole(run.path / "features.safetensors", lambda temporary: save_file(tensors, temporary))


def _last_epoch(run: Run) -> int:
    return int(run.checkpoint().name.removeprefix("epoch_").split("_")[0])


def _probe_data(config: Config, train: ImageSet) -> DataConfig:
    """Where the labelled images are; signals and vectors are laid out as those that are trained on."""
    layout = config.data.layout if train.shape[1] == 1 else "auto"
    return DataConfig(source=config.probe.data or "", root=config.data.root, layout=layout)


def _same_shape(parameter: str, shape: tuple[int, int, int], part: ImageSet) -> None:
    if part.shape != shape:
        raise UserError(f"{parameter} must have images of the shape that is trained on, {shape}, got {part.shape}")


def _counts(splits: Splits) -> str:
    channels, height, width = splits.train.shape
    parts = [(name, getattr(splits, name)) for name in ("train", "val", "test")]
    counts = ", ".join(f"{len(part):,} {name}" for name, part in parts if part is not None)
    kind = "vectors" if splits.train.vectors else "signals" if height == 1 else "images"
    size = f"{width} numbers" if height == 1 else f"{height}x{width}"
    return f"{counts} {kind} of {size}, {channels} channel{'s' * (channels > 1)}, {splits.train.images.dtype}"
