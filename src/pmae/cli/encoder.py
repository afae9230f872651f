"""`pmae embed`, `export` and `explore`: a trained encoder put to use."""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import tyro

from pmae.cli.parse import Count, Out, RunFolder, Switch, Text
from pmae.config import DataConfig


@dataclass(frozen=True)
class Embed:
    """Write the features of any number of images, in bounded memory, to a .npz, .csv or .parquet file.

    examples:
      pmae embed runs/a --data scans/ -o scans.npz                          numpy.load: features, name
      pmae embed runs/a --data scans/ --labels folders -o scans.parquet     one column a feature, name, label, class
      pmae embed runs/a --data images.npy --pooling patches -o tokens.npz   features (images, tokens, width)
    """

    path: RunFolder
    """Run folder."""
    data: str
    """A named set, or the path of a folder, .npy or .npz file, or shards."""
    out: Out
    """The file to write: .npz, .csv or .parquet."""
    pooling: Literal["mean", "cls", "both", "patches"] = "mean"
    """Of the tokens; patches keeps every one."""
    split: Literal["all", "train", "val", "test"] = "all"
    """Which part of the data."""
    epoch: Count = None
    """Checkpoint to use; the last if not given."""
    labels: Literal["none", "folders"] = "none"
    """Whether subfolders are classes."""
    resize: Count = None
    """Resize image files to this side; the run's setting if not given."""
    channels: Literal[1, 3] | None = None
    """Convert image files; the run's setting if not given."""
    root: Text = None
    """Folder of named sets, if not the run's."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    batch_size: Count = None
    """Images in a batch; 256, fewer if they are large, if not given."""

    def run(self) -> None:
        """Embed, and say how many."""
        from pmae.embed import embed
        from pmae.runs import Run
        from pmae.train.distributed import is_main

        run = Run(self.path)
        given = {"source": self.data, "root": self.root, "labels": self.labels, "resize": self.resize}
        data = read_as(run.config.data, {**given, "channels": self.channels})
        places = (self.pooling, self.split, self.epoch, self.device, self.batch_size)
        count = embed(run, data, self.out, *places, say=lambda message: _say(message) if is_main() else None)
        if is_main():
            print(f"{self.out}: {self.pooling} features of {count:,} images")


@dataclass(frozen=True)
class Export:
    """Write a run's encoder for timm, Hugging Face, ONNX or torch; it is re-loaded there and compared first.

    examples:
      pmae export runs/a --format timm -o exported/timm
      pmae export runs/a --format onnx -o exported/onnx --epoch 50
    """

    path: RunFolder
    """Run folder."""
    format: Literal["timm", "huggingface", "onnx", "torch"]
    """Whose format."""
    out: Out
    """Folder to write, new or empty."""
    epoch: Count = None
    """Which checkpoint; the last if not given."""

    def run(self) -> None:
        """Export, and say how well it agrees."""
        from pmae.export import export

        difference = export(self.path, self.format, self.out, self.epoch)
        print(f"exported: {self.out}   (largest difference from the original {difference:.1e})")


@dataclass(frozen=True)
class Explore:
    """Open a page on this machine to play with masks, walk the spectrum and find neighbours.

    The page is served to this machine alone; uploads stay on it and are deleted at the end.

    examples:
      pmae explore                              masks on the embedded photographs, without a trained model
      pmae explore runs/a                       with the run's data, predictions, R2 and neighbours
      pmae explore --data scans/ --resize 64    masks on a folder of one's own
    """

    path: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="RUN")] = None
    """Run folder; without one there are masks, but no predictions."""
    data: Text = None
    """A named set, or the path of a folder, .npy or .npz file; the run's, or photos."""
    labels: Literal["none", "folders"] | None = None
    """Whether subfolders are classes."""
    resize: Count = None
    """Resize image files to this side; the run's setting if not given."""
    channels: Literal[1, 3] | None = None
    """Convert image files; the run's setting if not given."""
    root: Text = None
    """Folder of named sets, if not the run's."""
    port: Count = None
    """Port to serve on; 7860, or another free one, if not given."""
    no_browser: Switch = False
    """Print the address and open nothing."""

    def run(self) -> None:
        """Gather what the page works with, and serve it."""
        from pmae.app.explorer import explore, gradio
        from pmae.app.material import Material
        from pmae.data.sets import load
        from pmae.runs import Run

        # Before the data is read and a space fitted: without Gradio there is no page.
        gradio()
        run = Run(self.path) if self.path else None
        given = {"source": self.data, "root": self.root, "labels": self.labels, "resize": self.resize}
        data = read_as(run.config.data if run else DataConfig(), {**given, "channels": self.channels})
        material = Material(load(data), run)
        if run is None:
            _say(f"fitting {material.own_space} on {len(material.sample):,} images of {material.name}")
        material.space(material.own_space)
        explore(material, self.port, not self.no_browser, _say)


def read_as(of_run: DataConfig, given: dict[str, object]) -> DataConfig:
    """A run's way of reading with what was given instead; what converts image files is not handed on to other kinds."""
    from pmae.data.sets import converts

    given = {key: value for key, value in given.items() if value is not None}
    asked = {key: given[key] for key in ("source", "root") if key in given}
    if asked and not converts(replace(of_run, **asked)):  # type: ignore[arg-type]
        of_run = replace(of_run, resize=None, channels=None, labels="none")
    return replace(of_run, **given)  # type: ignore[arg-type]


def _say(line: str) -> None:
    print(line, flush=True)
