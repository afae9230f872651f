"""The peers' masked autoencoders, of the same size, each as its users write it: a torchvision data set and a loop."""

import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, RandomSampler
from torchvision import transforms

from benchmarks.machine import Steps
from benchmarks.work import DEVIATION, MEAN, RATE, Work, random_space
from pmae import masking, objectives
from pmae.models import unpatchify
from pmae.train.environment import pick_device

PEERS = {
    "transformers": "benchmarks.peer_transformers",
    "transformers-compiled": "benchmarks.peer_transformers",
    "lightly": "benchmarks.peer_lightly",
    "stable-pretraining": "benchmarks.peer_stable_pretraining",
}
"""The module that wraps each peer as `Network`: the loss of an MAE, and the prediction of every patch."""
COMPILED = "-compiled"
"""Ending of a peer that gets what ours has: `torch.compile`, and images that lie on the device; it does not crop."""
ENDLESS = 1_000_000
"""Batches that nobody will ask for."""


def is_installed(peer: str) -> bool:
    """Whether the library is there; it is not imported to find out."""
    return find_spec(peer.removesuffix(COMPILED).replace("-", "_")) is not None


def network(peer: str) -> Callable[[Work], nn.Module]:
    """The class that wraps a peer; this imports its library."""
    built: Callable[[Work], nn.Module] = import_module(PEERS[peer]).Network
    return built


def build(work: Work, peer: str, workers: int) -> Steps:
    """A function that takes so many steps of a standard loop: load, forward in a given precision, backward, AdamW."""
    device = pick_device(work.device)
    model = network(peer)(work)
    model = (model if work.method == "mae" else HidingComponents(model, work, device)).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.05, betas=(0.9, 0.95))
    if peer.endswith(COMPILED):
        model, batches = torch.compile(model), _on_device(work, device)
    else:
        batches = _endless(work, workers, pin=device.type == "cuda")

    def steps(count: int) -> None:
        for _ in range(count):
            x = next(batches).to(device, non_blocking=True)
            with torch.autocast(device.type, torch.bfloat16, enabled=work.precision == "bfloat16"):
                loss = model(x)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()

    return steps


class HidingComponents(nn.Module):
    """What makes a peer's autoencoder a PMAE: no patch is dropped, and the loss is on hidden components."""

    def __init__(self, model: nn.Module, work: Work, device: torch.device) -> None:
        super().__init__()
        self.model, self.work, self.ratio = model, work, masking.nominal_ratio(work.config.masking)
        self.space = random_space(work.config, work.shape, device)

    def forward(self, x: Tensor) -> Tensor:
        """The mean over images of the squared error on their hidden components."""
        space, noise = self.space, torch.rand(len(x), self.space.mask_group_count, device=x.device)
        with torch.autocast(x.device.type, enabled=False):
            z, hidden = space.project(x), masking.hide_components(noise, space.variance_share, self.ratio)
            visible = space.reconstruct(z.masked_fill(hidden, 0.0))
        patches = self.model.predict(visible)  # type: ignore[operator]
        with torch.autocast(x.device.type, enabled=False):
            y = unpatchify(patches.float(), self.work.patch, self.work.shape)
            return objectives.on_components(space.project(y), z, hidden).error.mean()


class Pictures(Dataset[Tensor]):
    """Images in memory as torchvision's own data sets hold them: one at a time through PIL and its transforms."""

    def __init__(self, images: np.ndarray) -> None:
        self.images = np.ascontiguousarray(images.transpose(0, 2, 3, 1))
        mean, deviation = [MEAN / 255] * 3, [DEVIATION / 255] * 3
        bicubic = transforms.InterpolationMode.BICUBIC
        crop = transforms.RandomResizedCrop(images.shape[-1], scale=(0.2, 1.0), interpolation=bicubic)
        flip, normalize = transforms.RandomHorizontalFlip(), transforms.Normalize(mean, deviation)
        self.transform = transforms.Compose([crop, flip, transforms.ToTensor(), normalize])

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Tensor:
        image: Tensor = self.transform(Image.fromarray(self.images[index]))
        return image


def workers_that_fit(works: Sequence[Work], peers: int, wanted: int) -> int:
    """Loader processes for each of so many peers whose batches, two a worker, the shared memory holds."""
    shared = Path("/dev/shm")
    if not wanted or not peers or not shared.exists():
        return wanted
    floats = sum(work.batch * math.prod(work.shape) for work in works)
    return min(wanted, shutil.disk_usage(shared).free // (2 * 4 * floats * peers))


def _on_device(work: Work, device: torch.device) -> Iterator[Tensor]:
    """Batch after batch of images that lie on the device, standardized."""
    images = torch.from_numpy(work.noise()).to(device)
    while True:
        chosen = torch.randint(len(images), (work.batch,), device=device)
        yield (images[chosen] - MEAN) / DEVIATION


def _endless(work: Work, workers: int, pin: bool) -> Iterator[Tensor]:
    """Batch after batch from a shuffling loader.

    Its epoch does not end: a real one has a hundred batches, and eight that run out would make it start anew every
    eight steps, each time with nothing loaded.
    """
    pictures = Pictures(work.noise())
    loader = DataLoader(
        pictures,
        work.batch,
        sampler=RandomSampler(pictures, replacement=True, num_samples=ENDLESS * work.batch),
        num_workers=workers,
        pin_memory=pin,
        # As in a program of its own; here the default is to start Python anew, which takes seconds a worker.
        multiprocessing_context="fork" if workers else None,
    )
    yield from loader
