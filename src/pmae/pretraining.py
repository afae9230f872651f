"""A pretraining from its settings and images to a run: what is read, what follows from it, and what is kept of it."""

import dataclasses
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from torch.utils.data import DataLoader, Dataset

from pmae.budget import settings_within
from pmae.classify.labels import as_splits, read_labelled
from pmae.classify.table import Columns
from pmae.config import Config, DataConfig, replace
from pmae.config_file import describe
from pmae.data.arrays import from_arrays, from_torch
from pmae.data.color import hues_of
from pmae.data.images import ImageSet, Splits, fingerprint, require_finite, require_like
from pmae.data.limit import limited
from pmae.data.sets import load_settled, read_like, with_held_out
from pmae.data.streamed import untold
from pmae.derive import resolve
from pmae.errors import UserError, require
from pmae.evaluate.probes import online_probe
from pmae.models.described import adopted
from pmae.models.encoder import require_network
from pmae.models.weights import require_weights
from pmae.runs import Run, learned_on
from pmae.train import loop
from pmae.train.distributed import is_main
from pmae.train.environment import pick_device, release_memory
from pmae.train.journal import say
from pmae.train.stages import first_epochs


@dataclass(frozen=True)
class Prepared:
    """Images that are read, and settings with nothing left open for them."""

    config: Config
    reasons: dict[str, str]
    """Of every setting that was derived."""
    given: Config
    """The settings as they were before, but for those that reading and given weights settled."""
    whole: Splits
    splits: Splits
    """The same with a held-out part, where there was none."""
    probe: Splits
    draw: Callable[[Run], object] | None
    """The figures of a finished run, if they are wanted."""
    fitted: Path | None = None
    """The folder of a run whose fit to the same images is taken."""

    def within(self, minutes: float, began: float, folder: Path, quiet: bool) -> Self:
        """The same with as many epochs as fit into the minutes since it began, which a short trial tells.

        A new folder keeps what is fitted to the images, for the trial and for the run.
        """
        with loop.alone(self.config, self.splits, folder, quiet):
            pass  # what is fitted is in the folder now
        release_memory()
        fitted = dataclasses.replace(self, fitted=folder)
        found = settings_within(minutes, began, self.given, self.config, fitted.train)
        chosen = {name.replace(".", "__"): value for name, (value, _) in found.items()}
        config, reasons = resolved(replace(self.given, **chosen), self.splits)
        read = {name: reason for name, reason in self.reasons.items() if name.startswith("data.")}
        reasons = {**read, **reasons, **{name: why for name, (_, why) in found.items()}}
        return dataclasses.replace(fitted, config=config, reasons=reasons)

    def described(self, verbose: bool) -> str:
        """The images, and the settings that were given or derived, or all of them."""
        train, (channels, height, width) = self.splits.train, self.splits.train.shape
        counts = ", ".join(f"{len(part):,} {name}" for name, part in self.splits.parts.items())
        kind = "vectors" if train.vectors else "signals" if height == 1 else "images"
        size = f"{width} numbers" if height == 1 else f"{height}x{width}"
        depth = f"{channels} channel{'s' * (channels > 1)}, {train.images.dtype}"
        counted = f"{self.splits.name}: {counts} {kind} of {size}, {depth}"
        return "\n".join([counted, *untold(self.splits.notes), describe(self.config, self.reasons, verbose)])

    def train(
        self,
        config: Config,
        folder: Path | str,
        again: bool = False,
        quiet: bool = True,
        until: int | None = None,
        on_checkpoint: Callable[[], None] = lambda: None,
    ) -> Run:
        """Train these settings into a folder, from where it stopped if `again`, and draw what came of it."""
        watch = online_probe(self.probe)
        run = loop.pretrain(config, self.splits, folder, again, quiet, watch, until, on_checkpoint, self.fitted)
        if is_main():
            if self.splits.val is not None and self.splits is not self.whole:
                run.add_results(held_out=list(self.splits.val.names))
            # Of two stages the second alone has the patches that remain, and begins with an adapted encoder.
            alone = not config.encoder.first_patch_size
            if config.encoder.weights and alone and (told := add_adaptation(run)) and not quiet:
                say(told)
            if self.draw:
                self.draw(run)
        return run


def prepare(config: Config, images: Any, resume: bool, draw: Callable[[Run], object] | None) -> Prepared:
    """Read what `config.data` names, or take `images` in memory, and settle what follows from them."""
    asked = config.data
    # Images may take minutes to read; what is wrong without them is told before.
    require_network(config.encoder.name)
    rule = "left out where probe.data is not given"
    require(config.probe.data is not None or not config.probe.columns, "probe.columns", rule, config.probe.columns)
    if config.encoder.weights and not resume:  # a run that has begun may not need them any more
        require_weights(config.encoder.weights)
    data, whole = load_settled(asked) if images is None else (asked, in_memory(images, asked))
    # Later commands would crop what was trained on whole.
    rule = "1 where images keep their size, as without data.resize"
    require(resume or data.resize is not None or data.crop_pct == 1, "data.crop_pct", rule, data.crop_pct)
    splits = with_held_out(whole)
    encoder = adopted(config.encoder, splits.train.shape)
    given = dataclasses.replace(config, data=data, encoder=encoder)
    config, reasons = resolved(given, splits)
    if data.resize != asked.resize:
        reasons["data.resize"] = "squares of at most 224 pixels where the sizes of files differ or are large"
    if data.channels != asked.channels:
        reasons["data.channels"] = "some files are grey and others in color"
    probe = _probe_data(config, splits.train) if config.probe.data else splits
    require_like("probe.data", probe.train, splits.train.shape, str(splits.train.images.dtype))
    # Of the images that are not trained on; fitting tells of NaN in the others.
    for name, part in splits.parts.items():
        if name != "train":
            require_finite(f"the {name} images", part.images)
    return Prepared(config, reasons, given, whole, splits, probe, draw)


def resolved(config: Config, splits: Splits) -> tuple[Config, dict[str, str]]:
    """The settings with nothing left open for these images on this machine, and the reasons."""
    train, gpu = splits.train, pick_device(config.train.device).type == "cuda"
    weights = config.encoder.weights
    goes_on = weights is not None and learned_on(weights, fingerprint(splits))
    known = (train.vectors, gpu, train.images.dtype.name, hues_of(train), goes_on)
    channels, height, width = train.shape
    if len(train) in (3, 4) and channels == 1 and height > 1 and not train.names:
        # As many grey images as one in color has channels: nobody trains on three or four.
        told = f"the array is taken for {len(train)} grey images of {height}x{width}"
        warnings.warn(f"{told}; if it is one image with {len(train)} channels, give array[None]", stacklevel=2)
    found, reasons = resolve(config, len(train), train.shape, *known)
    if "encoder.first_patch_size" in reasons:
        both = f"{first_epochs(found) * (found.train.epochs or 1):,} epochs with them and then {found.train.epochs:,}"
        reasons["encoder.first_patch_size"] += f"; {both}, each as long"
    return found, reasons


def in_memory(images: Any, config: DataConfig) -> Splits:
    """Arrays, tensors, a torch data set, an `ImageSet` or whole `Splits` as a data set."""
    if isinstance(images, Splits):
        return images  # as they are: whoever has read them has drawn from them
    if isinstance(images, Dataset | DataLoader):
        return limited(Splits(type(images).__name__, from_torch(images)), config)
    found = images if isinstance(images, ImageSet) else from_arrays(images, layout=config.layout)
    return limited(Splits("array", found), config)


def _probe_data(config: Config, train: ImageSet) -> Splits:
    """Labelled images: signals and vectors laid out as those that are trained on, files resized as they are."""
    layout = config.data.layout if train.shape[1] == 1 else "auto"
    changes: dict[str, Any] = {"source": config.probe.data, "layout": layout, "labels": "none", "max_images": None}
    reading = read_like(dataclasses.replace(config.data, **changes), train.shape)
    try:
        return as_splits(read_labelled(reading, columns=Columns.typed(config.probe.columns))[1])
    except UserError as error:
        raise UserError(f"probe.data: {error}") from error


def add_adaptation(run: Run) -> str | None:
    """Note k-NN and the linear probe before and after given weights were adapted, and say whether it helped."""
    lines = [line for line in run.metrics() if "knn" in line]
    if not lines or lines[0]["step"] != 0 or lines[-1]["step"] == 0:
        return None
    before, after = ({name: line[name] for name in ("knn", "linear")} for line in (lines[0], lines[-1]))
    run.add_results(adaptation={"before": before, "after": after})
    gain = after["knn"] - before["knn"]
    worse = "adapting seems not to help: the given weights serve these images better"
    verdict = "adapting seems to help" if gain > 0 else worse if gain < 0 else "adapting made no difference"
    return f"k-NN {before['knn']:.1%} before, {after['knn']:.1%} after: {verdict}; pmae evaluate tells how sure that is"
