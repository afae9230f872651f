"""Every figure that a run folder has the material for, and writing them into it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pmae.errors import unknown_name
from pmae.report import charts, comparisons, galleries, traces
from pmae.report.contents import BROKEN, Contents, load
from pmae.report.lineup import has_epochs, splits_of
from pmae.report.scores import Score, pretrained, primary
from pmae.report.style import Drawing, as_bytes
from pmae.runs import Run, disk_errors, write_whole

FORMATS = ("png", "svg", "pdf")


def save_figures(run: Run, formats: Sequence[str] = ("png",)) -> list[Path]:
    """Draw all figures of a run into its `figures` folder, each file whole or not at all."""
    for kind in formats:
        if kind not in FORMATS:
            raise unknown_name("formats", kind, FORMATS)
    contents = load(run.path)
    folder = run.path / "figures"
    with disk_errors(folder):
        folder.mkdir(exist_ok=True)
    drawings = [*figures_across([contents]), *figures_of(contents)]
    return [save_drawing(drawing, folder / f"{drawing.name}.{kind}") for drawing in drawings for kind in formats]


def save_drawing(drawing: Drawing, path: Path) -> Path:
    """Write one figure in the format that the file's suffix names."""
    content = as_bytes(drawing.figure, path.suffix.removeprefix("."))
    write_whole(path, lambda temporary: temporary.write_bytes(content))
    return path


def figures_across(runs: Sequence[Contents]) -> list[Drawing]:
    """Figures that show several runs together: accuracies, last and by epoch, and learning curves."""
    drawn = []
    for split in splits_of(runs):
        drawn.append(comparisons.accuracy_bars(runs, split))
        drawn += [comparisons.epoch_curves(runs, split)] if any(map(has_epochs, runs)) else []
    begun = [run for run in runs if run.training]
    return drawn + ([charts.learning_curves(begun)] if begun else [])


def figures_of(run: Contents) -> list[Drawing]:
    """Figures of one run alone; one whose material cannot be drawn is named among the run's problems."""
    drawn: list[Drawing] = []
    for what, wanted, draw in _plan(run):
        try:
            drawn += [draw()] if wanted else []
        except BROKEN as error:
            run.problems.append(f"the figure of {what} could not be drawn: {error}")
    return drawn


def _plan(run: Contents) -> list[tuple[str, bool, Callable[[], Any]]]:
    pictures, spectral = "original" in run.samples, "variance" in run.samples
    confused, shown = headline(run), traces if traces.is_one_row(run) else galleries
    return [
        ("reconstructions", pictures, lambda: shown.reconstructions(run)),
        ("masks", pictures, lambda: shown.masks(run)),
        ("the spectrum", spectral, lambda: charts.spectrum(run)),
        ("parts of the spectrum", spectral and "top" in run.samples, lambda: shown.spectrum_parts(run)),
        ("R2 by band", charts.has_bands(run), lambda: charts.band_curves(run)),
        ("confusion", bool(confused), lambda: comparisons.confusion(run, confused[0])),
        ("the feature map", "features" in run.features, lambda: comparisons.feature_map(run)),
    ]


def headline(run: Contents) -> list[Score]:
    """The pretrained encoder's score with a confusion matrix that stands for the run, if there is one."""
    order = ["linear", "knn", "mlp", "finetune"]
    found = [s for s in primary(pretrained(run.scores)) if s.confusion and s.protocol in order]
    return sorted(found, key=lambda s: (s.split != "test", order.index(s.protocol)))[:1]
