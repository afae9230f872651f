"""Runs of several processes on this machine, as `torchrun` would start them, but forked: all is imported once."""

import dataclasses
import json
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from pmae import api
from pmae.config import Config, DataConfig, DecoderConfig, EncoderConfig, OptimConfig, TrainConfig, replace
from pmae.data.images import ImageSet, Splits
from pmae.derive import resolve
from pmae.embed import embed
from pmae.errors import Interrupted, UserError
from pmae.evaluate import features
from pmae.evaluate.protocols import Protocols, only, preset
from pmae.runs import Run
from pmae.train.loop import Pretraining, pretrain

Act = Callable[[Pretraining], None]
Work = Callable[[], object]


def job() -> tuple[Config, Splits]:
    """Images of a spectrum without equal variances, whose axes do not turn on a rounding; 18 steps."""
    rng = np.random.default_rng(0)
    axes = np.linalg.qr(rng.normal(size=(64, 64)))[0]
    images = (rng.normal(size=(128, 64)) * 0.97 ** np.arange(64) @ axes + 3).reshape(-1, 1, 8, 8).astype(np.float32)
    splits = Splits("toy", ImageSet(images[:96]), None, ImageSet(images[96:]))
    config = Config(
        encoder=EncoderConfig(patch_size=4, width=16, depth=1, heads=2),
        decoder=DecoderConfig("small", width=16, depth=1, heads=2),
        optim=OptimConfig(base_lr=4e-3, warmup_epochs=1.0),
        train=TrainConfig(
            epochs=6, batch_size=32, device="cpu", log_every=3, checkpoint_every=2, precision="float32", engine="plain"
        ),
    )
    return resolve(config, 96, splits.train.shape)[0], splits


def train(out: Path, resume: bool = False, act: Act | None = None, **changes: object) -> int:
    """One process of a run, to its exit code; `act` is called after every step."""
    config, splits = job()
    if act is not None:
        _after_every_step(act)
    return code_of(out.name, lambda: pretrain(replace(config, **changes), splits, out, resume, quiet=True))


def code_of(name: str, work: Work) -> int:
    """The exit code that the command line would have."""
    torch.set_num_threads(1)
    try:
        work()
    except UserError as error:
        print(f"{name}: {error}", file=sys.stderr, flush=True)
        return 2
    except Interrupted as stop:
        return stop.code
    return 0


def _after_every_step(act: Act) -> None:
    take = Pretraining.inputs

    def inputs(self: Pretraining, *arguments: object, **named: object) -> object:
        act(self)
        return take(self, *arguments, **named)  # type: ignore[arg-type]

    Pretraining.inputs = inputs  # type: ignore[method-assign, assignment]


def together(count: int, out: Path, **options: object) -> list[int]:
    """The exit codes of so many processes that train one run."""
    return at_once(count, lambda: train(out, **options))  # type: ignore[arg-type]


def at_once(count: int, work: Callable[[], int]) -> list[int]:
    """The exit codes of so many processes that do the same."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = [_forked(rank, count, port, work) for rank in range(count)]
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def _forked(rank: int, count: int, port: int, work: Callable[[], int]) -> int:
    child = os.fork()
    if child:
        return child
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_RANK": rank}
    os.environ.update({name: str(value) for name, value in {"RANK": rank, "WORLD_SIZE": count, **where}.items()})
    code = 1
    try:
        code = work()
    finally:
        os._exit(code)


def send(number: int, rank: int, step: int) -> Act:
    """The process of this rank sends itself a signal when it has taken so many steps."""

    def act(trainer: Pretraining) -> None:
        if trainer.world.rank == rank and trainer.step == step:
            os.kill(os.getpid(), number)

    return act


def try_all(folder: Path, most: int) -> None:
    """All that the tests look at, with up to so many processes; codes.json says how they ended."""
    (folder / "codes.json").write_text(json.dumps(every_scenario(folder, most)))


def every_scenario(folder: Path, most: int) -> dict[str, list[int]]:
    """What is tried, by the name of the run."""
    codes = {f"of-{count}": together(count, folder / f"of-{count}") for count in (1, 2, 4) if count <= most}
    codes["mae"] = together(1, folder / "mae", **MAE)
    codes["mae-of-2"] = together(2, folder / "mae-of-2", **MAE)
    for count in (1, 2):
        codes[f"contrast-{count}"] = together(count, folder / f"contrast-{count}", objective__contrastive_weight=1.0)
        codes[f"teacher-{count}"] = together(count, folder / f"teacher-{count}", **TEACHER)
        codes[f"muon-{count}"] = together(count, folder / f"muon-{count}", optim__name="muon")
        codes[f"staged-{count}"] = together(count, folder / f"staged-{count}", **STAGED)
    codes["staged occupied"] = together(2, folder / "staged-2", **STAGED)
    parts = {"train__accumulate": 2, "train__activation_checkpointing": True}
    codes["parts"] = together(2, folder / "parts", **parts)
    codes["bf16"] = together(2, folder / "bf16", train__bf16_gradients=True)
    codes["odd"] = together(3, folder / "odd")
    codes["counted"] = together(2, folder / "counted", objective__scale="mean")
    codes["learned"] = together(2, folder / "learned", space__name="learned")
    codes["normalized"] = together(2, folder / "normalized", **RESNET)
    codes["occupied"] = together(2, folder / "of-2")
    codes["stopped"] = together(2, folder / "stopped", act=send(signal.SIGTERM, 1, 8))
    codes["resumed"] = together(2, folder / "stopped", resume=True)
    began = time.monotonic()
    codes["killed"] = together(2, folder / "killed", act=send(signal.SIGKILL, 1, 8))
    codes["seconds until all knew"] = [round(time.monotonic() - began)]
    codes["resumed by one"] = together(1, folder / "killed", resume=True)
    codes["restarted"] = at_once(1, partial(restarted, folder / "restarted"))
    codes |= shardings(folder) | evaluations(folder) | embeddings(folder)
    os.environ["PMAE_TIMEOUT"] = "4"
    codes["silent"] = together(2, folder / "silent", act=_fall_asleep)
    return codes


def restarted(out: Path) -> int:
    """A run under the agent of `torchrun --standalone --nproc-per-node 2 --max-restarts 1`; one process dies once."""
    place = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "run_id": "restarted"}
    config = LaunchConfig(1, 1, 2, max_restarts=1, start_method="fork", **place)  # type: ignore[arg-type]
    return max(elastic_launch(config, killed_at_first)(out).values())


def killed_at_first(out: Path) -> int:
    """One process of a run whose second one is killed, but not after a restart."""
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    return train(out, act=send(signal.SIGKILL, 1, 8) if first else None)


def shardings(folder: Path) -> dict[str, list[int]]:
    """The same runs divided among processes, and from divided to whole and back in the middle of them."""
    divided = {"train__shard": True}
    codes = {
        "clipped": together(2, folder / "clipped", **CLIPPED),
        "sharded": together(2, folder / "sharded", **divided, **CLIPPED),
        "sharded-contrast": together(2, folder / "sharded-contrast", **divided, objective__contrastive_weight=1.0),
        "sharded-mae": together(2, folder / "sharded-mae", **divided, **MAE),
        "sharded-alone": together(1, folder / "sharded-alone", **divided),
        "sharded-killed": together(2, folder / "sharded-killed", act=send(signal.SIGKILL, 1, 8), **divided),
        "whole again": together(1, folder / "sharded-killed", resume=True, act=send(signal.SIGTERM, 0, 10)),
    }
    return codes | {"divided again": together(2, folder / "sharded-killed", resume=True, **divided)}


def evaluations(folder: Path) -> dict[str, list[int]]:
    """Scores of one run by one and by two processes, in chunks so small that both have some, with crops for heads."""
    features.CHUNK["cpu"] = 20
    _, toy = job()
    numbers = [(part.images.mean((1, 2, 3)) > 3).astype(np.int64) for part in (toy.train, toy.test)]
    sets = [dataclasses.replace(p, labels=n) for p, n in zip((toy.train, toy.test), numbers, strict=True)]
    splits, chosen = Splits("toy", sets[0], None, sets[1]), only(preset("paper"), ["linear", "knn"])
    probe = dataclasses.replace(chosen.probe, epochs=2, warmup_epochs=1)

    def scored(count: int, out: Path, protocols: Protocols) -> list[int]:
        return at_once(
            count,
            partial(code_of, out.name, partial(api.evaluate, out, protocols, splits, device="cpu", figures=False)),
        )

    codes = {}
    for count in (1, 2):
        out = shutil.copytree(folder / "of-1", folder / f"scored-{count}")
        codes[out.name] = scored(count, out, dataclasses.replace(chosen, probe=probe, resamples=20))
    codes["finetuned"] = scored(2, folder / "scored-2", only(preset("paper"), ["finetune"]))
    return codes


def embeddings(folder: Path) -> dict[str, list[int]]:
    """Features by one and by two processes: of an array, of files with a broken one, of fewer files than processes."""
    images = job()[1].train.images
    np.save(folder / "array.npy", images)
    for name, count in (("files", 50), ("few", 1)):
        (folder / name / "one").mkdir(parents=True)
        for number in range(count):
            Image.fromarray(images[number, 0].astype(np.uint8)).save(folder / name / "one" / f"{number:02d}.png")
    (folder / "files" / "one" / "20.png").write_bytes(b"broken")

    def embedded(count: int, out: str, source: str, **settings: object) -> list[int]:
        data = DataConfig(str(folder / source), layout="NCHW", **settings)  # type: ignore[arg-type]
        work = partial(embed, Run(folder / "of-1"), data, folder / out, device="cpu", batch_size=16)
        return at_once(count, partial(code_of, out, work))

    sources, counts = {"array.npy": "none", "files": "folders", "few": "none"}, (1, 2)
    both = [(source, labels, count) for source, labels in sources.items() for count in counts]
    codes = {f"{name}-{count}.npz": embedded(count, f"{name}-{count}.npz", name, labels=x) for name, x, count in both}
    return codes | {"refused.npz": embedded(2, "refused.npz", "files", max_unreadable=0)}


MAE = {"space__name": "pixels", "masking__masked_variance": None, "masking__masked_patches": 0.75}
RESNET = {"encoder__name": "resnet10t", **dict.fromkeys(("encoder__width", "encoder__depth", "encoder__heads"))}
MAE |= {"objective__target": "patches", "objective__scale": "mean", "masking__ratio_schedule": "uniform"}

TEACHER = {"objective__contrastive_weight": 1.0, "objective__contrastive": "data2vec"}
CLIPPED = {"optim__clip_norm": 0.05}
STAGED = {"encoder__patch_size": 2, "encoder__first_patch_size": 4, "train__epochs": 2, "optim__warmup_epochs": 0.4}


def _fall_asleep(trainer: Pretraining) -> None:
    if trainer.world.rank == 1 and trainer.step == 4:
        time.sleep(8)
