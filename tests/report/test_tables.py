"""Tables against hand-made values, in all three formats."""

import csv
import dataclasses
import io
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pmae.intervals import Interval
from pmae.report.contents import load
from pmae.report.tables import Table, accuracy_table, cost_table, runs_table, shown, to_csv, to_markdown
from pmae.runs import Run

TABLE = Table(
    "results",
    "Results <on> test",
    ("name", "accuracy", "images"),
    [["a|b", Interval(71.234, 70.1, 72.36), 1000], ["<script>alert(1)</script>", None, -5]],
    "A note & more.",
)


def test_csv_has_full_numbers_and_one_column_a_bound() -> None:
    rows = list(csv.reader(io.StringIO(to_csv(TABLE))))
    assert rows == [
        ["name", "accuracy", "accuracy low", "accuracy high", "images"],
        ["a|b", "71.234", "70.1", "72.36", "1000"],
        ["<script>alert(1)</script>", "", "", "", "-5"],
    ]


def test_markdown_keeps_cells_apart_and_tags_harmless() -> None:
    lines = to_markdown(TABLE).splitlines()
    assert lines[0] == "### Results &lt;on&gt; test"
    assert lines[2:6] == [
        "| name | accuracy | images |",
        "|---|---:|---:|",
        "| a\\|b | 71.2 (70.1–72.4) | 1,000 |",
        "| &lt;script&gt;alert(1)&lt;/script&gt; | – | −5 |",
    ]
    assert lines[-1] == "A note &amp; more."


def test_shown_values() -> None:
    cells = [None, "", float("nan"), 12345, 0.25, "text", Interval(50.0), Interval(None)]
    assert [shown(cell) for cell in cells] == ["–", "–", "–", "12,345", "0.2", "text", "50.0", "–"]


@pytest.mark.parametrize("text", ["=1+1", "+cmd|' /C calc'!A0", "@SUM(A1)", "-2+3", "\t=1", " =1"])
def test_no_cell_of_a_csv_file_is_a_formula(text: str) -> None:
    made = Table("t", "t", ["name", text], [[text, Interval(1.0, 0.5, 1.5)]])
    header, row = csv.reader(io.StringIO(to_csv(made)))
    assert header == ["name", f"'{text}", f"'{text} low", f"'{text} high"]
    assert row[0] == f"'{text}"


@pytest.mark.parametrize("text", ["-0.5", "+3", "-1e-4", "a=b", "", "−5"])
def test_numbers_and_other_text_stay_as_they_are_in_csv(text: str) -> None:
    made = Table("t", "t", ["name", "b"], [[text, -1.5]])
    assert list(csv.reader(io.StringIO(to_csv(made))))[1] == [text, "-1.5"]


def test_the_operations_of_a_run_are_told(make_run: Callable[..., Run]) -> None:
    run = make_run()
    run.add_results(pretrain={**run.results.get("pretrain", {}), "operations": 2.468e15})
    table = runs_table([load(run.path)])
    assert dict(zip(table.header, table.rows[0], strict=True))["operations"] == "2.5e15"


def test_what_a_run_cost_is_told_with_its_first_stage(make_run: Callable[..., Run]) -> None:
    """Large patches first take as long again: a table of the second stage alone would halve the bill."""
    run = make_run()
    alone = cost_table([load(run.path)]).rows[0]
    shutil.copytree(run.path, run.path.parent / "copy")
    (run.path.parent / "copy").rename(run.path / "first")
    both = cost_table([load(run.path)]).rows[0]
    for column in (1, 2, 4):  # steps, images seen, seconds
        assert both[column] == 2 * alone[column]  # type: ignore[operator]
    assert both[3] == alone[3], "the speed is that of the second stage"


def test_what_intervals_are_over_is_told_where_images_are_of_groups(
    make_run: Callable[..., Run], suite: Callable[..., dict[str, Any]]
) -> None:
    contents = load(make_run(evaluation={"pmae epoch 3": suite({"linear/cls/test": 0.7})}).path)
    assert "intervals over the 100 images of test;" in accuracy_table([contents], "test").note
    patients = [dataclasses.replace(score, groups=np.arange(100) // 5) for score in contents.scores]
    note = accuracy_table([dataclasses.replace(contents, scores=patients)], "test").note
    assert "intervals over the 20 groups of the 100 images of test;" in note
