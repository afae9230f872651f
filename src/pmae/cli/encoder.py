"""`pmae evaluate`, `embed` and `export`: what a trained encoder is good for."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from pmae.cli.parse import ColumnNames, Count, Folders, OtherData, Out, RunFolder, RunOrWeights, Switch, Text
from pmae.errors import require

if TYPE_CHECKING:
    from pathlib import Path

    from pmae.config import DataConfig
    from pmae.data.images import Splits
    from pmae.evaluate.protocols import Protocols
    from pmae.results import Score
    from pmae.runs import Run


@dataclass(frozen=True)
class Evaluate(OtherData):
    """Score the encoder of a run or given weights with probes, k-NN and fine-tuning, beside what needs no pretraining.

    Weights are scored as they are, in their own size and with their own mean and standard deviation of pixels. The new
    folder --out keeps them and their scores as a run of no epochs, which pmae report shows beside others.

    examples:
      pmae evaluate runs/a
      pmae evaluate runs/a --data labelled/ --protocols linear knn        its subfolders are the classes
      pmae evaluate runs/a --data scans/ --labels scans.csv               a table with the columns file and label
      pmae evaluate runs/a --data scans/ --labels scans.csv --columns file=image_id label=diagnosis group=patient
      pmae evaluate runs/a --protocols knn --shots 1 5 10 --label-fraction 0.01 0.1
      pmae evaluate runs/a --protocols linear --layers 4       what the last four blocks say together
      pmae evaluate runs/a --preset paper --protocols linear mlp knn finetune --with mae
      pmae evaluate runs/a --data scans/ --masks masks/        a linear segmentation probe, with mIoU
      pmae evaluate weights/ --data labelled/ --out runs/weights          of timm or Hugging Face
      pmae evaluate hf://USER/NAME --data labelled/ --resize 224 --out runs/weights
    """

    path: RunOrWeights
    """Run folder, or weights of timm or Hugging Face: a .safetensors or .pth file, a folder, or hf://USER/NAME."""
    out: Annotated[str | None, tyro.conf.arg(aliases=["-o"], metavar="PATH", help_behavior_hint="")] = None
    """Of weights: the new folder for their scores, or one where this was interrupted; a run's go into its own."""
    encoder: Text = None
    """timm name of the network, for weights without a config.json that tells it."""
    preset: Literal["paper", "released", "plain", "strong"] = "strong"
    """The settings of all protocols."""
    protocols: tuple[Literal["linear", "mlp", "knn", "finetune"], ...] = ("linear", "mlp", "knn")
    """What to score with."""
    shots: tuple[int, ...] = ()
    """Score with few labels too: so many images of every class."""
    label_fraction: tuple[float, ...] = ()
    """The same with this share of the labels."""
    draws: int = 5
    """How often the few labelled images are drawn."""
    layers: int = 1
    """Read the mean patch tokens after so many of a ViT's last blocks, side by side; linear probes gain by 4."""
    epochs: tuple[int, ...] = ()
    """Checkpoints to score; the last if not given."""
    seeds: tuple[int, ...] = (0,)
    """Seeds of the heads."""
    no_baselines: Switch = False
    """Score the run alone."""
    twin: Annotated[Literal["mae"] | None, tyro.conf.arg(name="with")] = None
    """Pretrain the MAE twin too, and score it."""
    data: Text = None
    """Another labelled set: a name or a path."""
    labels: Text = None
    """folders (subfolders are classes), none, or a .csv or .parquet table of the files below --data."""
    columns: ColumnNames = ()
    """Of the table, as in file=image_id label=diagnosis group=patient; split too. A group stays in one split."""
    masks: Text = None
    """Folder of PNGs of class numbers, named like the images: probe the patches for them instead."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""

    def run(self) -> None:
        from pmae import api
        from pmae.classify.table import Columns
        from pmae.plugins import command_line
        from pmae.runs import Run
        from pmae.train.checkpoint import run_or_weights
        from pmae.train.distributed import is_main

        protocols, place = self.measures(), run_or_weights(self.path)
        given = not isinstance(place, Run) or place.method == "weights"
        require(not (given and self.twin), "with", "left out for weights, which were not pretrained here", self.twin)
        require(isinstance(place, Run) or self.out is not None, "out", "a new folder for the scores of weights", None)
        reading, splits = self.labelled(place) or (None, None)
        epochs, whole = self.epochs or (None,), not self.no_baselines
        new: dict[str, Any] = {"data": reading, "out": self.out, "encoder": self.encoder}
        for path in self.runs():
            if self.masks:
                run = api.segment(path, self.masks, splits, whole, self.device, print, **new)
            else:
                new |= {"labels": self.table, "columns": Columns.typed(self.columns).renamed}
                run = api.evaluate(path, protocols, splits, epochs, whole, self.seeds, self.device, print, **new)
            if is_main():
                print("\n".join([*([] if self.masks else told(run)), f"next: {command_line('report', run.path)}"]))

    def runs(self) -> Iterator[str]:
        """The run and then its twin, trained only now: what cannot be scored has been refused."""
        from pmae.api import pretrain_twin

        yield self.path
        if self.twin:
            yield str(pretrain_twin(self.path).path)

    def measures(self) -> "Protocols":
        """What is measured besides masks, and how."""
        from pmae.evaluate.protocols import FewLabelsProtocol, only, preset

        protocols = replace(only(preset(self.preset), self.protocols), layers=self.layers)
        if self.shots or self.label_fraction:
            few = FewLabelsProtocol(tuple(self.shots), tuple(self.label_fraction), self.draws)
            protocols = replace(protocols, few=few)
        rule = "given with --shots or --label-fraction"
        require(protocols.few is not None or self.draws == Evaluate.draws, "--draws", rule, self.draws)
        anything = bool(self.protocols or protocols.few or self.masks)
        require(anything, "protocols", "one or more of linear, mlp, knn and finetune", self.protocols)
        for name in ("layers", "epochs", "shots", "label_fraction", "seeds", "preset") if self.masks else ():
            usual, given = getattr(Evaluate, name), getattr(self, name)
            require(given == usual, name, "left out with masks, which probe the patches of the last checkpoint", given)
        return protocols

    @property
    def table(self) -> str | None:
        """The table of labels, where there is one beside the images."""
        return None if self.labels in (None, "none", "folders") else self.labels

    def labelled(self, place: "Run | Path") -> "tuple[DataConfig, Splits] | None":
        """The images to score on, where they are not the run's own as it read them, and how they are read."""
        from pmae.classify.labels import as_splits, read_labelled
        from pmae.classify.table import Columns, is_table
        from pmae.data.sets import load_settled
        from pmae.train.start import reading_for, trained_on

        columns = Columns.typed(self.columns)
        where = (self.data, self.labels, self.columns or None, self.root)
        given = (*where, self.resize, self.channels, self.max_unreadable)
        if all(setting is None for setting in given):
            return None
        own = trained_on(place, self.encoder)
        source = self.data or own.data.source
        if self.table or is_table(source, columns.file):
            reading = self.applied(reading_for(place, source, self.encoder))
            reading, found = read_labelled(reading, self.table, columns)
            return reading, as_splits(found)
        require(not self.columns, "columns", "left out but for labels in a table", self.columns)
        # Of a folder that is named to be scored on, subfolders are the classes; masks need none.
        labels = "folders" if self.data and not self.masks else None
        return load_settled(self.read_as(own.data, own.shape, self.data, self.labels, labels), largest=None)


def told(run: "Run") -> list[str]:
    """What the last evaluation of a run came to, line by line."""
    from pmae.data.streamed import untold
    from pmae.report.compare import verdict
    from pmae.report.contents import load

    found, last = load(run.path), run.evaluations[-1]
    # Scores on other sets, from evaluations before this one, are for the report.
    found = replace(found, scores=[score for score in found.scores if score.data == last.data.name])
    said = verdict(found)
    shared = [note for split, copies in last.data.duplicates.items() for note in copies.in_words(split)]
    own = [note for one in found.evaluations if one.data.name == last.data.name for note in one.notes]
    notes = [f"note: {note}" for note in dict.fromkeys((*found.start, *untold(last.data.notes), *own, *shared))]
    sentences = [f"  {sentence}" for sentence in (*said.sentences, *said.comparisons, *notes)]
    return [str(run.path), score_table(found.scores), "", said.headline, *sentences]


def score_table(scores: "Sequence[Score]") -> str:
    """Accuracies as aligned lines, with what counts every class alike: balanced accuracy, and the mean AUC."""
    header = ("representation", "protocol", "pooling", "split", "accuracy %", "95% interval", "balanced", "AUC")
    rows = [header, *map(_cells, scores)]
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    pads = [str.ljust] * 4 + [str.rjust] * 4  # names, then numbers
    cells = ([pad(cell, width) for pad, cell, width in zip(pads, row, wide, strict=True)] for row in rows)
    lines = [f"  {'  '.join(row)}" for row in cells]
    few = sorted({score.chosen_on for score in scores if "draws of the labelled images" in score.chosen_on})
    lines += [f"  with few labels: logistic regression on frozen features, the mean of {draws}" for draws in few]
    return "\n".join(lines)


def _cells(score: "Score") -> tuple[str, ...]:
    accuracy = score.accuracy
    metrics = (score.percent(name).value for name in ("balanced_accuracy", "macro_auc"))
    interval = "–" if accuracy.low is None or accuracy.high is None else f"{accuracy.low:.1f} to {accuracy.high:.1f}"
    value, *others = ("–" if x is None else f"{x:.1f}" for x in (accuracy.value, *metrics))
    return score.label, score.protocol, score.pooling, score.split, value, interval, *others


@dataclass(frozen=True)
class Embed(OtherData):
    """Write the features of any number of images, in bounded memory, to a .npz, .csv or .parquet file.

    examples:
      pmae embed runs/a --data scans/ -o scans.npz                          numpy.load: features, name
      pmae embed runs/a --data scans/ --labels folders -o scans.parquet     one column a feature, name, label, class
      pmae embed runs/a --data images.npy --pooling patches -o tokens.npz   features (images, tokens, width)
      pmae embed weights/ --data scans/ -o scans.npz                        weights of timm or Hugging Face
      pmae embed hf://USER/NAME --data scans/ -o scans.npz                  the same on the hub
    """

    path: RunOrWeights
    """Run folder, or weights of timm or Hugging Face: a .safetensors or .pth file, a folder, or hf://USER/NAME."""
    data: str
    """A named set, or the path of a folder, an image, a .npy or .npz file, or shards."""
    out: Out
    """The file to write: .npz, .csv or .parquet."""
    labels: Folders = None
    """Whether subfolders are classes."""
    encoder: Text = None
    """timm name of the network, for weights without a config.json that tells it."""
    pooling: Literal["mean", "cls", "both", "patches", "last_4"] = "mean"
    """Of the tokens; patches keeps every one, last_4 has the mean after each of the last four blocks."""
    split: Literal["all", "train", "val", "test"] = "all"
    """Which part of the data."""
    epoch: Count = None
    """Checkpoint to use; the last if not given."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    batch_size: Count = None
    """Images in a batch; 256, fewer if they are large, if not given."""

    def run(self) -> None:
        from pmae.embed import embed
        from pmae.train.checkpoint import run_or_weights
        from pmae.train.distributed import is_main
        from pmae.train.journal import say
        from pmae.train.start import trained_on

        run = run_or_weights(self.path)
        own = trained_on(run, self.encoder)
        data = self.read_as(own.data, own.shape, self.data, self.labels, "none")
        places = (self.pooling, self.split, self.epoch, self.device, self.batch_size)
        count = embed(run, data, self.out, *places, lambda line: say(line) if is_main() else None, self.encoder)
        if is_main():
            print(f"{self.out}: {self.pooling} features of {count:,} image{'s' * (count != 1)}")


@dataclass(frozen=True)
class Export:
    """Write a run's encoder for timm, Hugging Face, ONNX or torch; it is re-loaded there and compared first.

    examples:
      pmae export runs/a --format timm -o exported/timm
      pmae export runs/a --format onnx -o exported/onnx --epoch 50
      pmae export runs/a --format timm -o exported/hub --push me/scans-encoder --dry-run
    """

    path: RunFolder
    """Run folder."""
    format: Literal["timm", "huggingface", "onnx", "torch"]
    """Whose format."""
    out: Out
    """Folder to write, new or empty."""
    epoch: Count = None
    """Which checkpoint; the last if not given."""
    data_licence: Text = None
    """Licence of the images, for the model card: cc-by-4.0, say."""
    push: Text = None
    """Upload the folder to this repository of the Hugging Face hub, USER/NAME."""
    public: Switch = False
    """Let everybody see a repository that --push makes."""
    dry_run: Switch = False
    """With --push: write the folder, show what would be uploaded, and upload nothing."""

    def run(self) -> None:
        from pmae.export import export, files_in, push, require_hub

        require(self.push is not None or not (self.dry_run or self.public), "push", "given with these options", None)
        if self.push is not None:
            require_hub(self.push, token=not self.dry_run)
        difference = export(self.path, self.format, self.out, self.epoch, self.data_licence, self.push)
        print(f"exported: {self.out}   (largest difference from the original {difference:.1e})")
        if self.push is not None and self.dry_run:
            seen = "public" if self.public else "private"
            print(f"would be uploaded to {self.push}, {seen} if it is new:", *files_in(self.out), sep="\n")
        elif self.push is not None:
            print(f"uploaded: {push(self.out, self.push, self.public)}")
