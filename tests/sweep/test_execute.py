"""ASHA: who goes on, who is stopped, and that a run which was stopped in between is the run that was not."""

import csv
import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pmae import api
from pmae.cli import main
from pmae.config import Config, replace
from pmae.data.images import Splits
from pmae.errors import UserError
from pmae.runs import Run
from pmae.sweep import execute
from pmae.sweep.execute import Asha, Stage, rungs_of
from pmae.sweep.find import RunSpec, finished
from pmae.sweep.grid import Trial, best_of, sweep_table, verdict

from .test_grid import sweep


def specs(count: int, epochs: int = 90) -> list[RunSpec]:
    return [
        RunSpec(str(n), replace(Config(), train__epochs=epochs, masking__masked_variance=0.01 + n / 99))
        for n in range(count)
    ]


def play(count: int, workers: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[str, float]]]:
    """Names and scores at each rung, when so many workers end their stages in a random order."""
    rng = random.Random(seed)
    monkeypatch.setattr(execute, "score_at", lambda run, epoch: run)
    scheduler = Asha(specs(count))
    reached: list[list[tuple[str, float]]] = [[] for _ in scheduler.rungs]
    running: list[Stage] = []
    while True:
        while len(running) < workers and (stage := scheduler.next(bool(running))) is not None:
            running.append(stage)
        if not running:
            return reached
        stage, score = running.pop(rng.randrange(len(running))), rng.random()
        scheduler.ended(stage, score)  # type: ignore[arg-type]
        reached[-1 if stage.until is None else scheduler.rungs.index(stage.until)].append((stage.spec.name, score))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 9, 10, 30])
def test_one_worker_keeps_the_best_third_of_every_rung(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    reached = play(count, 1, count, monkeypatch)
    assert [len(rung) for rung in reached] == [count, max(1, count // 3), max(1, count // 9)]
    for lower, higher in pairwise(reached):
        order = np.argsort([-score for _, score in lower])[: len(higher)]
        assert {name for name, _ in higher} == {lower[place][0] for place in order}


@settings(max_examples=60, deadline=None)
@given(count=st.integers(1, 40), workers=st.integers(1, 12), seed=st.integers(0, 999))
def test_many_workers_finish_someone_and_never_raise_more_than_a_third(count: int, workers: int, seed: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        reached = play(count, workers, seed, monkeypatch)
    names = [[name for name, _ in rung] for rung in reached]
    assert sorted(names[0], key=int) == [str(n) for n in range(count)]
    assert names[-1]
    for lower, higher in pairwise(names):
        assert len(set(higher)) == len(higher)
        assert set(higher) <= set(lower)
        # Runs that rose may be overtaken by those that were still running then; with one worker there are none.
        assert len(higher) <= max(1, len(lower) // 3) + min(workers, len(lower)) - 1


@pytest.mark.parametrize(
    ("epochs", "every", "rungs"),
    [(90, None, [9, 27, 90]), (10, None, [1, 3, 10]), (2, None, [1, 2]), (1, None, [1]), (100, 50, [50, 100])],
)
def test_rungs_are_probes_at_three_times_the_epochs_each(epochs: int, every: int | None, rungs: list[int]) -> None:
    assert rungs_of([replace(Config(), train__epochs=epochs, probe__every=every)]) == rungs


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([{"train__epochs": None}], "--epochs must be given"),
        ([{"train__epochs": 9}, {"train__epochs": 18}], "one number"),
        ([{"train__epochs": 9, "train__seed": seed} for seed in (0, 1)], "--seeds must be one"),
    ],
)
def test_runs_that_do_not_compare_are_refused(changes: list[dict[str, object]], message: str) -> None:
    with pytest.raises(UserError, match=message):
        rungs_of([replace(Config(), **change) for change in changes])


def test_a_run_stopped_in_between_goes_on_as_if_it_was_not(toy: Splits, tiny: Config, tmp_path: Path) -> None:
    config = replace(tiny, train__checkpoint_every=3, probe__every=3)
    whole = api.pretrain(config, toy, tmp_path / "whole", quiet=True)
    run = api.pretrain(config, toy, tmp_path / "halves", quiet=True, until=1)
    assert [path.name for path in run.checkpoints()] == ["epoch_0001"]
    assert run.results["pretrain"]["epoch"] == 1
    assert run.results["pretrain"]["linear"] > 0
    assert not finished(run)
    run = api.pretrain(config, toy, tmp_path / "halves", resume=True, quiet=True)
    for name in ("encoder", "decoder", "optimizer"):
        file = f"checkpoints/epoch_0003/{name}.safetensors"
        assert (run.path / file).read_bytes() == (whole.path / file).read_bytes()
    assert run.results["pretrain"] == whole.results["pretrain"]


def test_a_sweep_stops_all_but_the_best_and_says_where(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["ratio", "--data", "dermamnist", "--ratios", 0.1, 0.3, 0.5, "--root", root, "--search", "asha"]
    command += ["--epochs", 10, "--out", tmp_path]
    assert sweep(*command) == 0
    printed = capsys.readouterr().out
    with (tmp_path / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    runs = {row["runs"]: Run(tmp_path / "runs" / row["runs"]) for row in rows}
    assert sorted(row["stopped at epoch"] for row in rows) == ["", "1", "1"]
    first = {name: next(x["linear"] for x in run.metrics() if "linear" in x) for name, run in runs.items()}
    (best,) = [row for row in rows if not row["stopped at epoch"]]
    assert first[best["runs"]] == max(first.values())
    assert f"The best by validation is masking.masked_variance={best['masking.masked_variance']} (" in printed
    assert "2 of 3 were stopped early." in printed
    assert [printed.count(f"to epoch {epoch} of 10: done") for epoch in (1, 3, 10)] == [3, 1, 1]
    assert sweep(*command) == 0
    assert "done in" not in capsys.readouterr().out


def test_without_labels_nothing_is_stopped_early(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "x.npy", np.random.default_rng(0).integers(0, 255, (40, 16, 16, 1), dtype=np.uint8))
    command = ["ratio", 0.2, 0.4, "--data", tmp_path / "x.npy", "--epochs", 4, "--out", tmp_path / "out"]
    assert sweep(*command, "--search", "asha") == 2
    said = capsys.readouterr().err
    assert "data must have labels for a search that stops runs early" in said
    assert "`--set data.labels=folders`" in said
    assert not (tmp_path / "out").exists()


def test_an_unknown_search_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "ratio", "0.2", "--search", "ascha"]) == 2
    assert "--search: unknown name 'ascha'; did you mean 'asha'? choices: asha, grid" in capsys.readouterr().err


def test_a_stopped_trial_is_not_the_best_even_if_it_was_ahead() -> None:
    ahead = Trial({"a.b": "1"}, 90.0, stopped=3)
    ended = Trial({"a.b": "2"}, 80.0)
    assert best_of([ahead, ended]) == [ended]
    assert verdict([ahead, ended]) == "The best by validation is a.b=2 (80.0%). 1 of 2 were stopped early."
    table = sweep_table([ahead, ended])
    assert [row[table.header.index("stopped at epoch")] for row in table.rows] == [3, None]
    assert "stopped at epoch" not in sweep_table([ended]).header
