"""`pmae report`, `watch` and `explore`: pages about runs, written or served."""

import contextlib
import signal
import sys
from dataclasses import dataclass
from typing import Annotated

import tyro

from pmae.cli.parse import Count, Folders, OtherData, Out, Switch, Text
from pmae.config import DataConfig
from pmae.errors import require


@dataclass(frozen=True)
class Report:
    """Write one self-contained HTML page about one or several runs, or about classifiers that pmae finetune wrote.

    A folder that cannot be read is named and left out; the exit code is then 1.

    examples:
      pmae report runs/a
      pmae report runs/a runs/b -o both.html    the first against each other, paired on the same test images
      pmae report clf -o clf.html               how sure to be: accuracy, calibration, classes, what to do next
    """

    runs: Annotated[tyro.conf.Positional[list[str]], tyro.conf.arg(metavar="RUN...")]
    """Run folders, or folders of classifiers; a page about several compares them."""
    out: Out = "report.html"
    """The page to write; its tables and figures go beside it."""

    def run(self) -> None:
        require(bool(self.runs), "runs", "one run folder or more", self.runs)
        from pmae.report.classifier import write_classifier_report
        from pmae.report.page import write_report
        from pmae.runs import is_classifier

        if any(map(is_classifier, self.runs)):
            write_classifier_report(self.runs, self.out)
            print(f"report: {self.out}")
            return
        refused, between = write_report(self.runs, self.out)
        for sentence in refused:
            print(f"left out: {sentence}", file=sys.stderr)
        print("\n".join([*between, f"report: {self.out}"]))
        if refused:
            sys.exit(1)


@dataclass(frozen=True)
class Watch:
    """Open a live page about all runs of a folder: curves, pictures, scores and time left, while they train.

    It is served to this machine alone (127.0.0.1), reads the run folders and writes nothing; Ctrl-C ends it.

    examples:
      pmae watch runs/
      pmae watch runs/sweep --port 8123 --open
    """

    folder: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="FOLDER")] = "runs"
    """Folder of runs, or one run."""
    port: Count = None
    """Port to serve on; a free one if not given."""
    open: Switch = False
    """Open the page in the browser."""

    def run(self) -> None:
        import webbrowser

        from pmae.report.watch import serve
        from pmae.train.journal import say

        server = serve(self.folder, self.port, say)
        if self.open:
            webbrowser.open(f"http://127.0.0.1:{server.server_address[1]}/")
        with contextlib.suppress(KeyboardInterrupt):
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            server.serve_forever()
        server.server_close()


@dataclass(frozen=True)
class Explore(OtherData):
    """Open a page on this machine to play with masks, walk the spectrum and find neighbours.

    The page is served to this machine alone; uploads stay on it and are deleted at the end.

    examples:
      pmae explore                              masks on the embedded photographs, without a trained model
      pmae explore runs/a                       with the run's data, predictions, R2 and neighbours
      pmae explore --data scans/ --resize 64    masks on a folder of one's own
      pmae explore clf                          what a classifier says of an image that is dropped, and why
    """

    path: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="RUN")] = None
    """Run folder or classifier; without one there are masks, but no predictions."""
    data: Text = None
    """A named set, or the path of a folder, .npy or .npz file; the run's, or photos."""
    labels: Folders = None
    """Whether subfolders are classes."""
    port: Count = None
    """Port to serve on; 7860, or another free one, if not given."""
    no_browser: Switch = False
    """Print the address and open nothing."""

    def run(self) -> None:
        from pmae.app.classifier import explore_classifier
        from pmae.app.explorer import explore, gradio
        from pmae.app.material import Material
        from pmae.data.sets import load
        from pmae.runs import Run, is_classifier
        from pmae.train.journal import say

        if self.path and is_classifier(self.path):
            explore_classifier(self.path, self.data, self.port, not self.no_browser, say)
            return
        run = Run(self.path) if self.path else None
        require(not run or run.method != "weights", "path", "a run that predicts what is hidden, or none", self.path)
        # Before the data is read and a space fitted: without Gradio there is no page.
        say("starting: 1 of 3, the page's library (10 to 30 s the first time)")
        gradio()
        of_run, shape = (run.config.data, run.shape) if run else (DataConfig(), None)
        reading = self.read_as(of_run, shape, self.data, self.labels, None)
        say(f"starting: 2 of 3, reading {reading.source}")
        material = Material(load(reading), run)
        say(f"starting: 3 of 3, {'loading' if run else 'fitting'} {material.own_space} of {material.name}")
        material.space(material.own_space)
        explore(material, self.port, not self.no_browser, say)
