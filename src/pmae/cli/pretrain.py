"""`pmae pretrain`, whose options are the settings themselves."""

import operator
import os
import re
import time
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from pmae.cli.parse import SHORT, Count, Number, Switch, Text, parse
from pmae.config import Config, replace
from pmae.errors import UserError
from pmae.validation import check_not_renamed

CALLED = {
    "held_out_r2": "R2 of held-out images",
    "train_r2": "R2 of training images",
    "linear": "quick linear probe, validation images",
    "knn": "quick k-NN, validation images",
}
"""What the numbers at the end are; those of test images come from `pmae evaluate`."""


@dataclass(frozen=True)
class Start:
    """The options that choose where the settings start from."""

    out: Text = None
    """Run folder to write, or its address in a store (s3://...); runs/DATA-METHOD if not given."""
    resume: Switch = False
    """Continue the run in --out from its last checkpoint."""
    recipe: Text = None
    """Start from a named recipe: ours (the default), paper, released, mae, mae_released, kmae, masking, ..."""
    config: Text = None
    """Start from a config.json; with a run's own file this repeats the run."""

    @classmethod
    def among(cls, arguments: Sequence[str]) -> "Start":
        """These options alone; what is wrong with them, the whole command line says better."""
        try:
            return tyro.cli(Start, args=list(arguments), return_unknown_args=True, console_outputs=False)[0]
        except SystemExit:
            return Start()

    def place(self) -> Path | str:
        """The run folder, or its address in a store."""
        from pmae.files import folder_path
        from pmae.remote import is_remote

        return str(self.out) if is_remote(self.out) else folder_path(str(self.out))

    def base(self) -> Config:
        """The settings of the recipe, the file or the run."""
        from pmae.files import folder_path
        from pmae.paper.recipes import recipe
        from pmae.runs import Run, read_config

        if sum((self.recipe is not None, self.config is not None, self.resume)) > 1:
            raise UserError("--recipe, --config and --resume must not be combined: each names a whole set of settings")
        if self.resume:
            if self.out is None:
                raise UserError("--resume must come with --out, the run folder to continue")
            return Run(self.place()).config
        if self.config is not None:
            return read_config(folder_path(self.config, "config"))
        return recipe("ours" if self.recipe is None else self.recipe)


@dataclass(frozen=True)
class Common(Start):
    """Pretrain an encoder without labels on a named set, a folder or an array file.

    Whatever is not given follows from the data, and is printed with its reason. Every other setting is an option too,
    by its dotted name: pmae pretrain --help-all lists them.

    examples:
      pmae pretrain --data photos --out runs/a --epochs 20
      pmae pretrain --data scans/ --data.resize 64 --out runs/b
      pmae pretrain --data scans/ --minutes 30 --out runs/short
      pmae pretrain --data photographs/ --data.max-images 5000 --out runs/try    a part, for a quick try
      pmae pretrain --init weights/ --data scans/ --data.resize 224 --out runs/adapted
      pmae pretrain --recipe paper --data cifar10 --out runs/c
      pmae pretrain --config runs/c/config.json --out runs/d
      pmae pretrain --out runs/c --resume
    """

    data: Text = None
    """A named set, or the path or address of a folder, an array file or shards; the embedded photos if not given."""
    root: Text = None
    """Folder that holds the files of named sets; data if not given."""
    epochs: Count = None
    """Passes over the images; follows from their number if not given."""
    minutes: Number = None
    """In place of epochs, how long all may take: a short trial finds how many epochs fit on this machine."""
    batch_size: Count = None
    """Images in a step; follows from their number if not given."""
    seed: Count = None
    """Of everything random; 0 if not given."""
    device: Text = None
    """auto (a GPU where there is one), cpu, cuda or cuda:N."""
    space: Text = None
    """Masking space: pca, patch_pca, kernel_pca, cosine, wavelet, pixels (MAE), ..."""
    masked_variance: Number = None
    """Share of the variance to hide, in a space of components; 0.2 if not given."""
    masked_patches: Number = None
    """Share of the patches to hide, in pixel space; 0.75 if not given."""
    init: Text = None
    """Start from a run, or from weights that timm or Hugging Face wrote (hf://USER/NAME too), and adapt them."""
    teacher: Text = None
    """Learn the tokens of a finished encoder too: a run, or weights as for --init (distillation)."""
    encoder: Text = None
    """vit_tiny, smaller without a GPU, or any timm image model."""
    patch_size: Count = None
    """Side of a patch in pixels; follows from the images' size if not given."""
    decoder: Text = None
    """released, text or small; derived if not given."""
    probe_data: Text = None
    """A labelled set, or a table of files beside it, with which the encoder is probed while it trains."""
    verbose: Switch = False
    """Print every setting, not only what was given or derived."""


@dataclass(frozen=True)
class Pretrain(Common):
    """Pretrain an encoder without labels; every setting of a run, by its dotted name."""

    settings: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> "Pretrain":
        """The command with the settings that a recipe, a file or a run gives where no option says otherwise."""
        if {"-h", "--help"} & set(arguments):
            parse(Common, ["--help"], "pretrain")
        if "--help-all" in arguments:
            parse(cls, ["--help"], "pretrain")
        options = [argument.partition("=")[0] for argument in arguments]
        for option in options:
            check_not_renamed(option.removeprefix("--").replace("-", "_"))
        found = parse(cls, arguments, "pretrain", cls(settings=Start.among(arguments).base()))
        if found.minutes is not None and {"--epochs", "--train.epochs"} & set(options):
            raise UserError(f"--minutes must be left out where --epochs is given, got {found.minutes:g}")
        found.require_agreement({option.replace("_", "-") for option in options})
        return found

    def require_agreement(self, typed: Set[str]) -> None:
        """Refuse a setting whose short and dotted options were both typed, with different values."""
        for name, setting in SHORT.items():
            short, dotted = (f"--{each.replace('_', '-')}" for each in (name, setting))
            value, other = getattr(self, name), operator.attrgetter(setting)(self.settings)
            if dotted in typed and value not in (None, other):
                raise UserError(f"{short} and {dotted} must agree where both are given, got {value} and {other}")
        if self.teacher is not None and "--objective.contrastive" in typed:
            raise UserError(f"--teacher must be left out where --objective.contrastive is given, got {self.teacher!r}")

    def configured(self) -> Config:
        """The settings, the short options among them."""
        given = {name: getattr(self, name) for name in SHORT if getattr(self, name) is not None}
        changes = {SHORT[name].replace(".", "__"): value for name, value in given.items()}
        if self.teacher is not None:
            changes["objective__contrastive"] = f"distill(teacher={self.teacher!r})"
        return replace(self.settings, **changes)

    def run(self) -> None:
        began, config = time.monotonic(), self.configured()
        from pmae import api  # seconds, which are among the minutes
        from pmae.train.distributed import is_main

        out = _default_folder(config) if self.out is None else self.place()
        run = api.pretrain(config, out=out, resume=self.resume, verbose=self.verbose, minutes=self.minutes, began=began)
        if not is_main():
            return
        predicts = run.config.objective.reconstruction_weight > 0
        scores = {name: value for name, value in run.results["pretrain"].items() if isinstance(value, float)}
        scores = {name: value for name, value in scores.items() if predicts or "r2" not in name}
        print("\n".join(_told(name, value) for name, value in scores.items()))
        print(f"run folder: {run.path}   (config.json, metrics.jsonl, checkpoints/, figures/)")
        print(_judgement(run.path))


def _told(name: str, value: float) -> str:
    """A line about a score; R2 within a band of the spectrum has the ends of the band in its name."""
    band = re.fullmatch(r"r2_band_(\d+)_(\d+)", name)
    words = f"  components from {band[1]} to {band[2]}% of the variance" if band else CALLED.get(name)
    shown = f"{value:.1%}" if words else f"{value:.4g}"
    return f"  {words or name.replace('_', ' '):<44} {shown}"


def _default_folder(config: Config) -> str:
    """runs/DATA-METHOD: the space itself may still follow from the data, as patch_pca does from pca."""
    space = config.space.name.partition("(")[0]
    method = {"pca": "pmae", "pixels": "mae"}.get(space, space)
    source = config.data.source.rstrip("/")
    named = os.path.abspath(source) if os.path.basename(source) in (".", "..") else source
    return f"runs/{os.path.basename(named)}-{method}"


def _judgement(path: Path) -> str:
    """What the report says of the training, and the commands that come next."""
    from pmae.plugins import command_line
    from pmae.report.advice import HARDLY, training_advice
    from pmae.report.contents import load

    told = load(path, whole=False)
    said = next(training_advice(told), None)
    probed, others = any("linear" in line for line in told.signals), told.config.probe.data
    elsewhere = ["--data", others] if probed and others and not told.has_labels else []
    commands = [command_line("evaluate" if probed else "report", path, *elsewhere)]
    if said is None:
        return f"nothing was to be predicted, so there is no R2\nnext: {commands[0]}"
    if said.command:
        commands.insert(0 if said.title == HARDLY else 1, said.command)
    return f"{said.title}: {said.words}\nnext: " + "\n  or: ".join(commands)
