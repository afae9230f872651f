"""Speed on paper: tables of what `pmae bench` measured, and the curves of how cost grows."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pmae.files import disk_errors, write_json, write_whole
from pmae.report.style import WIDTH, Drawing, as_bytes, color, styled
from pmae.report.tables import NOTHING, Table, to_csv, to_markdown

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Record = Mapping[str, Any]
COLUMNS = {
    "size": ("size", "{0}x{0}"),
    "axis": ("against", "{}"),
    "value": ("value", "{:,.10g}"),
    "method": ("method", "{}"),
    "system": ("system", "{}"),
    "group": ("group", "{}"),
    "images_per_second": ("images/s", "{:,.0f}"),
    "ms_per_step": ("ms/step", "{:,.2f}"),
    "tflops": ("TFLOP/s", "{:,.3g}"),
    "share_of_limit": ("of limit", "{:.1%}"),
    "share": ("share", "{:.1%}"),
    "launches": ("launches", "{:,.0f}"),
    "peak_mib": ("peak MiB", "{:,.0f}"),
    "warm_up_seconds": ("warm-up s", "{:,.1f}"),
    "of_best_peer": ("of best peer", "{:.2f}"),
    "note": ("note", "{}"),
}
"""Heading and format of each field that a person reads; what else a record holds goes to the files alone."""
AXES = {
    "side": "side of an image, pixels",
    "patch": "side of a patch, pixels",
    "batch": "images in a batch",
    "images": "images in the data set",
    "masked": "share that is masked",
}


def speed_table(name: str, title: str, records: Sequence[Record], note: str) -> Table:
    """A table for people; a column in which nothing stands is left out."""
    kept = [key for key in COLUMNS if any(record.get(key) not in (None, "") for record in records)]
    rows = [[_shown(record.get(key), COLUMNS[key][1]) for key in kept] for record in records]
    return Table(name, title, [COLUMNS[key][0] for key in kept], rows, note)


def aligned(table: Table) -> str:
    """The table as lines for a terminal, numbers flush right."""
    columns = [[str(head), *(str(row[j]) for row in table.rows)] for j, head in enumerate(table.header)]
    widths = [max(map(len, column)) for column in columns]
    right = [all(cell == NOTHING or cell[0].isdigit() for cell in column[1:]) for column in columns]
    cells = [
        [cell.rjust(width) if flush else cell.ljust(width) for cell in column]
        for column, width, flush in zip(columns, widths, right, strict=True)
    ]
    return "\n".join("  ".join(line).rstrip() for line in zip(*cells, strict=True))


def save_speed(folder: Path, table: Table, records: Sequence[Record], about: Record) -> None:
    """Write a table as Markdown, its numbers in full as CSV, and everything that is known as JSON."""
    fields = [key for key in COLUMNS if any(key in record for record in records)]
    full = Table(table.name, table.title, fields, [[record.get(key) for key in fields] for record in records])
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for suffix, text in (("csv", to_csv(full)), ("md", to_markdown(table))):
        _write(folder / f"{table.name}.{suffix}", text.encode())
    write_json(folder / f"{table.name}.json", {"about": dict(about), "rows": [dict(record) for record in records]})


@styled
def cost_curves(records: Sequence[Record], device: str) -> Drawing:
    """Images a second and peak memory against whatever was made to grow, a curve for each method."""
    from matplotlib.figure import Figure

    axes = [axis for axis in AXES if any(record["axis"] == axis for record in records)]
    figure = Figure(figsize=(2 * WIDTH, 2.3 * len(axes) + 0.3), layout="constrained")
    panels = figure.subplots(len(axes), 2, squeeze=False)
    for (speed, memory), axis in zip(panels, axes, strict=True):
        chosen = [record for record in records if record["axis"] == axis and record["images_per_second"] is not None]
        _curve(speed, chosen, "images_per_second", 1, axis)
        _curve(memory, chosen, "peak_mib", 1 / 1024, axis)
    panels[0][0].set_title("Images a second")
    panels[0][1].set_title("Peak memory, GiB")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    caption = f"One training step on {device}; all but one thing as in the comparison's defaults."
    return Drawing("cost", "How cost grows", caption, figure)


def save_curves(drawing: Drawing, folder: Path) -> list[Path]:
    """Write a figure as PNG and as SVG."""
    paths = [folder / f"{drawing.name}.{kind}" for kind in ("png", "svg")]
    for path in paths:
        _write(path, as_bytes(drawing.figure, path.suffix.removeprefix(".")))
    return paths


def _curve(panel: "Axes", records: Sequence[Record], key: str, unit: float, axis: str) -> None:
    """One panel, a line for each method."""
    for position, method in enumerate(sorted({record["method"] for record in records}, reverse=True)):
        known = [(record["value"], unit * record[key]) for record in records if record["method"] == method]
        values, heights = [value for value, _ in known], [height for _, height in known]
        look: dict[str, Any] = {"color": color(position), "marker": "os"[position % 2], "markersize": 4}
        panel.plot(values, heights, label=method.upper(), **look)
    _scales(panel, [unit * record[key] for record in records], is_share=axis == "masked")
    panel.set_xticks(sorted({record["value"] for record in records}))
    panel.set_xlabel(AXES[axis])


def _scales(panel: "Axes", heights: Sequence[float], is_share: bool) -> None:
    """Logarithmic, since cost grows by factors; but shares are not, nor heights that hardly differ."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    plain = FuncFormatter(lambda value, _: f"{value:,.10g}")
    if not is_share:
        panel.set_xscale("log")
    panel.xaxis.set_minor_locator(NullLocator())
    spread = max(heights, default=1.0) / max(min(heights, default=1.0), 1e-9)
    if spread > 3:
        panel.set_yscale("log")
        panel.set_ylim(_round_bounds(min(heights), max(heights)))
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if spread < 200 else (1,)))
        panel.yaxis.set_minor_locator(NullLocator())
    else:
        panel.set_ylim(0, 1.15 * max(heights, default=1.0))
    panel.xaxis.set_major_formatter(plain)
    panel.yaxis.set_major_formatter(plain)


def _round_bounds(low: float, high: float) -> tuple[float, float]:
    """The nearest of 1, 2, 5, 10, 20 ... around two heights: with a tick at both ends every curve can be read."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = [step * 10.0**decade for decade in decades for step in (1, 2, 5)]
    return max(step for step in steps if step <= low), min(step for step in steps if step >= high)


def _write(path: Path, content: bytes) -> None:
    write_whole(path, lambda temporary: temporary.write_bytes(content))


def _shown(value: Any, form: str) -> str:
    if value is None or value == "":
        return NOTHING
    # A CPU takes few images a second: three digits tell them apart.
    return f"{value:.3g}" if form == "{:,.0f}" and 0 < value < 100 else form.format(value)
