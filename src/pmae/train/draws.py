"""What steps consume: images in an order, crops, masks and noise, all a function of seed, epoch and position."""

import random
from collections.abc import Iterator

import torch
from torch import Tensor

from pmae import masking
from pmae.config import Config
from pmae.data.augment import Augmentation, draw_crops, draw_noise
from pmae.data.batches import Batches
from pmae.data.crops import Crops
from pmae.method import MaskedAutoencoder
from pmae.train.distributed import World
from pmae.train.schedule import step_seed
from pmae.train.step import Inputs


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
