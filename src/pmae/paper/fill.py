"""Fills the cells of a table: have the runs, choose an oracle's ratio on validation images, have them evaluated."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pmae import api
from pmae.config import replace
from pmae.evaluate.protocols import Protocols, only
from pmae.paper.cells import score_in
from pmae.paper.tables import Cell, Item, Plan, job_of, ratios_of
from pmae.runs import Run
from pmae.sweep.jobs import (
    Here,
    InTurn,
    Job,
    Library,
    Workers,
    anything,
    carry_out,
    find_run,
    splits,
    validation,
)

# Evaluations that a table needs: which of them results.json has, and doing the others.


@dataclasses.dataclass(frozen=True)
class Need:
    """Protocols to be scored on the test split, at the last checkpoint or at every one."""

    protocols: tuple[Protocols, ...]
    every_epoch: bool = False
    pooling: str = "cls"
    """Of what is scored, what is shown."""
    device: str = "auto"
    root: str = "data"
    """Folder of the data on this machine."""
    pictures: bool = False
    """Whether the sample pictures of a run are needed, which published results leave out."""

    def missing(self, run: Run) -> dict[Protocols, list[int]]:
        """For each set of protocols the epochs at which one of them is missing."""
        open_ = {protocols: [e for e in self._epochs(run) if _lacks(run, protocols, e)] for protocols in self.protocols}
        return {protocols: epochs for protocols, epochs in open_.items() if epochs}

    def can_be_met(self, run: Run) -> bool:
        """Whether a run has the pictures and the numbers, or the checkpoints to get those."""
        return self.has_pictures(run) and (bool(run.checkpoints()) or not self.missing(run))

    def has_pictures(self, run: Run) -> bool:
        """Whether the pictures that are needed are there."""
        return not self.pictures or (run.path / "samples.safetensors").is_file()

    def meet(self, run: Run) -> None:
        """Evaluate what is missing into the run's results.json."""
        data, seeds = replace(run.config, data__root=self.root).data, (run.config.train.seed,)
        for protocols, epochs in self.missing(run).items():
            lacking = lacking_kinds(run, protocols, epochs)
            print(f"  {run.path.name}: {', '.join(lacking)} [{protocols.name}]", flush=True)
            wanted = only(protocols, lacking)
            api.evaluate(
                run.path, wanted, splits(data), epochs, baselines=False, seeds=seeds, device=self.device, figures=False
            )

    def _epochs(self, run: Run) -> list[int]:
        last = run.config.train.epochs or 0
        whole = [p.name.removeprefix("epoch_") for p in run.checkpoints()] if self.every_epoch else []
        return sorted({last, *(int(name) for name in whole if name.isdigit())})


def lacking_kinds(run: Run, protocols: Protocols, epochs: Sequence[int]) -> list[str]:
    """The protocols of a set that a run has not been scored by at one of these epochs."""
    return [kind for kind in protocols.kinds if any(_lacks(run, only(protocols, [kind]), e) for e in epochs)]


def _lacks(run: Run, protocols: Protocols, epoch: int) -> bool:
    return any(score_in(run, kind, protocols.name, "test", epoch) is None for kind in protocols.kinds)


# Filling the cells of an item: have the runs, choose an oracle's ratio on validation images, have them evaluated.

Get = Callable[[Sequence[Job], Need | None], list[Run | None]]
"""A way to get the runs of jobs, evaluated as there is need; without a need any finished run will do."""


@dataclass(frozen=True)
class Filled:
    """A cell at one ratio (None: random), the runs that repeat it, and how the ratio came about."""

    cell: Cell
    ratio: float | None
    runs: tuple[Run, ...]
    note: str = ""


def run_missing(item: Item, folder: Path, library: Library, workers: Workers | None) -> Get:
    """A way to get runs: those that are not found are pretrained, here or by workers, and evaluated here.

    Here a run is evaluated before the next one begins; workers are not kept waiting for that.
    """

    def get(jobs: Sequence[Job], need: Need | None) -> list[Run | None]:
        meet, accept = (need.meet, need.can_be_met) if need else (lambda run: None, anything)
        plan = InTurn(jobs) if workers else InTurn(jobs, meet)
        runs = carry_out(plan, folder, library, workers or Here(), accept, item.loosely)
        for run in runs.values() if workers else ():
            meet(run)
        return [runs[job.config] for job in jobs]

    return get


def only_found(item: Item, library: Library) -> Get:
    """A way to get runs: those that are found, and None for the others."""
    return lambda jobs, _: [find_run(job, library, anything, item.loosely) for job in jobs]


def fill(item: Item, plan: Plan, get: Get, need: Need) -> list[Filled]:
    """The evaluated runs of every cell; an oracle's ratio is first chosen on validation images, by runs of one seed."""
    job = functools.partial(job_of, item, plan=plan)
    cells = item.cells(plan)
    searched = [(cell, r) for cell in cells if cell.row.ratio == "oracle" for r in plan.ratios]
    tried = dict(zip(searched, get([job(c, r, plan.seeds[0]) for c, r in searched], None), strict=True))
    wanted: list[tuple[Cell, float | None, str]] = []
    for cell in cells:
        if cell.row.ratio == "oracle":
            wanted += choose(
                cell, {r: run for r in plan.ratios if (run := tried[cell, r]) is not None}, len(plan.ratios)
            )
        else:
            wanted += [(cell, ratio, "") for ratio in ratios_of(cell.row, plan)]
    jobs = [job(cell, ratio, seed) for cell, ratio, _ in wanted for seed in plan.seeds]
    found, count = get(jobs, need), len(plan.seeds)
    groups = [found[k * count : (k + 1) * count] for k in range(len(wanted))]
    filled = [
        Filled(cell, ratio, tuple(run for run in group if run is not None), note)
        for (cell, ratio, note), group in zip(wanted, groups, strict=True)
    ]
    known = {one.cell for one in filled}
    filled += [Filled(cell, None, (), "no run of any ratio was found") for cell in cells if cell not in known]
    return sorted(filled, key=lambda one: cells.index(one.cell))


def choose(cell: Cell, tried: dict[float, Run], planned: int) -> list[tuple[Cell, float | None, str]]:
    """The ratio whose probe is best on validation images, with a word on how many there were; nothing without runs."""
    scores = {ratio: score for ratio, run in tried.items() if (score := validation(run)) is not None}
    if not scores:
        return []
    best = max(scores, key=lambda ratio: scores[ratio])
    if planned == 1:
        return [(cell, best, "the only ratio; no search")]
    if len(scores) == 1:
        return [(cell, best, f"the only one of {planned} ratios that was found; no search")]
    return [(cell, best, f"best of {len(scores)} of {planned} ratios on validation images ({scores[best]:.1f}%)")]
