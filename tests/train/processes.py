"""Runs of several processes on this machine, as `torchrun` would start them, but forked: everything is imported once.

`python processes.py FOLDER MOST` goes through all that the tests look at, with up to MOST processes, and prints codes
as JSON. Started by `torchrun` it is one process of a run in FOLDER whose second one is killed once.
"""

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from pmae.config import Config, DecoderConfig, EncoderConfig, OptimConfig, TrainConfig, replace
from pmae.data.images import ImageSet, Splits
from pmae.derive import resolve
from pmae.errors import Interrupted, UserError
from pmae.train.loop import Trainer, pretrain

Act = Callable[[Trainer], None]


def job() -> tuple[Config, Splits]:
    """Images of a spectrum without equal variances, whose axes do not turn on a rounding; 36 steps."""
    rng = np.random.default_rng(0)
    axes = np.linalg.qr(rng.normal(size=(64, 64)))[0]
    images = (rng.normal(size=(224, 64)) * 0.97 ** np.arange(64) @ axes + 3).reshape(-1, 1, 8, 8).astype(np.float32)
    splits = Splits("toy", ImageSet(images[:192]), None, ImageSet(images[192:]))
    config = Config(
        encoder=EncoderConfig(patch_size=4, width=16, depth=1, heads=2),
        decoder=DecoderConfig("small", width=16, depth=1, heads=2),
        optim=OptimConfig(base_lr=4e-3, warmup_epochs=1.0),
        train=TrainConfig(
            epochs=6, batch_size=32, device="cpu", log_every=3, checkpoint_every=2, precision="float32", engine="plain"
        ),
    )
    return resolve(config, 192, splits.train.shape)[0], splits


def train(out: Path, resume: bool = False, act: Act | None = None, **changes: object) -> int:
    """One process of a run, to its exit code; `act` is called after every step."""
    torch.set_num_threads(1)
    config, splits = job()
    if act is not None:
        _after_every_step(act)
    try:
        pretrain(replace(config, **changes), splits, out, resume, quiet=True)
    except UserError as error:
        print(f"{out.name}: {error}", file=sys.stderr, flush=True)
        return 2
    except Interrupted as stop:
        return stop.code
    return 0


def _after_every_step(act: Act) -> None:
    take = Trainer.inputs

    def inputs(self: Trainer, *arguments: object, **named: object) -> object:
        act(self)
        return take(self, *arguments, **named)  # type: ignore[arg-type]

    Trainer.inputs = inputs  # type: ignore[method-assign, assignment]


def together(count: int, out: Path, **options: object) -> list[int]:
    """The exit codes of so many processes that train one run."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = [_forked(rank, count, port, out, options) for rank in range(count)]
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def _forked(rank: int, count: int, port: int, out: Path, options: dict[str, object]) -> int:
    child = os.fork()
    if child:
        return child
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_RANK": rank}
    os.environ.update({name: str(value) for name, value in {"RANK": rank, "WORLD_SIZE": count, **where}.items()})
    code = 1
    try:
        code = train(out, **options)  # type: ignore[arg-type]
    finally:
        os._exit(code)


def send(number: int, rank: int, step: int) -> Act:
    """The process of this rank sends itself a signal when it has taken so many steps."""

    def act(trainer: Trainer) -> None:
        if trainer.world.rank == rank and trainer.step == step:
            os.kill(os.getpid(), number)

    return act


def every_scenario(folder: Path, most: int) -> dict[str, list[int]]:
    """What is tried, by the name of the run."""
    codes = {f"of-{count}": together(count, folder / f"of-{count}") for count in (1, 2, 4) if count <= most}
    codes["mae"] = together(1, folder / "mae", **MAE)
    codes["mae-of-2"] = together(2, folder / "mae-of-2", **MAE)
    codes["odd"] = together(3, folder / "odd")
    codes["counted"] = together(2, folder / "counted", objective__scale="mean")
    codes["learned"] = together(2, folder / "learned", space__name="learned")
    codes["normalized"] = together(2, folder / "normalized", **RESNET)
    codes["occupied"] = together(2, folder / "of-2")
    codes["stopped"] = together(2, folder / "stopped", act=send(signal.SIGTERM, 1, 16))
    codes["resumed"] = together(2, folder / "stopped", resume=True)
    began = time.monotonic()
    codes["killed"] = together(2, folder / "killed", act=send(signal.SIGKILL, 1, 16))
    codes["seconds until all knew"] = [round(time.monotonic() - began)]
    codes["resumed by one"] = together(1, folder / "killed", resume=True)
    os.environ["PMAE_TIMEOUT"] = "4"
    codes["silent"] = together(2, folder / "silent", act=_fall_asleep)
    return codes


MAE = {"space__name": "pixels", "masking__masked_variance": None, "masking__masked_patches": 0.75}
RESNET = {"encoder__name": "resnet10t", **dict.fromkeys(("encoder__width", "encoder__depth", "encoder__heads"))}
MAE |= {"objective__target": "patches", "objective__scale": "mean", "masking__ratio": "uniform"}


def _fall_asleep(trainer: Trainer) -> None:
    if trainer.world.rank == 1 and trainer.step == 4:
        time.sleep(8)


def main(arguments: Sequence[str]) -> int:
    """All scenarios, or one process of the one that `torchrun` starts."""
    folder = Path(arguments[0])
    if "TORCHELASTIC_RESTART_COUNT" in os.environ:
        first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        return train(folder, act=send(signal.SIGKILL, 1, 16) if first else None)
    print(json.dumps(every_scenario(folder, int(arguments[1]))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
