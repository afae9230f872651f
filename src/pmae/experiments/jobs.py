"""Doing what is missing: a list of jobs, and the function that runs one of them.

`run_job` needs nothing but its arguments, so whatever can call a function elsewhere can take the place of `run_jobs`.
"""

import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pmae import api
from pmae.config import DataConfig, replace
from pmae.data.datasets import load
from pmae.data.images import Splits
from pmae.experiments.library import Job, Library, finished
from pmae.runs import Run

Accept = Callable[[Run], bool]


def anything(_: Run) -> bool:
    """Every finished run will do."""
    return True


def run_jobs(
    jobs: Sequence[Job], folder: Path, library: Library, accept: Accept = anything, loosely: bool = False
) -> list[Run]:
    """The finished run of each job, one after another in this process; says what it does, not what it finds."""
    runs = []
    for number, job in enumerate(jobs, 1):
        runs.append(run_job(job, folder, library, accept, loosely, f"[{number}/{len(jobs)}] "))
    return runs


def run_job(
    job: Job, folder: Path, library: Library, accept: Accept = anything, loosely: bool = False, prefix: str = ""
) -> Run:
    """The finished run of one job: found in the library, or else continued or made below `folder`.

    Finished runs that `accept` refuses are left alone; `loosely` takes a run of any length and seed.
    """
    run = find_run(job, library, accept, loosely)
    if run is not None:
        return run
    begun = [run for run in library.find(job.config) if not finished(run) and run.path.parent == folder]
    path, config = folder / job.folder, job.config
    if begun:
        here = {"train__device": config.train.device, "data__root": config.data.root}
        path, config = begun[0].path, replace(begun[0].config, **here)
    print(f"{prefix}{job.name}: {'goes on' if begun else 'pretrains'} in {path}", flush=True)
    began = time.monotonic()
    run = api.pretrain(config, splits(config.data), path, resume=bool(begun), quiet=True)
    print(f"{prefix}{job.name}: done in {time.monotonic() - began:.0f} s", flush=True)
    return run


def find_run(job: Job, library: Library, accept: Accept = anything, loosely: bool = False) -> Run | None:
    """The first finished run of a job that is accepted."""
    return next((run for run in library.find(job.config, loosely) if finished(run) and accept(run)), None)


@functools.lru_cache(maxsize=1)
def splits(data: DataConfig) -> Splits:
    """The images that settings name; the last set stays at hand, since neighbouring jobs share it."""
    return load(data)
