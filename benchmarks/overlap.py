"""How much of the gradients' way between processes is hidden behind the backward pass, on CPUs with Gloo.

    python -m benchmarks.overlap [--processes 2 4] [--steps 8]

The plain engine sends gradients in buckets (torch's DDP) while earlier layers still compute theirs. A hook notes when
each bucket leaves and arrives; the last one leaves when the backward pass has computed everything. The overlap is the
share of the time with a bucket under way that lies before that moment: 0 if all is sent after the backward pass, 1 if
nobody ever waits. Beside it, in turn: a step that sends nothing, and one that sends all in one message afterwards.
"""

import argparse
import os
import statistics
import tempfile
import time
from copy import deepcopy

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.utils import parameters_to_vector

from pmae.config import Config, EncoderConfig, OptimConfig, SpaceConfig, TrainConfig
from pmae.data.augment import Standardize
from pmae.masking import Draw
from pmae.method import build_method
from pmae.spaces import build_space
from pmae.train.distributed import World
from pmae.train.step import Plain, build_optimizer

SHAPE, IMAGES = (3, 32, 32), 8
WAYS = ("nothing", "one message", "buckets")


def main() -> None:
    """Print a line for each number of processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, one thread a process, ViT-T, {IMAGES} images a process; medians, ms a step")
    print("processes " + "".join(f"{way:>14}" for way in WAYS) + "   overlap")
    for count in options.processes:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(work, (count, options.steps, f"{folder}/store"), count)


def work(rank: int, count: int, steps: int, store: str) -> None:
    """One process: time every way in turn, and let the first one print."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
    engine, alone, images, draw = engines(World(rank, count, torch.device("cpu")))
    spans: list[tuple[float, float]] = []
    engine._network.register_comm_hook(None, noting(spans))
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    overlaps = []
    for _ in range(steps + 1):
        for way in WAYS:
            dist.barrier()
            spans.clear()
            began = time.perf_counter()
            loss, _ = (engine if way == "buckets" else alone).measure(images, None, draw)
            loss.backward()
            if way == "one message":
                dist.all_reduce(parameters_to_vector([p.grad for p in alone.model.parameters() if p.grad is not None]))
            found[way].append(1e3 * (time.perf_counter() - began))
        overlaps.append(overlap(spans))
    if rank == 0:  # without the first round, which finds out what DDP has to send
        times = "".join(f"{statistics.median(found[way][1:]):14.0f}" for way in WAYS)
        print(f"{count:>9} {times}   {statistics.median(overlaps[1:]):7.2f}", flush=True)
    dist.destroy_process_group()


def engines(world: World) -> tuple[Plain, Plain, Tensor, Draw]:
    """The plain engine of several processes and of one, with the same weights, images and masks."""
    torch.manual_seed(0)
    images = torch.rand(IMAGES, *SHAPE)
    config = Config(
        space=SpaceConfig("cosine"),
        encoder=EncoderConfig(patch_size=4),
        optim=OptimConfig(base_lr=1e-3),
        train=TrainConfig(batch_size=IMAGES * world.size, epochs=1),
    )
    space = build_space(config.space, SHAPE)
    space.fit([images])
    model = build_method(config, SHAPE, space)
    draw = model.draw(IMAGES, 0.2, torch.Generator().manual_seed(0))
    standardize = Standardize(torch.zeros(3, 1, 1), torch.ones(3, 1, 1))
    other = deepcopy(model)
    made = [(each, standardize, config, build_optimizer(each, config.optim, on_graph=False)) for each in (model, other)]
    return Plain(*made[0], world), Plain(*made[1]), images, draw


def noting(spans: list[tuple[float, float]]):  # type: ignore[no-untyped-def]
    """DDP's own all-reduce, with the times at which each bucket leaves and arrives."""

    def hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        left = time.perf_counter()

        def arrived(future: torch.futures.Future[Tensor]) -> Tensor:
            spans.append((left, time.perf_counter()))
            return future.value()

        return allreduce_hook(None, bucket).then(arrived)

    return hook


def overlap(spans: list[tuple[float, float]]) -> float:
    """The share of the time with a bucket under way that lies before the last one leaves."""
    last, hidden, total, until = max(left for left, _ in spans), 0.0, 0.0, 0.0
    for left, arrived in sorted(spans):
        left = max(left, until)
        until = max(until, arrived)
        total += max(0.0, arrived - left)
        hidden += max(0.0, min(arrived, last) - left)
    return hidden / total


if __name__ == "__main__":
    main()
