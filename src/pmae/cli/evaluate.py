"""`pmae evaluate` and `pmae report`: what a run's encoder is worth, and a page that shows it."""

import sys
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import tyro

from pmae.cli.parse import Out, RunFolder, Switch, Text
from pmae.config import DataConfig
from pmae.errors import require


@dataclass(frozen=True)
class Evaluate:
    """Score a run's encoder with probes, k-NN and fine-tuning, beside what needs no pretraining.

    examples:
      pmae evaluate runs/a
      pmae evaluate runs/a --data labelled/ --labels folders --protocols linear knn
      pmae evaluate runs/a --preset paper --protocols linear mlp knn finetune --with mae
    """

    path: RunFolder
    """Run folder."""
    preset: Literal["paper", "released", "plain", "strong"] = "strong"
    """The settings of all protocols."""
    protocols: list[Literal["linear", "mlp", "knn", "finetune"]] = field(
        default_factory=lambda: ["linear", "mlp", "knn"]
    )
    """What to score with."""
    epochs: list[int] = field(default_factory=list)
    """Checkpoints to score; the last if not given."""
    seeds: list[int] = field(default_factory=lambda: [0])
    """Seeds of the heads."""
    no_baselines: Switch = False
    """Score the run alone."""
    twin: Annotated[Literal["mae"] | None, tyro.conf.arg(name="with")] = None
    """Pretrain the MAE twin too, and score it."""
    data: Text = None
    """Another labelled set: a name or a path."""
    root: Text = None
    """Folder of named sets, if not the run's."""
    labels: Literal["none", "folders"] | None = None
    """Whether subfolders of --data are classes."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""

    def run(self) -> None:
        """Score, and print the table."""
        from pmae import api
        from pmae.data.sets import load
        from pmae.evaluate.protocols import only, preset
        from pmae.evaluate.suite import score_table
        from pmae.train.distributed import is_main

        protocols = only(preset(self.preset), self.protocols)
        splits = load(self._labelled()) if self.data or self.root or self.labels else None
        runs = [self.path, *([str(api.pretrain_twin(self.path, splits).path)] if self.twin else [])]
        for path in runs:
            epochs: list[int | None] = [*self.epochs] or [None]
            run = api.evaluate(path, protocols, splits, epochs, not self.no_baselines, self.seeds, self.device, print)
            if is_main():
                print(f"{run.path}\n{score_table(run)}")

    def _labelled(self) -> DataConfig:
        """The run's own data settings, with what the command line says otherwise."""
        from pmae.runs import Run

        given: dict[str, Any] = {"source": self.data, "root": self.root, "labels": self.labels}
        return replace(Run(self.path).config.data, **{k: v for k, v in given.items() if v is not None})


@dataclass(frozen=True)
class Report:
    """Write one self-contained HTML page about one or several runs.

    examples:
      pmae report runs/a
      pmae report runs/a runs/b -o both.html
    """

    runs: Annotated[tyro.conf.Positional[list[str]], tyro.conf.arg(metavar="RUN...")]
    """Run folders; a page about several compares them."""
    out: Out = "report.html"
    """The page to write; its tables and figures go beside it."""

    def run(self) -> None:
        """Write, and say where."""
        require(bool(self.runs), "runs", "one run folder or more", self.runs)
        from pmae.report.page import write_report

        for sentence in write_report(self.runs, self.out):
            print(f"left out: {sentence}", file=sys.stderr)
        print(f"report: {self.out}")
