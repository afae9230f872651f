"""Kills a pretraining run with SIGKILL until it has had enough, and compares what is left with a run left in peace.

Everything is imported once and no tensor is touched before the fork, so a run costs its training and not its imports.
"""

import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pmae.config import Config, DecoderConfig, EncoderConfig, OptimConfig, TrainConfig
from pmae.data.images import ImageSet, Splits
from pmae.derive import resolve
from pmae.runs import Run
from pmae.train.checkpoint import damage, load_encoder
from pmae.train.loop import pretrain

WRITES = ("open", "os.rename", "os.remove", "os.mkdir", "shutil.rmtree")


def _job() -> tuple[Config, Splits]:
    images = np.random.default_rng(0).integers(0, 255, (64, 1, 8, 8), dtype=np.uint8)
    splits = Splits("toy", ImageSet(images[:48]), None, ImageSet(images[48:]))
    config = Config(
        encoder=EncoderConfig(patch_size=4, width=16, depth=1, heads=2),
        decoder=DecoderConfig("small", width=16, depth=1, heads=2),
        optim=OptimConfig(warmup_epochs=1.0),
        train=TrainConfig(
            epochs=6, batch_size=16, device="cpu", log_every=3, checkpoint_every=1, keep=2, precision="float32"
        ),
    )
    return resolve(config, 48, splits.train.shape)[0], splits


def _train(out: Path) -> None:
    torch.set_num_threads(1)
    pretrain(*_job(), out, resume=(out / "config.json").exists(), quiet=True)


def _forked(work: Callable[[], None]) -> int:
    """The process of a fork that does the work and leaves with 0, or with 1 and its traceback."""
    child = os.fork()
    if child:
        return child
    try:
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _killed(child: int, after: float) -> bool:
    """Whether the process was still running when it was killed; one that failed by itself ends everything."""
    time.sleep(after)
    os.kill(child, signal.SIGKILL)
    return _ended_by_kill(child)


def _ended_by_kill(child: int) -> bool:
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) != 0:
        sys.exit("the run failed by itself")
    return os.WIFSIGNALED(status)


def _look(out: Path) -> None:
    """Read everything that a killed run left, as other commands would: whole, or not there."""
    if not (out / "config.json").exists():
        return
    run = Run(out)
    _ = run.config, run.environment, run.results, run.metrics()
    for path in run.checkpoints()[-2:]:
        if damage(path):
            sys.exit(f"{path} is not whole: {damage(path)}")
    if run.checkpoints():
        load_encoder(run)


def _what_counts(out: Path) -> dict[str, Any]:
    """All that a run leaves but its speed: every checkpoint's bytes, the lines, the results."""
    run = Run(out)
    tensors = {p.relative_to(out).as_posix(): p.read_bytes() for p in sorted(out.rglob("*.safetensors"))}
    lines = [{k: v for k, v in line.items() if k != "images_per_second"} for line in run.metrics()]
    return {**tensors, "metrics": lines, "results": run.results}


def _at_moments(out: Path, kills: int, draw: random.Random, seconds: float) -> int:
    """Kill at moments drawn from the time that a whole run takes, until it is done or has had its kills."""
    for count in range(kills):
        if not _killed(_forked(lambda: _train(out)), draw.uniform(0, seconds)):
            return count
        _look_apart(out)
    return kills


def _at_writes(out: Path, kills: int, draw: random.Random, seconds: float) -> int:
    """Kill right before the n-th time that the process opens, renames, makes or removes something in the folder."""
    for count in range(kills):
        number = draw.randrange(1, 40)
        if not _ended_by_kill(_forked(lambda number=number: _train_until(out, number))):
            return count
        _look_apart(out)
    return kills


def _train_until(out: Path, number: int) -> None:
    left = [number]

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event in WRITES and str(out) in str(arguments[0]):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    _train(out)


def _look_apart(out: Path) -> None:
    """In a process of its own, so that this one stays as it was for the next fork."""
    _ended_by_kill(_forked(lambda: _look(out)))


def _compare(out: Path, whole: Path) -> None:
    _ended_by_kill(_forked(lambda: _train(out)))
    left, expected = _what_counts(out), _what_counts(whole)
    differ = [name for name in expected.keys() | left.keys() if left.get(name) != expected.get(name)]
    if differ:
        sys.exit(f"{out} differs from the run left in peace in {differ}")
    if list(out.rglob(".*")):
        sys.exit(f"{out} still holds {list(out.rglob('.*'))}")


def killed(folder: Path, method: Callable[..., int], kills: int, draw: random.Random, seconds: float) -> int:
    """Run after run, each killed at most ten times, until there were `kills` in all."""
    done = runs = 0
    while done < kills:
        out = folder / f"killed{method.__name__}-{runs}"
        done += method(out, min(10, kills - done), draw, seconds)
        _compare(out, folder / "whole")
        runs += 1
    return done


def kill(folder: Path, seed: int, kills: dict[str, int]) -> None:
    """Both ways to be killed, compared with one run left in peace; kills.json says how many there were."""
    draw, began = random.Random(seed), time.monotonic()
    _ended_by_kill(_forked(lambda: _train(folder / "whole")))
    seconds, methods = time.monotonic() - began, {"moments": _at_moments, "writes": _at_writes}
    found = {how: killed(folder, methods[how], count, draw, seconds) for how, count in kills.items()}
    (folder / "kills.json").write_text(json.dumps(found))
