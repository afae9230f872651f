"""The comparison: a row for each system, the missing ones named, and one clear error for a mistake."""

import csv
import json
from pathlib import Path

import pytest

from pmae.bench import compare as comparison
from pmae.bench import grow, machine
from pmae.bench.compare import Pace, Row, compare
from pmae.bench.contestant import Entry, Timing
from pmae.bench.flops import flops_per_image
from pmae.bench.peers import PEERS, is_installed
from pmae.bench.work import Sizes, Work
from pmae.cli import main
from pmae.report.speed import cost_curves, save_curves

QUICK = Pace(1, repeats=1, warm=1)


class Steady:
    """A contestant that needs no process: ours takes 10 ms a step, everybody else 20."""

    def __init__(self, entry: Entry) -> None:
        self.pace = 0.01 if entry.system == "plain" else 0.02

    def warm_up(self, steps: int) -> float:
        return 3.0

    def time(self, steps: int, lead_in: int) -> Timing:
        return Timing(self.pace * steps, steps, 2**30)

    def close(self) -> None:
        pass


def test_one_table_has_a_row_for_each_and_names_who_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "is_installed", lambda name: name != "stable-pretraining")
    monkeypatch.setattr(comparison, "Contestant", Steady)
    monkeypatch.setattr(machine, "limit", lambda device, precision: 1e12)
    assert main(["bench", "--sizes", "32", "--methods", "mae", "--device", "cpu", "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    with (tmp_path / "out/speed.csv").open() as file:
        rows = {row["system"]: row for row in csv.DictReader(file)}
    assert list(rows) == ["ours, plain", *PEERS]
    ours, missing = rows["ours, plain"], rows["stable-pretraining"]
    assert float(ours["images_per_second"]) == pytest.approx(6400)
    assert float(ours["tflops"]) == pytest.approx(6400 * 2.755808256e-3)
    assert float(ours["share_of_limit"]) == pytest.approx(6400 * 2.755808256e-3)
    assert [float(rows[name]["of_best_peer"]) for name in ("ours, plain", "lightly")] == pytest.approx([2, 1])
    assert (ours["peak_mib"], ours["warm_up_seconds"], ours["note"]) == ("1024.0", "3.0", "")
    assert (missing["images_per_second"], missing["note"]) == ("", "not installed")
    assert any("stable-pretraining" in line and "not installed" in line for line in printed.splitlines())
    found = json.loads((tmp_path / "out/speed.json").read_text())
    assert found["about"]["limit_tflops"] == 1
    assert found["rows"][0]["rounds_ms"] == pytest.approx([10, 10, 10])
    assert "| 32x32 | mae | lightly | 3,200 |" in (tmp_path / "out/speed.md").read_text()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["speed.csv", "speed.json", "speed.md"]


def test_each_system_is_timed_in_a_process_of_its_own_and_a_failure_is_a_row_with_the_reason() -> None:
    tiny = Sizes(width=24, depth=2, heads=2, decoder_width=32, decoder_depth=1, decoder_heads=4)
    systems = ["plain", "full", "stable-pretraining"]
    rows = compare([Work("pmae", 16, 4, network=tiny)], systems, 0, QUICK, print)
    assert [row.system for row in rows] == systems
    for row in rows:
        if row.system == "full":
            assert row.step_seconds == ()
            assert "train.engine 'graph' must run on CUDA" in row.note
        elif row.system == "plain" or is_installed(row.system):
            assert row.note == ""
            assert row.images_per_second > 0
            assert row.peak > 2**20
            assert row.best_peer == max(row.images_per_second for row in rows if row.system in PEERS)
        else:
            assert row.note == "not installed"


def test_a_row_counts_the_methods_operations() -> None:
    work = Work("pmae", 32, 64)
    row = Row("plain", work, step_seconds=(0.5, 4.0, 1.0))
    assert row.images_per_second == 64
    assert row.flops_per_second == 64 * flops_per_image(work.config, work.shape)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peers", "lightely"], "peers: unknown name 'lightely'; did you mean 'lightly'?"),
        (["--sizes", "32", "36"], "sizes must be multiples of the patch size (8), two patches or more, got 36"),
        (["--methods", "dino"], "methods: unknown name 'dino'"),
        (["--engines", "full"], "engines: 'full' must run on CUDA"),
        (["--engines", "fast"], "engines: unknown name 'fast'"),
        (["--grow", "sides"], "grow: unknown name 'sides'; did you mean 'side' or 'images'?"),
        (["--steps", "0"], "steps must be at least 1, got 0"),
        (["--batch", "1"], "batch must be at least 2, got 1"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--device", "cpu", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_growth_measures_a_shared_point_once_and_names_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, said = [], []

    def fake(entry: Entry, pace: Pace, say: object) -> Row:
        asked.append(entry.work)
        too_large = entry.work.side > 48
        return Row("plain", entry.work, () if too_large else (0.1,), note="out of memory" if too_large else "")

    monkeypatch.setattr(grow, "measure", fake)
    wanted = list(grow.points(["side", "patch"], Work("mae", 32, 16), [], cuda=False))
    found = grow.grow(wanted, "plain", QUICK, said.append)
    assert [(point.axis, point.value) for point in found] == [
        *(("side", side) for side in (16, 32, 48, 64)),
        *(("patch", patch) for patch in (4, 8, 16)),
    ]
    assert len(asked) == 6
    assert "mae, side 64: skipped: out of memory" in said
    assert said[0] == "mae, side 16: 160 images/s"


def test_every_axis_changes_one_thing() -> None:
    base = Work("pmae", 32, 16)
    for axis, value, work in grow.points(list(grow.AXES), base, [], cuda=True):
        changed = {key for key in ("side", "patch", "batch", "images", "masked") if vars(work)[key] != vars(base)[key]}
        assert vars(work)[axis] == value
        assert changed <= {axis, "images"} if axis == "batch" else changed <= {axis}


def test_curves_are_drawn_for_what_was_measured(tmp_path: Path) -> None:
    records = [
        {"axis": axis, "value": value, "method": method, "images_per_second": speed, "peak_mib": 100.0 * value}
        for axis, values in (("side", (32, 64)), ("masked", (0.2, 0.8)))
        for method in ("pmae", "mae")
        for value, speed in zip(values, (100.0, None if method == "pmae" else 30.0), strict=True)
    ]
    drawing = cost_curves(records, "a test")
    lines = [len(line.get_xdata()) for panel in drawing.figure.axes for line in panel.get_lines()]
    assert lines == [1, 2] * 4
    files = save_curves(drawing, tmp_path)
    assert [path.name for path in files] == ["cost.png", "cost.svg"]
    assert all(path.stat().st_size > 1000 for path in files)
