"""Draw results/figures from results/runs, and pictures of runs that are named: python tools/figures.py RUN...

Ratios, their spread and learning curves need a run's small files alone; reconstructions, masks and the spectrum need
its samples.safetensors.
"""

import dataclasses
import sys
from pathlib import Path

from headline import long_kinds
from publish import name_of
from published_runs import FIGURES, RUNS, Kind, published_runs
from tables import ratio_page
from trials import speedrun_figure

from pmae.paper.tables import RATIOS
from pmae.report import charts, samples
from pmae.report.contents import Contents, load
from pmae.report.style import Drawing, save_drawing
from pmae.report.tables import Table
from pmae.runs import Run

UNSHOWN = ("knn", "effective_rank")
COLOURED = ("ours", "mae", "paper", "masking", "mae_masking", "mae_ours", "released", "mae_released", "kmae", "simclr")
"""Recipes in the order in which they get a colour."""


def measured(folder: Path = RUNS) -> dict[str, Drawing]:
    """What the small files of published runs show, by file name; nothing of what has not been run."""
    drawn = {}
    for name in ("ratio", "spread"):
        page = ratio_page(name, "mean", folder)
        if _is_whole(page.tables[0]):
            drawn[f"paper-{name}"] = page.drawings[0]
    # In the order of colours: PMAE is blue and MAE orange, as in the figure of ratios.
    long = sorted(long_kinds("cifar10", folder), key=lambda kind: COLOURED.index(kind.recipe))
    curves = [_curves(published_runs(folder)[kind][0], _curve_name(kind)) for kind in long]
    return drawn | ({"paper-curves": charts.learning_curves(curves)} if curves else {})


def _curve_name(kind: Kind) -> str:
    decoder = f", decoder {kind.decoder}" if kind.decoder else ""
    return f"{kind.title}, {kind.recipe.removeprefix('mae_')}{decoder}"


def _is_whole(table: Table) -> bool:
    """Whether a method has a number at every one of the nine shares; a figure of fewer would mislead."""
    ratios = {f"{ratio:.0%}" for ratio in RATIOS}
    if "ratios" in table.header:
        return any(row[list(table.header).index("ratios")] == str(len(ratios)) for row in table.rows)
    columns = [j for j, name in enumerate(table.header) if name in ratios]
    return any(all(row[j] is not None for j in columns) for row in table.rows)


def _curves(run: Run, name: str) -> Contents:
    """A run with what its figure shows: loss, R2 and the linear probe."""
    read = load(run.path, name)
    lines = [{key: value for key, value in line.items() if key not in UNSHOWN} for line in read.metrics]
    return dataclasses.replace(read, metrics=lines)


def pictured(run: Run) -> dict[str, Drawing]:
    """What a run's samples show, by file name."""
    contents, name = load(run.path), name_of(run)
    drawn = {f"reconstructions-{name}": samples.reconstructions(contents), f"masks-{name}": samples.masks(contents)}
    if "top" in contents.samples:
        drawn[f"spectrum-{contents.data['name']}"] = samples.spectrum_parts(contents)
    return drawn


def main() -> None:
    """Draw everything there is material for, and say what each figure shows."""
    drawn = measured() | {"speedrun": speedrun_figure()}
    for path in sys.argv[1:]:
        drawn |= pictured(Run(path))
    for name, drawing in drawn.items():
        print(f"{save_drawing(drawing, FIGURES / f'{name}.png')}: {drawing.caption}")


if __name__ == "__main__":
    main()
