"""Is PMAE above MAE? The differences behind a table of the paper, each with its interval, as a table of its own."""

from collections.abc import Iterator, Sequence

from pmae.paper.comparisons import CellRuns, scores_of_cell, title
from pmae.report.difference import ABOVE, BELOW, CHANCE, COLUMNS, NOTE, between, cells
from pmae.report.tables import Cell, Table
from pmae.results import PROTOCOLS

HEADER = ("data", "protocol", "preset", "method", "against", *COLUMNS, "runs")


def differences(
    name: str, heading: str, filled: Sequence[CellRuns], wanted: Sequence[tuple[str, str]], pooling: str
) -> Table:
    """A row a protocol (with its preset) and pair of methods: how far the first is above the second."""
    rows: list[list[Cell]] = []
    for protocol, preset in wanted:
        for pair in _pairs(filled):
            found = between(*(scores_of_cell(one, protocol, preset, pooling) for one in pair))
            if found is not None:
                methods = [title("methods", one.row.key) for one in pair]
                row: list[Cell] = [title("data", pair[0].data), PROTOCOLS[protocol], preset, *methods]
                rows.append([*row, *cells(found), " and ".join(str(len(one.runs)) for one in pair)])
    return Table(f"{name}-differences", f"{heading}: which differences are more than chance", HEADER, rows, NOTE)


def in_words(table: Table) -> Iterator[str]:
    """A sentence a pair of methods: how often the one is clearly above the other."""
    said: dict[tuple[Cell, Cell], list[Cell]] = {}
    for row in table.rows:
        said.setdefault((row[3], row[4]), []).append(row[HEADER.index("said")])
    for (mine, rival), found in said.items():
        counts = ", ".join(f"{word} in {found.count(word)}" for word in (ABOVE, BELOW, CHANCE))
        yield f"{mine} against {rival}, {counts} of {len(found)} ({table.name}.csv)"


def _pairs(filled: Sequence[CellRuns]) -> Iterator[tuple[CellRuns, CellRuns]]:
    """Every method with components against the MAEs whose ratio came about as its own, and KMAE against PMAE."""
    for mine in filled:
        for rival in filled:
            of_mae = mine.row.method != "mae" and rival.row.method == "mae"
            of_kernels = mine.row.method == "kmae" and rival.row.method == "pmae"
            alike = (mine.row.ratio == "random") == (rival.row.ratio == "random") and mine.data == rival.data
            if alike and (of_mae or of_kernels):
                yield mine, rival
