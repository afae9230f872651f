"""Pretrain many runs: a scheduler says which comes next, and workers train it here, in processes or on Ray.

A run's folder holds all that is needed to go on with it, so a command that was killed goes on when it is repeated.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from pathlib import Path

import torch

from pmae.config import Config, replace
from pmae.data.sets import read_chunks
from pmae.derive import resolve
from pmae.errors import Interrupted, UserError, require
from pmae.method import build_method
from pmae.models.described import adopted
from pmae.plugins import plugin_errors
from pmae.runs import Run
from pmae.sweep.find import RunIndex, RunSpec, SameImages
from pmae.sweep.scoring import Requirements, Scoring
from pmae.sweep.workers import POLL_SECONDS, Workers

MANY = 1_000_000  # images, of which the number decides nothing about whether a network can be built for them
FACTOR = 3  # ASHA keeps one run in so many at each rung
GetRuns = Callable[[Sequence[RunSpec], Requirements], list[Run | None]]


@dataclass(frozen=True)
class Stage:
    """A run to train up to an epoch, or to its end if none is given."""

    spec: RunSpec
    title: str
    until: int | None = None


class InOrder:
    """A scheduler: every run to its end, one for each different configuration; `then` is called with each run."""

    def __init__(self, specs: Sequence[RunSpec], then: Callable[[Run], None] = lambda run: None) -> None:
        self._then = then
        different = list({spec.config: spec for spec in specs}.values())
        self._stages = [Stage(spec, f"[{n}/{len(different)}] {spec.name}") for n, spec in enumerate(different, 1)]

    def next(self, running: bool) -> Stage | None:
        """What to train now; None for nothing, or nothing before what is `running` has ended."""
        return self._stages.pop(0) if self._stages else None

    def ended(self, stage: Stage, run: Run) -> None:
        """Take note of a stage that was trained, or found."""
        self._then(run)


class Asha(InOrder):
    """A scheduler: asynchronous successive halving (ASHA, Li et al. 2020), in its form that promotes.

    All runs are trained to the first rung, and the best third of those at a rung goes on to the next. No run waits for
    another, and one that is stopped keeps its checkpoint and its schedule: what gets to the end is the run that a grid
    would have made. Ray Tune's form stops instead of promoting, so that whoever comes first to a rung always goes on:
    `benchmarks/halving.py` compares them.
    """

    def __init__(self, specs: Sequence[RunSpec]) -> None:
        super().__init__(specs)
        self._specs = [stage.spec for stage in self._stages]
        self.rungs = rungs_of([spec.config for spec in specs])
        self._stages = [self._stage(spec, 0) for spec in self._specs]
        self._scores: list[dict[RunSpec, float]] = [{} for _ in self.rungs]
        self._risen: list[set[RunSpec]] = [set() for _ in self.rungs]

    def next(self, running: bool) -> Stage | None:
        """A run that has not begun, or else the best of those that may rise, from the lowest rung that has one."""
        stage = super().next(running) or self._rise(0)
        if stage is None and not running and not self._scores[-1]:
            # Fewer runs are left than a third can be taken of: the best of them rises alone.
            stage = self._rise(1)
        return stage

    def ended(self, stage: Stage, run: Run) -> None:
        rung = -1 if stage.until is None else self.rungs.index(stage.until)
        self._scores[rung][stage.spec] = score_at(run, self.rungs[rung])

    def _rise(self, least: int) -> Stage | None:
        for rung, scores in enumerate(self._scores[:-1]):
            # In the order given first, so that of equals the same one rises whichever ended first.
            best = sorted((spec for spec in self._specs if spec in scores), key=lambda spec: -scores[spec])
            rising = [spec for spec in best[: max(len(best) // FACTOR, least)] if spec not in self._risen[rung]]
            if rising:
                self._risen[rung].add(rising[0])
                return self._stage(rising[0], rung + 1)
        return None

    def _stage(self, spec: RunSpec, rung: int) -> Stage:
        epoch, last = self.rungs[rung], self.rungs[-1]
        return Stage(spec, f"{spec.name} to epoch {epoch} of {last}", None if epoch == last else epoch)


def rungs_of(configs: Sequence[Config]) -> list[int]:
    """The epochs at which runs are compared: the first probe, three times that and so on, and the last epoch.

    The last comparison comes before half of the epochs are over, since after that little is saved.
    """
    lengths = {config.train.epochs for config in configs}
    seeds, looks = {config.train.seed for config in configs}, {config.probe.every for config in configs}
    require(len(lengths) == 1 and None not in lengths, "--epochs", "given, and one number, for --search asha", lengths)
    require(len(seeds) == 1, "--seeds", "one for --search asha; repeat the best settings with others", sorted(seeds))
    require(len(looks) == 1, "probe.every", "the same in all runs for --search asha", looks)
    epochs = lengths.pop() or 1
    rungs = [looks.pop() or max(1, epochs // 10)]
    while rungs[-1] * FACTOR <= epochs / 2:
        rungs.append(rungs[-1] * FACTOR)
    return [*(rung for rung in rungs if rung <= epochs / 2), epochs]


def score_at(run: Run, epoch: int) -> float:
    """The validation accuracy of a run at an epoch, or at the last look before it."""
    looks = [line for line in run.metrics() if line.get("linear") is not None]
    if not looks:
        raise UserError(f"runs must be scored on labels for --search asha, got none in {str(run.path)!r}")
    before = [look for look in looks if look["epoch"] <= epoch]
    return float((before or looks[:1])[-1]["linear"])


def get_runs(scoring: Scoring, any_length: bool = False, workers: Workers | None = None) -> GetRuns:
    """A way to get runs, scored as required: those that are found, with None for the others if no run may be made.

    Runs that are missing are pretrained and evaluated, each before the next one begins; workers are not kept waiting
    for evaluations, which are done here when all runs have ended.
    """
    index = scoring.index

    def get(specs: Sequence[RunSpec], needed: Requirements) -> list[Run | None]:
        if scoring.only_found:
            return [index.first(spec.config, any_length=any_length) for spec in specs]
        scheduler = InOrder(specs) if workers else InOrder(specs, needed.evaluate)
        runs = run_all(scheduler, scoring.out / "runs", index, workers or Workers(), needed.can_be_met, any_length)
        for run in runs.values() if workers else ():
            needed.evaluate(run)
        return [runs[spec.config] for spec in specs]

    return get


def check_missing(specs: Sequence[RunSpec], index: RunIndex, any_length: bool = False) -> int:
    """Refuse now what would fail hours later: a run that is missing, whose images are not there or too odd for it.

    Returns how many are missing.
    """
    missing = [spec.config for spec in specs if index.first(spec.config, any_length=any_length) is None]
    first = functools.cache(lambda data: next(read_chunks(data, size=1).chunks)[1])
    for config in dict.fromkeys(replace(one, train__seed=0) for one in missing):
        image = first(config.data)
        config = dataclasses.replace(config, encoder=adopted(config.encoder, image.shape))
        config, _ = resolve(config, MANY, image.shape, image.vectors, gpu=False)
        with torch.device("meta"), plugin_errors(config, lambda: "when it was built"):
            build_method(config, image.shape)
    return len(missing)


def run_all(
    scheduler: InOrder,
    folder: Path,
    index: RunIndex,
    workers: Workers,
    accept: Callable[[Run], bool] = lambda run: True,
    any_length: bool = False,
) -> dict[Config, Run]:
    """The runs that a scheduler asks for: found in the index, or else trained or continued below `folder`.

    Finished runs that `accept` refuses are left alone; with `any_length` a run of any length and seed will do.
    """
    runs: dict[Config, Run] = {}
    running: dict[Future[int | None], tuple[Stage, Path, float]] = {}
    same = SameImages()

    def end(stage: Stage, run: Run) -> None:
        runs[stage.spec.config] = run
        scheduler.ended(stage, run)

    def begin(stage: Stage) -> None:
        """End a stage with a run that is there, or have a worker train it."""
        config, until = stage.spec.config, stage.until
        begun, run = index.stopped(config, folder), index.first(config, accept, any_length)
        if run is None and until is not None:  # scored at the epoch the stage ends with, or later
            run = next((one for one in begun if one.results.get("pretrain", {}).get("epoch", 0) >= until), None)
        for other in begun if run is None else [run]:
            same.require(config.data, other)
        if run is not None:
            end(stage, run)
            return
        same.require(config.data)
        taken = [path for _, path, _ in running.values()]
        path = next((one.path for one in begun if one.path not in taken), folder / stage.spec.folder)
        how = "goes on" if (path / "config.json").exists() else "pretrains"
        print(f"{stage.title}: {how} in {path}", flush=True)
        began = time.monotonic()
        running[workers.submit(path, config, until)] = stage, path, began

    while True:
        while len(running) < workers.room() and (stage := scheduler.next(bool(running))) is not None:
            begin(stage)
        if not running:
            return runs
        for future in wait(running, POLL_SECONDS, FIRST_COMPLETED).done:
            stage, path, began = running.pop(future)
            _raise_what_failed(future, path, workers)
            print(f"{stage.title}: done in {time.monotonic() - began:.0f} s", flush=True)
            end(stage, Run(path))


def _raise_what_failed(future: "Future[int | None]", path: Path, workers: Workers) -> None:
    try:
        stopped = future.result()
    except (UserError, Interrupted) as error:
        raise getattr(error, "cause", error) from None  # Ray wraps what a task raised
    except workers.lost as error:
        again = "the same command goes on from its last checkpoint: with fewer runs at a time, if memory was short"
        raise UserError(f"the worker of {path} died ({' '.join(str(error).split())[:200]}); {again}") from error
    if stopped:
        raise Interrupted("the same command again goes on from there", stopped)
