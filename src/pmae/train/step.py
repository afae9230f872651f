"""What steps consume, a function of seed, epoch and position; and one step, in plain torch.

It is the reference of the faster ones in `pmae.train.engines`. Everything random comes in as arguments and everything
measured stays on the device, so that no step waits for it.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from pmae import masking
from pmae.config import Config, OptimConfig
from pmae.data.augment import Augmentation, Standardize, augmented, boxes_of, crop, draw_crops, draw_noise
from pmae.data.batches import Batches
from pmae.data.crops import Crops
from pmae.errors import require
from pmae.masking import Draw
from pmae.method import MaskedAutoencoder
from pmae.models.encoder import layer_depths
from pmae.muon import Muon, is_block_matrix
from pmae.system import lacks_float64
from pmae.train.distributed import ONE_PROCESS, World, lost_process_errors
from pmae.train.schedule import step_seed


class Inputs(NamedTuple):
    """All that a step consumes: raw images, noise for their crops and masks, and the learning rate."""

    images: Tensor
    crops: Tensor | None
    """Noise for crops of every view; nothing where images are such crops, all first views before all second ones."""
    draw: Draw
    lr: float
    noise: tuple[Tensor, ...] = ()
    """For registered augmentations."""
    views: int = 1
    seed: int = 0
    """For what networks draw themselves, such as stochastic depth."""


class Draws:
    """The batches of a run and their randomness, of which every process takes its part, however many there are."""

    def __init__(
        self,
        config: Config,
        model: MaskedAutoencoder,
        batches: Batches,
        crops: Crops | None,
        augmentations: list[Augmentation],
        world: World,
    ) -> None:
        self.batch_size, self.views = config.train.batch_size or 1, 2 if model.contrastive else 1
        self.steps = len(batches) // self.batch_size
        self._config, self._model, self._world, self._device = config, model, world, batches.device
        self._batches, self._crops, self._augmentations = batches, crops, augmentations

    def order(self, epoch: int) -> Tensor:
        """Positions of the images (steps, batch) of an epoch."""
        generator = torch.Generator(self._device).manual_seed(step_seed(self._config.train.seed, epoch, -1))
        return self._batches.order(generator)[: self.steps * self.batch_size].view(self.steps, self.batch_size)

    def images(self, epoch: int, first: int) -> Iterator[Tensor]:
        """The images of every batch of an epoch from `first` on, or the crops of them that are cut from files."""
        return self._images(epoch, first, self.order(epoch)[first:, self._world.rank_slice(self.batch_size)])

    def whole(self, step: int) -> tuple[Tensor, Inputs]:
        """Positions of the images of a step, and its inputs, of all processes together."""
        epoch, position = divmod(step, self.steps)
        index = self.order(epoch)[position]
        images = next(self._images(epoch, position, index[None], whole=True))
        return index, self.inputs(epoch, position, images, whole=True)

    def inputs(self, epoch: int, position: int, images: Tensor, lr: float = 0.0, whole: bool = False) -> Inputs:
        """All that a step consumes, given its images."""
        seed = step_seed(self._config.train.seed, epoch, position)
        generator = torch.Generator(self._device).manual_seed(seed)
        count = self.batch_size * self.views
        crops = self._mine(draw_crops(count, generator, self._device), whole)
        ratio = masking.draw_ratio(self._config.masking, random.Random(seed))
        draw = self._model.draw(count, ratio, generator)
        draw = draw if len(draw.noise) == 1 else draw._replace(noise=self._mine(draw.noise, whole))
        noise = draw_noise(self._augmentations, count, generator, self._device)
        mine = tuple(self._mine(each, whole) for each in noise)
        # Another seed than that of crops and masks, whose numbers it would repeat, and each process its own.
        own = seed ^ (self._world.rank + 1)
        return Inputs(images, None if self._crops else crops, draw, lr, mine, self.views, own)

    def _images(self, epoch: int, first: int, order: Tensor, whole: bool = False) -> Iterator[Tensor]:
        if self._crops is None:
            return self._batches.each(order)
        # Drawn on the host, where it is then known without waiting which pixels a crop needs.
        seeds = (step_seed(self._config.train.seed, epoch, -2 - first - row) for row in range(len(order)))
        generators, host = (torch.Generator().manual_seed(seed) for seed in seeds), torch.device("cpu")
        noise = (self._mine(draw_crops(self.batch_size * self.views, g, host), whole) for g in generators)
        return self._crops.each(zip(order.cpu(), noise, strict=True))

    def _mine(self, drawn: Tensor, whole: bool) -> Tensor:
        """Of what was drawn for every view of a batch, the part of this process."""
        rows = slice(None) if whole else self._world.rank_slice(self.batch_size)
        return drawn.unflatten(0, (self.views, -1))[:, rows].flatten(0, 1)


def parts_of(inputs: Inputs, count: int) -> list[Inputs]:
    """A batch in so many parts of the same size: images, and what was drawn for each of their views."""
    if count == 1:
        return [inputs]

    def cut(rows: Tensor, views: int = inputs.views) -> list[Tensor]:
        return [part.flatten(0, 1) for part in rows.unflatten(0, (views, -1)).chunk(count, 1)]

    noise = inputs.draw.noise
    masks = [noise] * count if len(noise) == 1 else cut(noise)
    extras = [cut(each) for each in inputs.noise]
    images = cut(inputs.images, inputs.views if inputs.crops is None else 1)
    crops = [None] * count if inputs.crops is None else cut(inputs.crops)
    return [
        inputs._replace(images=i, crops=c, draw=inputs.draw._replace(noise=m), noise=tuple(e[n] for e in extras))
        for n, (i, c, m) in enumerate(zip(images, crops, masks, strict=True))
    ]


class Tally:
    """Sums over steps, on the device: loss, hidden error, energy and share, and the first non-finite step."""

    def __init__(self, device: torch.device) -> None:
        # In one piece, so that reading waits for the device once.
        dtype = torch.float32 if lacks_float64(device) else torch.float64
        self._all = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, -1.0], device=device, dtype=dtype)
        self.sums, self.steps, self.bad_step = self._all[:4], self._all[4], self._all[5]

    def add(self, values: Tensor) -> None:
        """Count a step's (loss, error, energy, masked share)."""
        bad = ~torch.isfinite(values).all() & (self.bad_step < 0)
        self.bad_step.copy_(torch.where(bad, self.steps, self.bad_step))
        self.sums.add_(values)
        self.steps.add_(1)

    def read(self, world: World = ONE_PROCESS) -> tuple[dict[str, float], int]:
        """Means since the last reading, and the first bad step of any process since then, from 0; -1 if none. Waits."""
        world.all_reduce(self.sums).div_(world.size)
        loss, error, energy, share, steps, bad = self._all.tolist()
        bad = min((step for step in world.all_gather(int(bad)) if step >= 0), default=-1)
        self._all.zero_(), self.bad_step.fill_(-1)
        r2 = 1 - error / energy if energy > 0 else float("nan")
        return {"loss": loss / steps, "r2": r2, "masked_share": share / steps}, bad


@dataclass(eq=False)
class Plain:
    """Eager forward, backward, clip and update; with several processes, of the mean of their gradients."""

    model: MaskedAutoencoder
    standardize: Standardize
    config: Config
    optimizer: torch.optim.Optimizer
    world: World = ONE_PROCESS
    augmentations: Sequence[Augmentation] = ()

    def __post_init__(self) -> None:
        self.tally = Tally(self.standardize.mean.device)
        self._leaves = [p for p in self.model.parameters() if p.requires_grad]
        several = self.world.size > 1 and not self.config.train.shard  # whose hooks leave means of gradients already
        self._network: nn.Module = self._averaging() if several else self.model

    def _averaging(self) -> nn.Module:
        """The model, whose gradients DDP makes means over processes, in buckets while others are still computed."""
        train, ddp = self.config.train, DistributedDataParallel
        # That PMAE leaves the mask token unused it finds out at the first step or, where not every part of a batch is
        # followed by messages, at each. Buffers were fitted together or follow from the seed: they are alike in all.
        once = train.accumulate == 1
        ddp._set_params_and_buffers_to_ignore_for_model(self.model, [name for name, _ in self.model.named_buffers()])
        network = ddp(self.model, static_graph=once, find_unused_parameters=not once)
        if train.bf16_gradients:
            network.register_comm_hook(None, bf16_compress_hook)
        return network

    def __call__(self, inputs: Inputs) -> None:
        torch.manual_seed(inputs.seed)
        for group in self.optimizer.param_groups:
            group["lr"] = inputs.lr * group["scale"]
        self.optimizer.zero_grad(set_to_none=True)
        # Torch's own hooks talk to the other processes.
        with lost_process_errors(self.world) if self.world.size > 1 else nullcontext():
            parts = parts_of(inputs, self.config.train.accumulate)
            values = [self._backward(part, len(parts), number) for number, part in enumerate(parts, 1)]
            self._update(torch.stack(values).mean(0) if len(parts) > 1 else values[0], self.optimizer.step)

    def _backward(self, part: Inputs, parts: int, number: int) -> Tensor:
        """Add the gradients of one part of a batch; processes exchange them after the last."""
        waits = isinstance(self._network, DistributedDataParallel) and number < parts
        with self._network.no_sync() if waits else nullcontext():  # type: ignore[operator]
            loss, values = self.measure(part.images, part.crops, part.draw, *part.noise)
            (loss / parts if parts > 1 else loss).backward()
        return values

    def measure(self, images: Tensor, crops: Tensor | None, draw: Draw, *noise: Tensor) -> tuple[Tensor, Tensor]:
        """The loss, and (loss, error, energy, masked share) for the tally."""
        augment, (height, width) = self.config.augment, images.shape[-2:]
        if crops is not None:
            # Two crops of an image where two views of it are wanted.
            images = images.repeat(len(crops) // len(images), 1, 1, 1)
            images = crop(images, boxes_of(crops, height, width, augment), augment.interpolation)
        outcome = self._network(augmented(self.standardize(images), self.augmentations, noise), draw)
        values = torch.stack([outcome.loss, outcome.error.mean(), outcome.energy.mean(), outcome.masked_share.mean()])
        return outcome.loss, values.detach()

    def _update(self, values: Tensor, take: Callable[[], object]) -> None:
        if self.config.optim.clip_norm is not None:
            nn.utils.clip_grad_norm_(self._leaves, self.config.optim.clip_norm, foreach=True)
        take()
        self.tally.add(values)


def build_optimizer(model: nn.Module, config: OptimConfig, on_graph: bool) -> torch.optim.AdamW:
    """AdamW or Muon, with decay on matrices, or on all; under a graph rate and step count are tensors on the device.

    There is a group for each share of the rate, of which a frozen block has none: with gradients that nobody uses it
    costs time, but captured, fused and divided steps need not know.
    """
    scales, muon = rate_scales(model, config), config.name == "muon"
    groups: dict[tuple[float, bool, bool], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_matrix = parameter.ndim >= 2 and not name.endswith("token")
            orthogonal = muon and is_block_matrix(name, parameter)
            scale, decay = scales[name], config.weight_decay if is_matrix or config.decay_all else 0.0
            made = {"params": [], "weight_decay": decay, "scale": scale, "orthogonal": orthogonal}
            groups.setdefault((-scale, not is_matrix, orthogonal), made)["params"].append(parameter)
    rule = "adamw for networks without matrices in blocks"
    require(not muon or any(group["orthogonal"] for group in groups.values()), "optim.name", rule, config.name)
    for group in groups.values():
        group["lr"] = torch.zeros((), device=group["params"][0].device) if on_graph else 0.0
    ordered = [groups[key] for key in sorted(groups)]
    return (Muon if muon else torch.optim.AdamW)(ordered, betas=config.betas, fused=True, capturable=on_graph)


def rate_scales(model: nn.Module, config: OptimConfig) -> dict[str, float]:
    """The share of the rate at which each parameter learns: all of it but in the encoder, less in its early blocks."""
    names = [name for name, _ in model.named_parameters()]
    own = [name for name in names if name.startswith("encoder.")]
    is_vit = getattr(getattr(model, "encoder", None), "is_vit", False)
    rule = "0 for an encoder that is no ViT and has no row of blocks"
    require(is_vit or not config.frozen_blocks, "optim.frozen_blocks", rule, config.frozen_blocks)
    depths = layer_depths(own) if is_vit else dict.fromkeys(own, 0)
    deepest, rate, decay = max(depths.values(), default=0), config.encoder_rate or 1.0, config.layer_decay or 1.0
    blocks = f"at most the encoder's blocks ({deepest - 1})"
    require(config.frozen_blocks < max(1, deepest), "optim.frozen_blocks", blocks, config.frozen_blocks)
    scales = {name: rate * decay ** (deepest - depth) for name, depth in depths.items()}
    frozen = {name: 0.0 for name, depth in depths.items() if config.frozen_blocks and depth <= config.frozen_blocks}
    return dict.fromkeys(names, 1.0) | scales | frozen
