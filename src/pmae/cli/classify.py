"""`pmae finetune` and `predict`: a classifier of labelled images, and what it says of new ones."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from pmae.classify import FinetuneConfig
from pmae.cli.parse import ColumnNames, Conversion, Count, Out, RunOrWeights, Switch, Text
from pmae.train.journal import say


@dataclass(frozen=True)
class Finetune(Conversion):
    """Train a classifier on labelled images, from a run or weights, and keep it in a folder.

    Subfolders of --data are classes. A table (.csv or .parquet) has the columns file and label, or a column of 0 and 1
    for each class; several labels of an image are a;b; rows without a label are left out. Images of one group, as those
    of a patient, are held out together where --columns names it. The classifier's results.json says how sure to be.

    examples:
      pmae finetune runs/a --data labelled/ --out clf
      pmae finetune runs/a --data scans/ --labels scans.csv --method lora --out clf
      pmae finetune runs/a --data scans/ --labels scans.csv --columns label=diagnosis group=patient --out clf
      pmae finetune weights/ --data labelled/ --resize 224 --method linear --class-weights balanced --out clf
      pmae finetune runs/a --data labelled/ --out clf --resume
    """

    start: RunOrWeights
    """Run folder, or weights of timm or Hugging Face: a .safetensors or .pth file, a folder, or hf://USER/NAME."""
    data: str
    """A folder with a subfolder for each class, a table of files, an .npz file, shards, or a named set."""
    out: Out
    """Folder to write, new or empty."""
    labels: Text = None
    """A .csv or .parquet table of the files below --data, or `folders`, as is assumed: subfolders are the classes."""
    columns: ColumnNames = ()
    """Of the table, as in file=image_id label=diagnosis group=patient; split too. A group stays in one split."""
    encoder: Text = None
    """timm name of the network, for weights without a config.json that tells it."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    resume: Switch = False
    """Continue what is unfinished in --out."""
    settings: Annotated[FinetuneConfig, tyro.conf.arg(name="")] = field(default_factory=FinetuneConfig)

    def run(self) -> None:
        """Train, and print how good it is."""
        from pmae.classify.finetune import finetune
        from pmae.classify.score import in_words
        from pmae.classify.table import Columns
        from pmae.plugins import command_line
        from pmae.train.start import reading_for

        reading = self.applied(reading_for(self.start, self.data, self.encoder))
        table = self.labels, self.encoder, self.device, self.resume, say, Columns.typed(self.columns)._asdict()
        finetune(self.start, reading, self.out, self.settings, *table)
        print(in_words(self.out))
        print(f"classifier: {self.out}   (classifier.json, classifier.safetensors, results.json)")
        print(f"how sure to be: {command_line('report', self.out, '-o', f'{Path(self.out).name}.html')}")
        print(f"next: {command_line('predict', self.out, '--data', 'new/', '-o', 'predictions.csv')}")


@dataclass(frozen=True)
class Predict(Conversion):
    """Write label, probability and drift of any number of images, in bounded memory, to a .csv or .parquet file.

    Drifted images are farther from the training features than 99 in 100 unseen ones were.

    examples:
      pmae predict clf --data new/ -o predictions.csv
      pmae predict clf --data scan.jpg -o prediction.csv
      pmae predict clf --data new/ --top-k 3 -o predictions.parquet
    """

    path: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="CLASSIFIER", help_behavior_hint="")]
    """Folder that pmae finetune wrote."""
    data: str
    """A named set, or the path of a folder, an image, a .npy or .npz file, or shards."""
    out: Out
    """The file to write: .csv or .parquet."""
    top_k: int = 1
    """How many of the likeliest labels to write."""
    probabilities: Switch = False
    """Write a column p_CLASS for every class."""
    split: Literal["all", "train", "val", "test"] = "all"
    """Which part of the data."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    batch_size: Count = None
    """Images in a batch; 256, fewer if they are large, if not given."""

    def run(self) -> None:
        """Predict, and say how many, and which files could not be read."""
        from pmae.classify.model import load_classifier
        from pmae.classify.predict import predict, reading_for
        from pmae.train.distributed import is_main, local_device
        from pmae.train.environment import pick_device

        classifier = load_classifier(self.path, str(local_device(pick_device(self.device))), self.batch_size)
        data = self.applied(reading_for(classifier, self.data))
        how = self.top_k, self.split, self.device, self.batch_size, say, self.probabilities
        found = predict(classifier, data, self.out, *how)
        for name in found.unreadable:
            print(f"unreadable: {name}", flush=True)
        if is_main():
            count = f"{found.images:,} image{'s' * (found.images != 1)}"
            print(f"{self.out}: {count}, {found.drifted:,} unlike the training images")
