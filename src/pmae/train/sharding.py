"""A model whose weights, gradients and moments are divided among processes (FSDP2), where it outgrows a card."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from pmae import fast
from pmae.config import OptimConfig
from pmae.method import MaskedAutoencoder, build_method
from pmae.train.distributed import World, lost_process_errors
from pmae.train.step import Inputs, Plain, build_optimizer


class Sharded(Plain):
    """The plain step; weights come together block by block and gradients leave as means, both by torch's own hooks."""

    def __call__(self, inputs: Inputs) -> None:
        with lost_process_errors(self.world):
            super().__call__(inputs)

    def _average(self) -> None:
        """Already done."""


def shard(
    model: MaskedAutoencoder, optimizer: torch.optim.Optimizer, config: OptimConfig, world: World
) -> torch.optim.AdamW:
    """Divide a model, the same in all processes, among their devices; returns the optimizer of the parts.

    The model may wait on the host: a block at a time goes to the device, and what is not this process's is dropped.
    """
    moments = {name: optimizer.state[p] for name, p in model.named_parameters() if p in optimizer.state}
    mesh = init_device_mesh(world.device.type, (world.size,))
    for name, blocks in list(model.named_modules()):
        if name.endswith("blocks"):
            for block in blocks.children():
                fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    divided = build_optimizer(model, config, on_graph=False)
    for name, parameter in model.named_parameters():
        if name in moments:
            divided.state[parameter] = {key: _part(value, parameter) for key, value in moments[name].items()}
    return divided


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
    copy.load_state_dict(tensors)
    copy.precision = model.precision
    fast.accelerate(copy, model.config.train.kernels)
    return copy


def _part(value: Tensor, parameter: nn.Parameter) -> Tensor:
    """A moment divided as its parameter is; the count of steps stays one number."""
    value = value.to(parameter.device)
    if not isinstance(parameter, DTensor) or value.shape != parameter.shape:
        return value
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
