"""Tables as plain data, and their CSV, Markdown and HTML."""

import csv
import html
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from pmae.results import Interval

Cell = str | int | float | Interval | None
NOTHING = "–"


@dataclass(frozen=True)
class Table:
    """A header and rows of the same length; `name` is its file name."""

    name: str
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""


def to_csv(table: Table) -> str:
    """Full numbers; a column with intervals becomes three, the bounds beside the value."""
    wide = [any(isinstance(row[j], Interval) for row in table.rows) for j in range(len(table.header))]
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    columns = zip(table.header, wide, strict=True)
    writer.writerow([text for name, is_wide in columns for text in _bounds(name, is_wide)])
    for row in table.rows:
        writer.writerow([value for cell, is_wide in zip(row, wide, strict=True) for value in _numbers(cell, is_wide)])
    return buffer.getvalue()


def to_markdown(table: Table) -> str:
    """A heading, a pipe table and the note."""
    lines = [f"### {_in_line(table.title)}", "", _pipes(table.header)]
    lines.append("|" + "|".join("---:" if number else "---" for number in _numeric(table)) + "|")
    lines += [_pipes([shown(cell) for cell in row]) for row in table.rows]
    return "\n".join([*lines, *(["", _in_line(table.note)] if table.note else []), ""])


def to_html(table: Table) -> Markup:
    """A <table> in a box that scrolls on its own where the screen is narrower; every text is escaped."""
    numeric = _numeric(table)
    titles = zip(table.header, numeric, strict=True)
    head = "".join(f'<th scope="col"{_side(number)}>{html.escape(title)}</th>' for title, number in titles)
    body = "".join(f"<tr>{_html_row(row, numeric)}</tr>" for row in table.rows)
    label = html.escape(table.title, quote=True)
    made = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return Markup(f'<div class="scroll" tabindex="0" role="region" aria-label="{label}">{made}</div>')


def shown(cell: Cell) -> str:
    """A cell for people: one decimal, the interval in brackets, a dash for nothing."""
    if isinstance(cell, Interval):
        if cell.low is None or cell.high is None:
            return shown(cell.value)
        return f"{shown(cell.value)} ({cell.low:.1f}–{cell.high:.1f})"
    if cell is None or cell == "" or (isinstance(cell, float) and math.isnan(cell)):
        return NOTHING
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, int):
        return f"{cell:,}".replace("-", "−")
    return f"{cell:.1f}".replace("-", "−") if isinstance(cell, float) else cell


def _bounds(name: str, is_wide: bool) -> list[str]:
    return [name, f"{name} low", f"{name} high"] if is_wide else [name]


def _numbers(cell: Cell, is_wide: bool) -> list[str | int | float | None]:
    if isinstance(cell, Interval):
        return [None if v is None else round(v, 6) for v in (cell.value, cell.low, cell.high)]
    return [cell, None, None] if is_wide else [cell]


def _numeric(table: Table) -> list[bool]:
    """Which columns hold numbers alone, and are set flush right."""
    kinds = [[cell for row in table.rows if (cell := row[j]) is not None] for j in range(len(table.header))]
    return [bool(cells) and not any(isinstance(cell, str) for cell in cells) for cells in kinds]


def _pipes(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(_in_line, cells)) + " |"


def _in_line(text: str) -> str:
    """Text that neither ends a line or a cell nor starts a tag."""
    return html.escape(" ".join(text.split()), quote=False).replace("|", "\\|")


def _html_row(row: Sequence[Cell], numeric: Sequence[bool]) -> str:
    return "".join(_html_cell(cell, numeric[j], first=j == 0) for j, cell in enumerate(row))


def _html_cell(cell: Cell, numeric: bool, first: bool) -> str:
    text = html.escape(shown(cell))
    if isinstance(cell, Interval) and cell.low is not None and cell.high is not None:
        text = f"{shown(cell.value)} <small>({cell.low:.1f}–{cell.high:.1f})</small>"
    return f'<th scope="row">{text}</th>' if first else f"<td{_side(numeric)}>{text}</td>"


def _side(numeric: bool) -> str:
    return ' class="number"' if numeric else ""
