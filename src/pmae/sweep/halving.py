"""Asynchronous successive halving (ASHA): all runs begin, and the best third of those at a rung goes on to the next."""

from collections.abc import Sequence

from pmae.config import Config
from pmae.errors import UserError, require
from pmae.runs import Run
from pmae.sweep.jobs import Job, Task

FACTOR = 3


class Halving:
    """A plan: no run waits for another, and one that is stopped keeps its checkpoint and its schedule.

    What gets to the end is therefore the run that a grid would have made.
    """

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = list({job.config: job for job in jobs}.values())
        self._fresh = list(self._jobs)
        self.rungs = rungs_of([job.config for job in jobs])
        self._scores: list[dict[Job, float]] = [{} for _ in self.rungs]
        self._risen: list[set[Job]] = [set() for _ in self.rungs]

    def next(self, running: bool) -> Task | None:
        """A run that has not begun, or else the best of those that may rise, from the lowest rung that has one."""
        if self._fresh:
            return self._task(self._fresh.pop(0), 0)
        task = self._rise(0)
        if task is None and not running and not self._scores[-1]:
            # Fewer runs are left than a third can be taken of: the best of them rises alone.
            task = self._rise(1)
        return task

    def ended(self, task: Task, run: Run) -> None:
        """Note the score of a run at its rung."""
        rung = -1 if task.until is None else self.rungs.index(task.until)
        self._scores[rung][task.job] = score_at(run, self.rungs[rung])

    def _rise(self, least: int) -> Task | None:
        for rung in range(len(self.rungs) - 1):
            scores = self._scores[rung]
            # In the order of the plan first, so that of equals the same one rises whichever ended first.
            best = sorted((job for job in self._jobs if job in scores), key=lambda job: scores[job], reverse=True)
            rising = [job for job in best[: max(len(best) // FACTOR, least)] if job not in self._risen[rung]]
            if rising:
                self._risen[rung].add(rising[0])
                return self._task(rising[0], rung + 1)
        return None

    def _task(self, job: Job, rung: int) -> Task:
        epoch, last = self.rungs[rung], self.rungs[-1]
        return Task(job, f"{job.name} to epoch {epoch} of {last}", None if epoch == last else epoch)


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
