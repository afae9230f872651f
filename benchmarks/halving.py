"""Successive halving as `pmae sweep --search asha` does it, beside Ray Tune's: python -m benchmarks.halving

Both are the schedulers themselves, played on invented learning curves: those of nine masking ratios end at the
accuracies of the published runs, lie lower before, and are measured with an error of half a point.
"""

import heapq
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from pmae.config import Config, replace
from pmae.runs import Run
from pmae.sweep.execute import Asha
from pmae.sweep.find import RunSpec, validation

RUNS = Path(__file__).parents[1] / "results" / "runs"
EPOCHS = 90
BELOW = {9: 8.0, 27: 4.0, 90: 0.0}
"""Points that a curve lies below its end at each rung."""
ERROR = 0.5
REPEATS = 300

Curve = dict[int, float]
"""Accuracy at each rung."""


class Outcome(NamedTuple):
    """What a search took, and what it gave away."""

    epochs: float
    """Trained in all runs together."""
    until: float
    """Epochs of one run until the last worker had ended."""
    lost: float
    """Points between the best run of all and the best that came to its end."""


def promoted(curves: Sequence[Curve], workers: int) -> Outcome:
    """Our scheduler: the best third of a rung goes on."""
    named = [RunSpec(str(n), replace(Config(), train__epochs=EPOCHS, data__source=str(n))) for n in range(len(curves))]
    scheduler, running, now, trained, ended = Asha(named), [], 0, 0, []
    reached = dict.fromkeys(named, 0)
    while True:
        while len(running) < workers and (stage := scheduler.next(bool(running))) is not None:
            length = (stage.until or EPOCHS) - reached[stage.spec]
            trained += length
            heapq.heappush(running, (now + length, stage.spec.name, stage))
        if not running:
            return Outcome(trained, now, max(c[EPOCHS] for c in curves) - max(curves[n][EPOCHS] for n in ended))
        now, name, stage = heapq.heappop(running)
        reached[stage.spec] = stage.until or EPOCHS
        lines = [{"epoch": epoch, "linear": value} for epoch, value in curves[int(name)].items()]
        scheduler.ended(stage, SimpleNamespace(metrics=lambda lines=lines: lines, path=name))
        ended += [int(name)] if stage.until is None else []


def stopped(curves: Sequence[Curve], workers: int) -> Outcome:
    """Ray Tune's scheduler: whoever is below the best third of those before it at a rung is stopped."""
    from ray.tune.schedulers import AsyncHyperBandScheduler, TrialScheduler

    scheduler = AsyncHyperBandScheduler("epoch", "linear", "max", EPOCHS, min(BELOW), 3)
    rungs, waiting, running, now, trained, ended = list(BELOW), list(range(len(curves))), [], 0, 0, []
    trials = [SimpleNamespace(trial_id=str(n)) for n in waiting]
    while waiting or running:
        while waiting and len(running) < workers:
            number = waiting.pop(0)
            scheduler.on_trial_add(None, trials[number])
            trained += rungs[0]
            heapq.heappush(running, (now + rungs[0], number, 0))
        now, number, rung = heapq.heappop(running)
        if rungs[rung] == EPOCHS:
            ended.append(number)
            continue
        report = {"epoch": rungs[rung], "linear": curves[number][rungs[rung]]}
        if scheduler.on_trial_result(None, trials[number], report) == TrialScheduler.CONTINUE:
            length = rungs[rung + 1] - rungs[rung]
            trained += length
            heapq.heappush(running, (now + length, number, rung + 1))
    return Outcome(trained, now, max(c[EPOCHS] for c in curves) - max(curves[n][EPOCHS] for n in ended))


def invented(ends: Sequence[float], seed: int) -> list[Curve]:
    """Curves of runs in a random order."""
    rng = random.Random(seed)
    shuffled = rng.sample(ends, len(ends))
    return [{e: end - below + rng.gauss(0, ERROR) * (below > 0) for e, below in BELOW.items()} for end in shuffled]


def main() -> None:
    """A row a method, number of workers and scheduler: means over shuffled orders."""
    header = ["ratios of", "workers", "scheduler", "epochs trained", "epochs of waiting", "points lost"]
    print(f"| {' | '.join(header)} |\n{'|---' * len(header)}|")
    schedulers: dict[str, Callable[[Sequence[Curve], int], Outcome]] = {"ours": promoted, "Ray Tune": stopped}
    for method, usual in (("mae", None), ("pmae", "cifar10-pmae-50")):
        folders = [RUNS / f"cifar10-{method}-0.{n}-50" for n in range(1, 10)]
        there = [folder if folder.is_dir() else RUNS / (usual or "") for folder in folders]
        ends = [validation(Run(folder)) or 0.0 for folder in there]
        for workers in (1, 3, 9):
            for name, play in schedulers.items():
                played = [play(invented(ends, seed), workers) for seed in range(REPEATS)]
                epochs, until, lost = (statistics.fmean(column) for column in zip(*played, strict=True))
                print(f"| {method.upper()} | {workers} | {name} | {epochs:.0f} | {until:.0f} | {lost:.2f} |")


if __name__ == "__main__":
    main()
