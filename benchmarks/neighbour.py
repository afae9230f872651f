"""What a busy neighbour costs: training speed on a CPU alone and beside one other busy process, and their ratio.

    python -m benchmarks.neighbour [--rounds 3] [--seconds 8]

The step is that of `pmae demo` on all cores, timed in turn alone and beside a process that does nothing but count,
once with OpenMP threads that sleep while they wait, as the command line sets it, and once with threads that spin, which
is OpenMP's own default. A fair share on two cores is one half to two thirds of the speed alone.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from pmae.cli import WAITING

POLICIES = {"sleeping": WAITING, "spinning": {"OMP_WAIT_POLICY": "active", "KMP_BLOCKTIME": "200"}}


def main() -> None:
    """Time every policy alone and with a neighbour in turn, and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(speed(options.seconds))
        return
    found: dict[tuple[str, bool], list[float]] = {(name, busy): [] for name in POLICIES for busy in (False, True)}
    for _ in range(options.rounds):
        for (name, busy), speeds in found.items():
            with neighbour() if busy else nullcontext():
                speeds.append(timed(POLICIES[name], options.seconds))
    print(f"{os.cpu_count()} cores, medians of {options.rounds} rounds, images/s")
    print(f"{'threads':<10} {'alone':>8} {'beside one busy process':>24} {'ratio':>7}")
    for name in POLICIES:
        alone, beside = (statistics.median(found[name, busy]) for busy in (False, True))
        print(f"{name:<10} {alone:8.0f} {beside:24.0f} {beside / alone:7.2f}")


@contextmanager
def neighbour() -> Iterator[None]:
    """A process that keeps one core busy."""
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        busy.kill()
        busy.wait()


def timed(policy: dict[str, str], seconds: float) -> float:
    """Images a second in a process of its own: how threads wait is settled when torch is imported."""
    command = [sys.executable, "-m", "benchmarks.neighbour", "--child", "--seconds", str(seconds)]
    known = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "GOMP_SPINCOUNT")}
    done = subprocess.run(command, env=known | policy, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def speed(seconds: float) -> float:
    """Images a second of the demo's training step, after two steps that warm up."""
    import tempfile
    from pathlib import Path

    import numpy as np
    import torch

    from pmae.config import replace
    from pmae.data.images import ImageSet, Splits
    from pmae.demo import demo_config
    from pmae.derive import resolve
    from pmae.runs import create_run
    from pmae.train.environment import describe_environment
    from pmae.train.loop import Pretraining

    images = np.random.default_rng(0).integers(0, 255, (1024, 3, 32, 32), dtype=np.uint8)
    splits = Splits("noise", ImageSet(images))
    config, _ = resolve(replace(demo_config(), space__name="cosine"), len(images), splits.train.shape)
    with tempfile.TemporaryDirectory() as folder:
        run = create_run(Path(folder) / "run", config, describe_environment(splits, torch.device("cpu")))
        training = Pretraining(config, splits, run, torch.device("cpu"))
        order, count, began = training.draws.order(0), -2, 0.0
        while count < 1 or time.monotonic() - began < seconds:
            position = (count + 2) % training.steps
            training.stepper(training.inputs(0, position, training.batches.take(order[position]), 1e-4))
            count += 1
            began = time.monotonic() if count == 0 else began
        return count * training.batch_size / (time.monotonic() - began)


if __name__ == "__main__":
    main()
