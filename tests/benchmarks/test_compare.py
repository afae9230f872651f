"""The comparison: a row for each system, the missing ones named, and one clear error for a mistake."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from benchmarks.__main__ import main
from benchmarks.contest import Pace, Row, compare, waves
from benchmarks.contestant import LEAST, Contestant, Entry, Failed, Take, Timing
from benchmarks.peers import COMPILED, PEERS, is_installed
from benchmarks.speed_tables import cost_curves, save_curves
from benchmarks.work import Sizes, Work

from benchmarks import contest as contests
from benchmarks import grow, machine, peers
from pmae.flops import flops_per_image

QUICK = Pace(1, repeats=1, warm=1)


class Steady:
    """A contestant that needs no process: ours takes 10 ms a step, everybody else 20."""

    log: ClassVar[list[tuple[str, str]]] = []

    def __init__(self, entry: Entry, patience: float) -> None:
        self.name, self.pace = entry.system, 0.01 if entry.system == "plain" else 0.02

    def begin(self, steps: int) -> None:
        self.log.append((self.name, "begin"))

    def warm_up(self, steps: int) -> float:
        self.log.append((self.name, "warm"))
        return 3.0

    def time(self, take: Take) -> Timing:
        self.log.append((self.name, "time"))
        return Timing(self.pace * take.steps, take.steps, 2**30)

    def dismiss(self) -> None:
        self.log.append((self.name, "dismiss"))

    def join(self) -> None:
        self.log.append((self.name, "join"))


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    monkeypatch.setattr(contests, "Contestant", Steady)
    monkeypatch.setattr(Steady, "log", [])
    return Steady.log


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card of 140 GB in a host with 16 cores, as far as plans go."""
    monkeypatch.setattr(contests, "pick_device", torch.device)
    monkeypatch.setattr(machine, "memory", lambda device: 140 * 2**30)
    monkeypatch.setattr(machine, "processes", lambda: 32)


def test_one_table_has_a_row_for_each_and_names_who_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, steady: list[tuple[str, str]]
) -> None:
    monkeypatch.setattr(contests, "is_installed", lambda name: name != "stable-pretraining")
    monkeypatch.setattr(machine, "limit", lambda device, precision: 1e12)
    assert main(["--sizes", "32", "--methods", "mae", "--device", "cpu", "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    with (tmp_path / "out/speed.csv").open() as file:
        rows = {row["system"]: row for row in csv.DictReader(file)}
    assert list(rows) == ["ours, plain", *(peer for peer in PEERS if not peer.endswith(COMPILED))]
    ours, missing = rows["ours, plain"], rows["stable-pretraining"]
    assert float(ours["images_per_second"]) == pytest.approx(6400)
    assert float(ours["tflops"]) == pytest.approx(6400 * 2.6905344e-3)
    assert float(ours["share_of_limit"]) == pytest.approx(6400 * 2.6905344e-3)
    assert [float(rows[name]["of_best_peer"]) for name in ("ours, plain", "lightly")] == pytest.approx([2, 1])
    assert (ours["peak_mib"], ours["warm_up_seconds"], ours["note"]) == ("1024.0", "3.0", "")
    assert (missing["images_per_second"], missing["note"]) == ("", "not installed")
    assert any("stable-pretraining" in line and "not installed" in line for line in printed.splitlines())
    found = json.loads((tmp_path / "out/speed.json").read_text())
    assert found["about"]["limit_tflops"] == 1
    assert found["rows"][0]["rounds_ms"] == pytest.approx([10, 10, 10])
    assert "| 32x32 | mae | lightly | 3,200 |" in (tmp_path / "out/speed.md").read_text()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["speed.csv", "speed.json", "speed.md"]


@pytest.mark.usefixtures("forked_contestants")
def test_each_system_is_timed_in_a_process_of_its_own_and_a_failure_is_a_row_with_the_reason() -> None:
    tiny = Sizes(width=24, depth=2, heads=2, decoder_width=32, decoder_depth=1, decoder_heads=4)
    systems = ["plain", "full", "stable-pretraining"]
    (rows,) = compare([Work("pmae", 16, 4, network=tiny)], systems, 0, QUICK, print)
    assert [row.system for row in rows] == systems
    for row in rows:
        if row.system == "full":
            assert row.step_seconds == ()
            assert "train.engine 'compiled' must run on CUDA" in row.note
        elif row.system == "plain" or is_installed(row.system):
            assert row.note == ""
            assert row.images_per_second > 0
            assert row.peak > 2**20
            assert row.best_peer == max(row.images_per_second for row in rows if row.system in PEERS)
        else:
            assert row.note == "not installed"


@pytest.mark.usefixtures("forked_contestants")
def test_one_that_failed_and_left_before_it_was_asked_still_says_why() -> None:
    one = Contestant(Entry("full", Work("pmae", 16, 4)))
    one.join(300)
    with pytest.raises(Failed, match=r"train\.engine 'compiled' must run on CUDA"):
        one.warm_up(1)
    one.dismiss()


def test_a_row_counts_the_methods_operations() -> None:
    work = Work("pmae", 32, 64)
    row = Row("plain", work, step_seconds=(0.5, 4.0, 1.0))
    assert row.images_per_second == 64
    assert row.flops_per_second == 64 * flops_per_image(work.config, work.shape)


def test_a_peers_mae_has_more_to_do() -> None:
    work = Work("mae", 32, 64)
    ours, theirs = (Row(system, work, step_seconds=(1.0,)).flops_per_second for system in ("plain", "lightly"))
    assert ours < theirs == 64 * flops_per_image(work.config, work.shape, whole=True)


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
        (["--seconds", "0"], "seconds must be above 0, got 0"),
        (["--workers", "-1"], "workers must be at least 0, got -1"),
        (["--batch", "1"], "batch must be at least 2, got 1"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_on_cuda_those_who_compile_do_so_while_the_others_warm_up(steady: list[tuple[str, str]], card: None) -> None:
    work = Work("mae", 32, 512, "cuda")
    said: list[str] = []
    (rows,) = compare([work], ["plain", "compiled", "full", "transformers"], 8, Pace(3, repeats=2), said.append)
    order = [name for name, did in steady if did in ("begin", "warm")]
    assert order == ["compiled", "full", "plain", "transformers", "compiled", "full"]
    assert [name for name, did in steady if did == "time"] == ["plain", "compiled", "full", "transformers"] * 2
    assert [did for _, did in steady][-8:] == ["dismiss"] * 4 + ["join"] * 4
    assert said.count("mae 32x32, plain: 51,200 images/s, 10.00 ms/step") == 2
    assert [row.images_per_second for row in rows] == pytest.approx([51_200, 25_600, 25_600, 25_600])


def test_rows_come_work_by_work_and_the_files_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steady: list[tuple[str, str]]
) -> None:
    monkeypatch.setattr(machine, "limit", lambda device, precision: 1e12)
    seen = []

    class Cut(Steady):
        def time(self, take: Take) -> Timing:
            if (tmp_path / "speed.csv").exists():
                seen.append(len((tmp_path / "speed.csv").read_text().splitlines()))
                raise KeyboardInterrupt
            return super().time(take)

    monkeypatch.setattr(contests, "Contestant", Cut)
    main(["--device", "cpu", "--peers", "--out", str(tmp_path)])
    assert seen == [2]
    assert steady[-1] == ("plain", "join")


def test_the_cards_plans_are_one_wave_each(card: None) -> None:
    works = [Work(method, side, 512, "cuda") for side in (32, 64) for method in ("pmae", "mae")]
    assert [len(wave) for wave in waves([[Entry("compiled", work), Entry("full", work)] for work in works])] == [4]
    wanted = [
        work
        for method in ("pmae", "mae")
        for _, _, work in grow.points(list(grow.AXES), Work(method, 32, grow.BATCH[0], "cuda"), [], cuda=True)
    ]
    assert [len(wave) for wave in waves([[Entry("full", work)] for work in dict.fromkeys(wanted)])] == [26]
    assert [len(wave) for wave in waves([[Entry("plain", Work("mae", 32, 4))]] * 3)] == [1, 1, 1]


def test_a_wave_ends_where_the_memory_does(card: None) -> None:
    large = [[Entry("full", Work("mae", 128, batch, "cuda"))] for batch in (824, 826, 828)]
    assert [len(wave) for wave in waves(large)] == [2, 1]


@pytest.mark.parametrize(
    ("take", "step", "count"),
    [
        (Take(200, 3, 0.7), 0.01, 70),
        (Take(200, 3, 0.7), 0.001, 200),
        (Take(200, 3, 0.7), 1.0, LEAST),
        (Take(2), 60.0, 2),
        (Take(2, 3, 0.1), 60.0, 2),
    ],
)
def test_a_round_takes_what_fits(take: Take, step: float, count: int) -> None:
    assert take.count(step) == count


def test_a_peer_first_empties_what_its_workers_have_loaded() -> None:
    pace, work = Pace(50, lead_in=3), Work("mae", 32, 4)
    assert pace.task(Entry("full", work)).lead_in == 3
    assert pace.task(Entry("lightly", work, workers=8)).lead_in == 16


def test_one_that_does_not_answer_is_out() -> None:
    one = Contestant(Entry("plain", Work("mae", 32, 4)), patience=0.01)
    with pytest.raises(Failed, match=r"did not answer within 0.01 seconds"):
        one.warm_up(1)
    one.dismiss()
    one.join()
    assert one._process.exitcode == -9


def test_workers_are_no_more_than_the_shared_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    works = [Work("mae", 32, 512), Work("pmae", 32, 512)]
    for free, workers in ((100 * 2**20, 1), (10 * 2**30, 8), (2**20, 0)):
        monkeypatch.setattr(peers.shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        assert peers.workers_that_fit(works, 3, 8) == workers


def test_growth_measures_a_shared_point_once_and_names_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, said = [], []

    def fake(groups: list[list[Entry]], pace: Pace, say: object) -> Iterator[list[Row]]:
        for (entry,) in groups:
            asked.append(entry.work)
            too_large = entry.work.side > 48
            yield [Row("plain", entry.work, () if too_large else (0.1,), note="out of memory" if too_large else "")]

    monkeypatch.setattr(grow, "contest", fake)
    wanted = list(grow.points(["side", "patch"], Work("mae", 32, 16), [], cuda=False))
    found = list(grow.grow(wanted, "plain", QUICK, said.append))
    assert [(point.axis, point.value) for point in found] == [
        *(("side", side) for side in (16, 32, 48, 64)),
        *(("patch", patch) for patch in (4, 8, 16)),
    ]
    assert all(point.row.work == work for point, (_, _, work) in zip(found, wanted, strict=True))
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
