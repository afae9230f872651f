"""Distributed training, as `torchrun` starts it: ranks, collectives, sharded models, and what stops all processes."""

import contextlib
import itertools
import os
import re
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from pmae import fast
from pmae.config import Config
from pmae.data.batches import Part
from pmae.errors import UserError, require
from pmae.files import tensors_digest
from pmae.method import MaskedAutoencoder, PrincipalMAE, build_method
from pmae.system import is_out_of_memory

TIMEOUT = "PMAE_TIMEOUT"
"""Environment variable: seconds that a process waits for the others before it gives up; 600 if not set."""
GROUPS = itertools.count()  # a process may join the others more than once: to train a twin, and then to evaluate it


class World:
    """The processes of a run and their collectives. One alone is its own sum and never touches torch.distributed."""

    def __init__(self, rank: int = 0, size: int = 1, device: torch.device | None = None) -> None:
        self.rank, self.size, self.device = rank, size, device or torch.device("cpu")
        self.main = rank == 0
        self.part: Part = (rank, size)  # which part of the images is this process's, and of how many

    def rank_slice(self, count: int) -> slice:
        """This process's part of `count` rows, which the number of processes divides."""
        each = count // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum of a tensor on the world's device over all processes, in place."""
        if self.size > 1:
            with lost_process_errors(self):
                torch.distributed.all_reduce(tensor)
        return tensor

    def average(self, tensors: list[Tensor]) -> None:
        """Put into each tensor its mean over all processes, in one message."""
        if self.size > 1:
            flat = self.all_reduce(torch.cat([tensor.flatten() for tensor in tensors])).div_(self.size)
            parts = flat.split([tensor.numel() for tensor in tensors])
            torch._foreach_copy_(tensors, [part.view_as(t) for part, t in zip(parts, tensors, strict=True)])

    def all_gather(self, number: int) -> list[int]:
        """What every process says, by rank; all wait for the last."""
        if self.size == 1:
            return [number]
        numbers = torch.zeros(self.size, dtype=torch.int64, device=self.device)
        numbers[self.rank] = number
        return [int(each) for each in self.all_reduce(numbers).tolist()]

    @contextlib.contextmanager
    def all_agree(self) -> Iterator[None]:
        """What one process refuses inside is refused by all, so that nobody waits for one that has left."""
        try:
            yield
        except UserError:
            self.all_gather(1)
            raise
        if any(self.all_gather(0)):
            raise UserError("the run was refused by another of its processes, which says why")

    def require_same(self, tensors: Mapping[str, Tensor]) -> None:
        """Refuse to train when processes begin with different weights or moments: they would drift apart in silence."""
        if self.size > 1 and len(set(self.all_gather(int(tensors_digest(tensors)[:15], 16)))) > 1:
            why = "every machine needs the same version of the software and the same run folder"
            raise UserError(f"all processes must begin with the same weights and moments, and they differ: {why}")


ONE_PROCESS = World()


def launched() -> bool:
    """Whether `torchrun` started several processes, of which this is one."""
    return int(os.environ.get("WORLD_SIZE", 1)) > 1 and "RANK" in os.environ and "MASTER_ADDR" in os.environ


def is_main() -> bool:
    """Whether this process is the one that speaks; known before any other is met."""
    return not launched() or int(os.environ["RANK"]) == 0


def was_restarted(out: Path) -> bool:
    """Whether `torchrun --max-restarts` starts the processes once more, for a run that already has its folder."""
    again = launched() and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
    return again and (out / "config.json").exists()


def local_device(device: torch.device) -> torch.device:
    """The device of this process: on a machine with several, each process has its own GPU."""
    if not launched() or device.type != "cuda":
        return device
    local, there = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    rule = "auto, cpu or cuda when there are several processes: each takes the GPU of its number"
    require(device.index is None, "train.device", rule, str(device))
    if local >= there:
        raise UserError(f"processes on a machine must be at most its GPUs, {there}, got at least {local + 1}")
    return torch.device("cuda", local)


@contextlib.contextmanager
def process_group(device: torch.device) -> Iterator[World]:
    """Join the processes that `torchrun` started, over NCCL between GPUs and Gloo between CPUs, until the end."""
    if not launched():
        yield World(device=device)
        return
    world = World(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend, mine = ("nccl", device) if device.type == "cuda" else ("gloo", None)
    # Under names of this group alone: `torchrun` may keep a store over a restart, with addresses of the dead.
    group = f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}, group {next(GROUPS)}"
    options: dict[str, Any] = {"timeout": _timeout(), "device_id": mine}
    with lost_process_errors(world):
        store, rank, size = next(torch.distributed.rendezvous("env://", timeout=_timeout()))  # type: ignore[attr-defined]
        store = torch.distributed.PrefixStore(group, store)  # type: ignore[attr-defined]
        torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=size, **options)
    try:
        world.all_gather(0)  # one that is refused at once would leave those waiting that have not reached it yet
        yield world
    finally:
        torch.distributed.destroy_process_group()


def _timeout() -> timedelta:
    value = os.environ.get(TIMEOUT, "600")
    require(value.isdigit() and int(value) > 0, TIMEOUT, "a whole number of seconds above 0", value)
    return timedelta(seconds=int(value))


@contextlib.contextmanager
def lost_process_errors(world: World) -> Iterator[None]:
    """One sentence for whatever a backend says when a process is gone."""
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        # Backends begin with a place in their source and may end with advice.
        said = re.sub(r"\[/.*?\] ", "", str(error)).partition("\n")[0].partition(". ")[0]
        how = f"which was killed, failed or was silent for {_timeout().seconds} s ({TIMEOUT})"
        told = f"process {world.rank} of {world.size} lost another one, {how}"
        raise UserError(f"{told}; the last checkpoint is intact, resume the run ({said})") from error


def require_shardable(config: Config, model: MaskedAutoencoder, size: int) -> None:
    """Refuse to divide weights where there is nobody to share them with, or where something needs them whole."""
    teacher = model.contrastive is not None and model.contrastive.has_teacher
    rules = {
        "off in one process, which has nobody to share with (torchrun --nproc-per-node starts several)": size == 1,
        "off with an EMA teacher, which moves whole weights": teacher,
        "off where optim.name is muon, whose steps need whole matrices": config.optim.name == "muon",
    }
    for rule, broken in rules.items():
        require(not (config.train.shard and broken), "train.shard", rule, config.train.shard)


def require_divisible(config: Config, batch_size: int, model: MaskedAutoencoder, size: int) -> None:
    """Refuse what parts of a batch, in several processes or one after another, compute otherwise than the whole."""
    if (parts := size * config.train.accumulate) == 1:
        return
    rule = f"a multiple of the number of processes, {size}"
    rule += f", times train.accumulate, {config.train.accumulate}" if config.train.accumulate > 1 else ""
    require(batch_size % parts == 0, "train.batch_size", rule, batch_size)
    several = "in several processes, each of which knows its part of the batch"
    if config.train.accumulate > 1:
        several = "where a batch is taken in parts (train.accumulate)"
        saves = "train.activation_checkpointing saves memory too"
        rule = f"1 with a contrastive loss, which is over the whole batch ({saves})"
        require(model.contrastive is None, "train.accumulate", rule, config.train.accumulate)
    counted = config.objective.scale == "mean" and isinstance(model, PrincipalMAE) and not model.on_pixels
    rule = f"constant or sum {several}, when every image has its own mask of components (masking.per image)"
    require(not counted or config.masking.per != "image", "objective.scale", rule, "mean")
    require(not model.space.learns, "space.name", f"a space that does not learn {several}", config.space.name)
    # The heads of a contrastive loss that gathers see the whole batch.
    part = model.encoder if model.contrastive and model.contrastive.gathers else model
    normed = any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in part.modules())
    rule = f"a network without batch normalization, such as a ViT or a ConvNeXt, {several}"
    require(not normed, "encoder.name", rule, config.encoder.name)


class AllGather(torch.autograd.Function):
    """All-gather with gradients, as NT-Xent over the whole batch needs: (2b, W) to (2B, W), first views first."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, world: World) -> Tensor:
        """Zeros where the others' rows are, and one sum: it works over every backend and in a CUDA graph."""
        ctx.world, pairs = world, features.unflatten(0, (2, -1))
        count = world.size * pairs.shape[1]
        whole = pairs.new_zeros(2, count, pairs.shape[2], dtype=torch.float32)
        whole[:, world.rank_slice(count)] = pairs.float()
        return world.all_reduce(whole).flatten(0, 1).to(features.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Every process computed the whole loss: its sum over processes, which their mean gradient then divides."""
        whole = ctx.world.all_reduce(gradient.float().unflatten(0, (2, -1)).contiguous())
        return whole[:, ctx.world.rank_slice(whole.shape[1])].flatten(0, 1).to(gradient.dtype), None


def shard(model: MaskedAutoencoder, optimizer: torch.optim.Optimizer, world: World) -> None:
    """Divide weights, gradients and moments among the devices (FSDP2), a block at a time from the host."""
    mesh, names = init_device_mesh(world.device.type, (world.size,)), {p: name for name, p in model.named_parameters()}
    for name, blocks in list(model.named_modules()):
        if name.endswith("blocks"):
            for block in blocks.children():
                fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    parts = dict(model.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [parts[names[p]] for p in group["params"]]
    for whole, name in names.items():
        part = parts[name]
        for key, value in optimizer.state.pop(whole, {}).items():
            moment = value.to(part.device)
            # Divided as its parameter is; the count of steps stays one number.
            if isinstance(part, DTensor) and moment.shape == part.shape:
                moment = distribute_tensor(moment, part.device_mesh, part.placements, src_data_rank=None)
            optimizer.state[part][key] = moment


def gathered(tensors: Mapping[str, Tensor], world: World) -> dict[str, Tensor]:
    """Tensors put together from the parts of all processes, which call this alike; on the first one's host alone."""
    found = {}
    for name, tensor in tensors.items():
        with lost_process_errors(world):
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if world.main:
            found[name] = whole.detach().cpu()
    return found


def put_together(model: MaskedAutoencoder, world: World) -> MaskedAutoencoder:
    """An undivided copy for the first process to look at, on its device; the others get the model as it is."""
    tensors = gathered(model.state_dict(), world)
    if not world.main:
        return model
    with torch.random.fork_rng(devices=[]):
        copy = build_method(model.config, model.encoder.shape, model.space).to(world.device)
    copy.load_state_dict({name: tensors[name] for name in copy.state_dict()})  # what callbacks added is not looked at
    copy.precision = model.precision
    fast.accelerate(copy, model.config.train.kernels)
    return copy
