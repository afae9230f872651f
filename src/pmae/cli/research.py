"""`pmae sweep`, `spaces` and `paper`: many runs at the same budget, set side by side."""

from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from pmae.cli.parse import Count, Number, Switch, Text
from pmae.errors import require, unknown_name

Words = Annotated[tuple[str, ...], tyro.conf.arg(metavar="WORD...", help_behavior_hint="")]
Numbers = Annotated[tuple[float, ...], tyro.conf.arg(metavar="X...", help_behavior_hint="")]
Whole = Annotated[tuple[int, ...], tyro.conf.arg(metavar="N...", help_behavior_hint="")]
PARTS = ("figures", "table")
OPTIONS = {"train.seed": "--seeds", "train.epochs": "--epochs", "train.device": "--device", "data.root": "--root"}
"""Settings that commands which make many runs have options for."""
SHARES = dict.fromkeys(("masking.masked_variance", "masking.masked_patches", "masking.ratio_schedule"), "--ratios")
"""Settings that commands have options for, of which `--set` would be overruled or would overrule them unseen."""


@dataclass(frozen=True, kw_only=True)
class ManyRuns:
    """What all commands that make many runs take."""

    epochs: Count = None
    """Epochs of pretraining."""
    seeds: Whole = (0,)
    """Repetitions of pretraining and evaluation; 0 if not given."""
    settings: Annotated[Words, tyro.conf.arg(name="set", metavar="NAME=VALUE...")] = ()
    """Further settings of all runs."""
    runs: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FOLDER...", help_behavior_hint="")] = ()
    """More folders of runs to look in."""
    root: str = "data"
    """Folder of named data sets."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    at_once: Count = None
    """Runs at a time on this machine, on one GPU or the CPU; 1 if not given."""
    ray: Annotated[Text, tyro.conf.arg(metavar="local|HOST:PORT")] = None
    """Run several at a time by Ray, on this machine or on a cluster."""
    gpus_each: Number = None
    """With --ray: share of a GPU for a run; 1, or 0 where there are none."""
    cpus_each: Number = None
    """With --ray: CPU cores for a run; 1 if not given."""

    def workers(self) -> AbstractContextManager[Any] | None:
        """Workers in processes of this machine or on Ray, if they are asked for."""
        if self.at_once is not None:
            from pmae.sweep.workers import LocalWorkers

            require(self.ray is None, "--at-once", "given without --ray, which counts for itself", self.at_once)
            return closing(LocalWorkers(self.at_once))
        if self.ray is None:
            for flag, value in {"--gpus-each": self.gpus_each, "--cpus-each": self.cpus_each}.items():
                require(value is None, flag, "given with --ray, which hands them out", value)
            return None
        from pmae.sweep.workers import ray_workers

        gpus = 0 if self.gpus_each is None and self.device == "cpu" else self.gpus_each
        return ray_workers(self.ray, gpus, 1 if self.cpus_each is None else self.cpus_each)


@dataclass(frozen=True)
class Sweep(ManyRuns):
    """Pretrain over a grid of settings and find the best by validation; finished runs are reused, stopped ones go on.

    `ratio` is masking.masked_variance, or masking.masked_patches in pixel space; several settings make a grid.

    examples:
      pmae sweep ratio --data cifar10 --ratios 0.1 0.2 0.4 --epochs 50 --out runs/ratios
      pmae sweep ratio --data cifar10 --ratios 0.1 0.2 0.4 --epochs 50 --at-once 3
      pmae sweep encoder.patch_size 2 4 8 --data scans/ --set data.labels=folders data.resize=32
      pmae sweep ratio 0.1 0.2 optim.base_lr 1.5e-4 5e-4 --recipe mae --data bloodmnist --seeds 0 1
      pmae sweep ratio --data cifar10 --ratios 0.1 0.2 0.3 0.4 --epochs 90 --search asha --ray local --gpus-each 0.25
    """

    grid: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="SETTING VALUE...")]
    """`ratio` or a dotted setting, followed by its values."""
    ratios: Words = ()
    """Values of the masking ratio."""
    data: Text = None
    """A named set, a folder, a .npy or a .npz file."""
    recipe: str = "ours"
    """Where the other settings come from: ours, paper, released, mae, ..."""
    out: str = "runs/sweep"
    """Folder for table, plot and, in runs/, the runs."""
    search: str = "grid"
    """grid: all runs to their end; asha: only the best third of each rung goes on."""

    def run(self) -> None:
        require(bool(self.grid), "arguments", "a setting and its values, such as: ratio 0.1 0.2", self.grid)
        from pmae.config import replace
        from pmae.config_file import settings_given, with_settings
        from pmae.files import folder_path
        from pmae.paper.recipes import recipe
        from pmae.report.page import write_page
        from pmae.report.tables import to_markdown
        from pmae.sweep.grid import RATIO, parse_grid, sweep

        given = {"data__source": self.data, "train__epochs": self.epochs}
        given = {key: value for key, value in given.items() if value is not None}
        base = replace(recipe(self.recipe), train__device=self.device, data__root=self.root, **given)
        settings = dict(settings_given(self.settings, OPTIONS | {"data.source": "--data"}))
        base = with_settings(base, settings)
        words, out = list(self.grid), folder_path(self.out)
        if self.ratios:
            words = [word for word in words if word != RATIO] + [RATIO, *self.ratios]
        grid = parse_grid(words, base)
        for name in grid.keys() & settings.keys():
            require(False, name, "left out of --set, for the grid has its values", settings[name])
        page = sweep(base, grid, self.seeds, out, self.search, self.workers(), self.runs)
        files = write_page("sweep", "Sweep", page, out)
        print("\n".join([to_markdown(page.tables[0]), *page.notes, *map(str, files)]))


@dataclass(frozen=True)
class Spaces(ManyRuns):
    """Compare masking spaces: pretrain in each at the same budget and set them in one table; draw what each hides.

    A space is a name, or a name with settings of its own: kernel_pca:landmarks=1024,gamma=0.0003. The same command
    again continues where it was stopped. Encoder ViT-T, patches of 8 where they divide the images, a small decoder, one
    mask an image; --set changes that for all.

    examples:
      pmae spaces --data cifar10                                  figures, and a table of 13 spaces at three ratios each
      pmae spaces figures --data scans/ --images 5000             basis images, masks and spectra: fits, trains nothing
      pmae spaces table --data cifar10 --spaces pca cosine:grouped=true pixels --ratios 0.1 0.2 --epochs 100
      pmae spaces table --only-found --runs results/runs          from stored results, running nothing
    """

    parts: Annotated[tyro.conf.Positional[Words], tyro.conf.arg(metavar="PART...")] = ()
    """figures, table or, if not given, both."""
    data: str = "photos"
    """A named set, a folder, a .npy or a .npz file."""
    spaces: Words = ()
    """Spaces to compare; thirteen if not given."""
    ratios: Numbers = ()
    """Masked shares of the variance; 0.1 0.2 0.4 if not given."""
    mae_ratios: Numbers = ()
    """Masked shares of the patches; 0.5 0.75 0.9 if not given."""
    preset: str = "strong"
    """How to evaluate: strong, paper, released or plain."""
    head_epochs: Count = None
    """Epochs of probes, if not the preset's."""
    images: Count = None
    """For figures: how many training images to fit on; all if not given."""
    picture: int = 0
    """For figures: which held-out image to hide parts of."""
    out: str = "runs/spaces"
    """Folder for table, figures and, in runs/, the runs."""
    only_found: Switch = False
    """For the table: use runs and results that are there; run nothing."""

    def run(self) -> None:
        for part in self.parts:
            if part not in PARTS:
                raise unknown_name("part", part, PARTS)
        from pmae.config import Config, DataConfig
        from pmae.config_file import settings_given, with_settings
        from pmae.data.sets import settled
        from pmae.files import folder_path
        from pmae.report.page import write_page
        from pmae.report.tables import to_markdown
        from pmae.sweep.scoring import Scoring
        from pmae.sweep.space_figures import figures_page
        from pmae.sweep.spaces import TITLE, SpaceGrid, table_page

        by_option = OPTIONS | SHARES | {"space.name": "--spaces", "data.source": "--data"}
        given = dict(settings_given(self.settings, by_option))
        of_data = {name: value for name, value in given.items() if name.startswith("data.")}
        data = settled(with_settings(Config(data=DataConfig(source=self.data, root=self.root)), of_data).data)
        others = tuple((name, value) for name, value in given.items() if name not in of_data)
        named = {name: value for name in ("spaces", "ratios", "mae_ratios") if (value := getattr(self, name))}
        epochs = 50 if self.epochs is None else self.epochs
        grid = SpaceGrid(data, epochs=epochs, seeds=self.seeds, settings=others, device=self.device, **named)
        scoring = Scoring(folder_path(self.out), self.runs, (self.preset,), (), self.head_epochs, self.only_found)
        with self.workers() or nullcontext() as workers:
            for part in self.parts or PARTS:
                drawn = part == "figures"
                page = figures_page(grid, self.images, self.picture) if drawn else table_page(grid, scoring, workers)
                paths = write_page(f"spaces-{part}", f"{TITLE}: not in the paper", page, scoring.out)
                print("\n".join([*map(to_markdown, page.tables), *map(str, paths)]))


@dataclass(frozen=True)
class Paper(ManyRuns):
    """Reproduce a table or figure of the paper: run what is missing, and set it beside the published numbers.

    The same command again continues where it was stopped. An oracle's ratio is chosen on validation images (the val
    split, or a fifth of the training images where there is none), never on those of the final number.

    examples:
      pmae paper --list                                                     every table and figure, with its cost
      pmae paper status --runs results/runs                                 which cells of the main table have been run
      pmae paper main --datasets cifar10 bloodmnist --epochs 100 --seeds 0 1 2 --out runs/paper
      pmae paper ratio --recipe masking --ratios 0.1 0.2 0.4 --epochs 50 --set encoder.patch_size=8
      pmae paper knn --datasets cifar10 --runs results/runs --only-found    from stored results, running nothing
    """

    names: Annotated[tyro.conf.Positional[Words], tyro.conf.arg(metavar="NAME...")] = ()
    """Tables and figures by the names that --list gives, or status."""
    listed: Annotated[Switch, tyro.conf.arg(name="list")] = False
    """Tables and figures, all or those named, with runs, images seen and hours."""
    datasets: Words = ()
    """cifar10 tinyimagenet dermamnist bloodmnist pathmnist."""
    methods: Words = ()
    """Only these rows: mae_std mae_oracle mae_random ..."""
    recipe: str = "paper"
    """How to train: paper, released, masking or ours."""
    ratios: Numbers = ()
    """Masking ratios to search; 0.1 to 0.9 if not given."""
    protocols: Words = ()
    """Only these of linear mlp knn finetune."""
    preset: Words = ()
    """How to evaluate: paper, released, plain, strong; the recipe's own if not given."""
    pooling: str = "cls"
    """Which representation's accuracies to show: cls, as the paper does, or mean."""
    head_epochs: Count = None
    """Epochs of probes and fine-tuning, if not the preset's."""
    out: str = "runs/paper"
    """Folder for tables, figures and, in runs/, the runs."""
    only_found: Switch = False
    """Use runs and results that are there; run nothing."""
    images_per_second: Number = None
    """For --list: this machine's speed, at 32x32 in patches of 8."""

    def run(self) -> None:
        from pmae.config_file import settings_given
        from pmae.files import folder_path
        from pmae.paper.runner import check, reproduce, status
        from pmae.paper.tables import RATIOS, RunChoices, items
        from pmae.report.tables import to_markdown
        from pmae.sweep.scoring import Scoring

        by_option = OPTIONS | SHARES | {"data.source": "--datasets"}
        ratios, settings = self.ratios or RATIOS, settings_given(self.settings, by_option)
        speed = self.images_per_second
        require(self.listed or speed is None, "--images-per-second", "given with --list", speed)
        trained = (self.recipe, self.datasets, self.epochs, self.seeds, ratios, settings)
        pretraining = RunChoices(*trained, self.root, self.device, self.methods)
        presets = self.preset or ("released" if self.recipe == "released" else "paper",)
        scored = (presets, self.protocols, self.head_epochs, self.only_found, self.pooling)
        scoring = Scoring(folder_path(self.out), self.runs, *scored)
        if self.names == ("status",):
            print(to_markdown(status(pretraining, scoring)))
            return
        wanted = [] if self.listed and not self.names else items(self.names)
        if self.listed:
            from pmae.paper.tables import cost_lines

            print("\n".join(cost_lines(pretraining, scoring, speed, wanted)))
            return
        with self.workers() or nullcontext() as workers:
            for item in wanted:  # all of them before the first one, which may take days
                check(item, pretraining, scoring)
            for item in wanted:
                page, paths = reproduce(item, pretraining, scoring, workers)
                notes = [f"- {note}" for note in page.notes]
                print("\n".join([*(to_markdown(table) for table in page.tables[:1]), *notes, *map(str, paths)]))
