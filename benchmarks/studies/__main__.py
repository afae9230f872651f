"""Run the studies behind the pages in results/: each run is a pretraining, then one look at the test images.
Where a study is there to choose by, the second is left out.

    python -m benchmarks.studies                                    all studies and their runs
    python -m benchmarks.studies photographs --data imagenette/     the commands of one study
    python -m benchmarks.studies photographs ours simclr --data imagenette/ --out runs/photographs --run
    python -m benchmarks.studies photographs ours --data imagenette/ --run --seeds 0 1 2 --jobs 2
    python -m benchmarks.studies ingredients --run --jobs 5 --minutes 25

What is finished in --out is left as it is, what was stopped goes on from its checkpoint. Several seeds have a folder
each there. Several jobs share a card, each with a log beside its folder; one that goes on with another's encoder waits
for it. After --minutes all are saved and stopped. `--epochs` shortens all runs, to see on a small set that they work.
"""

import argparse
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

from benchmarks.studies import STUDIES, Study
from pmae.errors import UserError, require, require_known
from pmae.runs import Run
from pmae.sweep.find import finished


def pretraining(study: Study, name: str, options: argparse.Namespace) -> list[str]:
    """The command that pretrains one run of a study, or goes on with it."""
    out = Path(options.out) / name
    if (out / "config.json").exists():
        return ["pmae", "pretrain", "--out", str(out), "--resume"]
    given = ["--data", options.data, "--root", options.root, "--seed", str(options.seed), "--out", str(out)]
    shorter = ["--epochs", str(options.epochs)] if options.epochs else []
    own = f"{study.shared} {study.runs[name]}".replace("{out}", shlex.quote(str(options.out)))
    return ["pmae", "pretrain", *shlex.split(own), *given, *shorter]


def commands(study: Study, name: str, options: argparse.Namespace) -> Iterator[list[str]]:
    """What is still to be done for one run; the baselines of a study are measured with its first run and seed."""
    out = Path(options.out) / name
    if not (out.exists() and finished(Run(out))):
        yield pretraining(study, name, options)
    if study.evaluate and not (out.exists() and Run(out).evaluations):
        alone = [] if (name, options.seed) == (next(iter(study.runs)), options.seeds[0]) else ["--no-baselines"]
        yield ["pmae", "evaluate", str(out), *shlex.split(study.evaluate), *alone]


def by_seed(options: argparse.Namespace) -> list[argparse.Namespace]:
    """The options of every seed; where there are several, each has a folder of its own."""
    places = [options.out] if len(options.seeds) == 1 else [f"{options.out}/seed{seed}" for seed in options.seeds]
    pairs = zip(options.seeds, places, strict=True)
    return [argparse.Namespace(**{**vars(options), "seed": seed, "out": out}) for seed, out in pairs]


def run_all(study: Study, names: list[str], options: argparse.Namespace) -> None:
    """Run what is still to be done, so many at a time; what fails leaves the others alone, and is named at the end."""
    end = time.monotonic() + 60 * (options.minutes or 1e9)
    made: dict[Path, Future[None]] = {}
    with ThreadPoolExecutor(options.jobs) as pool:
        for own in by_seed(options):
            place = Path(own.out)
            place.mkdir(parents=True, exist_ok=True)
            for name in names:  # a base comes before those that wait for it, so that they never fill all places
                base = made.get(place / (study.base(name) or ""))
                made[place / name] = pool.submit(run_one, study, name, own, end, base)
    errors = {path.relative_to(options.out): one.exception() for path, one in made.items()}
    if failed := [f"{path} ({error})" for path, error in errors.items() if error]:
        raise UserError(f"not all runs came to their end: {'; '.join(failed)}")


def run_one(study: Study, name: str, options: argparse.Namespace, end: float, base: Future[None] | None) -> None:
    """The commands of one run, one after the other, until there is no time left."""
    if base is not None and base.exception():
        raise UserError(f"{study.base(name)} came to none")
    for command in commands(study, name, options):
        require_time(end)
        print(shlex.join(command), flush=True)
        log = Path(options.out, f"{name}.log")
        with log.open("a", encoding="utf-8") if options.jobs > 1 else nullcontext() as output:
            code = carry_out(command, output, end)
        if code:
            require_time(end)
        require(code == 0, "exit code", f"0 of {shlex.join(command[:2])}" + f" (see {log})" * (options.jobs > 1), code)


def require_time(end: float) -> None:
    """Refuse to go on once the time is up."""
    if time.monotonic() >= end:
        raise UserError("the time was up")


def carry_out(command: list[str], output: object, end: float) -> int:
    """Run a command to its end, or let it save what it has when the time is up."""
    process = subprocess.Popen([sys.executable, "-m", *command], stdout=output, stderr=output)  # type: ignore[call-overload]
    try:
        return process.wait(timeout=max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.terminate()  # an interrupt would be ignored where this runs in the background of a shell
        return process.wait()


def main() -> None:
    """List the studies, print the commands of one, or run them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", nargs="?")
    parser.add_argument("names", nargs="*", help="runs of the study; all if not given")
    parser.add_argument("--data", default="cifar10", help="a named set, or a folder")
    parser.add_argument("--root", default="data", help="folder of named sets")
    parser.add_argument("--out", default="runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--epochs", type=int, help="instead of the study's own")
    parser.add_argument("--run", action="store_true", help="run the commands instead of printing them")
    parser.add_argument("--jobs", type=int, default=1, help="how many runs at a time")
    parser.add_argument("--minutes", type=float, help="save and stop after so long")
    options = parser.parse_args()
    require(options.jobs >= 1, "--jobs", "at least 1", options.jobs)
    require(len(set(options.seeds)) == len(options.seeds), "--seeds", "different from each other", options.seeds)
    require(options.minutes is None or options.minutes > 0, "--minutes", "above 0", options.minutes)
    if options.study is None:
        for name, study in STUDIES.items():
            print(f"{name}: {study.question}\n  {' '.join(study.runs)}")
        return
    require_known("study", [options.study], STUDIES)
    study = STUDIES[options.study]
    require_known("names", options.names, study.runs)
    names = [name for name in study.runs if name in (options.names or study.runs)]
    if options.run:
        run_all(study, names, options)
        return
    for own in by_seed(options):
        for name in names:
            for command in commands(study, name, own):
                print(shlex.join(command))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
