"""Trains on shards. `python streamed.py SHARDS OUT ROOM` does it under a limit on address space, ROOM bytes above what
the process has after training on eight images, and prints JSON.
"""

import json
import os
import resource
import signal
import sys
import threading
from pathlib import Path

import torch

from pmae.config import Config, DataConfig, DecoderConfig, EncoderConfig, TrainConfig, replace
from pmae.data import batches
from pmae.data.images import Splits
from pmae.data.sets import load
from pmae.derive import resolve
from pmae.paper.recipes import with_patches
from pmae.train import monitor
from pmae.train.loop import Pretraining, pretrain


def config_for(source: str, **changes: object) -> Config:
    """A small model; every step counts."""
    config = Config(
        data=DataConfig(source=source, threads=2),
        encoder=EncoderConfig(patch_size=4, width=16, depth=1, heads=2),
        decoder=DecoderConfig("small", width=16, depth=1, heads=2),
        train=TrainConfig(
            epochs=2, batch_size=8, device="cpu", log_every=100, checkpoint_every=1, precision="float32", engine="plain"
        ),
    )
    return replace(config, **changes)


def train(config: Config, out: Path, resume: bool = False) -> None:
    """A run on a resolved configuration."""
    splits = load(config.data)
    settled, _ = resolve(config, len(splits.train), splits.train.shape)
    pretrain(settled, splits, out, resume, quiet=True)


def bounded(shards: str, out: Path, room: int) -> dict[str, object]:
    """Patches of pixels, whose fit needs the statistics alone: they pass over all images, and so does training."""
    # A pass takes 2**24 numbers at a time and the monitor 256 images: scaled down as the set is.
    batches.NUMBERS, monitor.MOST_IMAGES = 2**18, 16
    config = with_patches(config_for(shards, encoder__patch_size=64, train__batch_size=16, train__epochs=1))
    small = load(config.data).train.take(torch.arange(8).numpy()).loaded()
    pretrain(
        resolve(replace(config, train__batch_size=4), 8, small.shape)[0],
        Splits("few", small),
        out.with_name("warm"),
        quiet=True,
    )
    # So do the stacks of threads, eight megabytes for each that reads a shard: as many as the machine happens to start.
    threading.stack_size(2**18)
    before = _status()
    resource.setrlimit(resource.RLIMIT_AS, (before["VmSize"] + room, resource.RLIM_INFINITY))
    train(config, out)
    images, after = load(config.data).train.images, _status()
    try:
        images[:]
        refused = False
    except MemoryError:
        refused = True
    return {"decoded": images.nbytes, "grown": after["VmHWM"] - before["VmRSS"], "whole_set_refused": refused}


def killed(shards: str, out: Path, step: int) -> None:
    """Kills its process without warning after that many steps, in the middle of an epoch."""
    torch.set_num_threads(1)
    original = Pretraining.inputs

    def inputs(self: Pretraining, *arguments: object) -> object:
        if self.step == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, *arguments)  # type: ignore[arg-type]

    Pretraining.inputs = inputs  # type: ignore[method-assign, assignment]
    train(config_for(shards), out)


def _status() -> dict[str, int]:
    lines = Path("/proc/self/status").read_text().splitlines()
    return {line.split(":")[0]: 1024 * int(line.split()[1]) for line in lines if line.endswith("kB")}


if __name__ == "__main__":
    torch.set_num_threads(1)
    shards, out, room = sys.argv[1:]
    print(json.dumps(bounded(shards, Path(out), int(room))))
