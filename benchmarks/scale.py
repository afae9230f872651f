"""What training at scale costs, from the operations and numbers of one image: seconds, messages, disks, bytes, money.

A step on a card takes `fixed + images x (operations / gemms + activations / numbers)` seconds: GEMMs at the rate
of large ones, everything between them at the rate at which tokens pass through memory. All three are measured.
"""

import functools
import math
from dataclasses import dataclass

import torch

from pmae.config import Config
from pmae.flops import flops_per_image, projection_flops
from pmae.masking import nominal_ratio, visible_patches
from pmae.models import Decoder, Encoder, build_encoder

Shape = tuple[int, int, int]
KEPT = 51
"""Bytes that training keeps for an activation, from the peaks of memory at 32x32 and 64x64 (PMAE, batch 512)."""
STATE = 16
"""Bytes of a parameter while it trains: weight, gradient and two moments, all float32."""


@dataclass(frozen=True)
class Card:
    """A GPU: seconds of a step whatever its size, operations and activations a second."""

    fixed: float
    gemms: float
    numbers: float


@dataclass(frozen=True)
class Profile:
    """Where a measured step went, in seconds: GEMMs, and the rest."""

    operations: float
    activations: float
    gemms: float
    rest: float


@dataclass(frozen=True)
class Site:
    """What a plan assumes of machines, disks and prices: bytes a second of one card's link in one direction."""

    cards_a_machine: int = 8
    link_inside: float = 450e9
    link_between: float = 50e9
    cores_a_card: int = 24
    decoded_a_core: float = 510.0
    image_bytes: float = 110e3
    dollars_an_hour: float = 3.0


@dataclass(frozen=True)
class Job:
    """A training to plan: `batch` images a step on all cards together."""

    name: str
    config: Config
    shape: Shape
    images: int
    epochs: int
    cards: int
    batch: int


def calibrated(small: Profile, large: Profile) -> Card:
    """The card that two profiles describe: both parts of a step grow in a straight line."""
    gemms = (large.operations - small.operations) / (large.gemms - small.gemms)
    numbers = (large.activations - small.activations) / (large.rest - small.rest)
    fixed = small.gemms - small.operations / gemms + small.rest - small.activations / numbers
    return Card(fixed, gemms, numbers)


def activations(config: Config, shape: Shape) -> int:
    """Tokens times width, summed over the blocks of both networks, of one image."""
    encoder, decoder = _networks(config, shape)
    patches = decoder.grid[0] * decoder.grid[1]
    is_mae = config.space.name == "pixels"
    seen = visible_patches(patches, nominal_ratio(config.masking)) if is_mae else patches
    depth = len(list(encoder.net.get_submodule("blocks").children()))
    return depth * (seen + 1) * encoder.width + len(decoder.blocks) * (patches + 1) * decoder.embed.out_features


def parameters(config: Config, shape: Shape) -> int:
    """Numbers that are trained, of both networks."""
    return sum(p.numel() for net in _networks(config, shape) for p in net.parameters() if p.requires_grad)


def compute_seconds(config: Config, shape: Shape, images: float, card: Card) -> float:
    """A step of so many images on one card."""
    seconds = weighed(config, shape) / card.gemms + activations(config, shape) / card.numbers
    return card.fixed + images * seconds


def weighed(config: Config, shape: Shape) -> float:
    """Operations of one image as so many in bfloat16: projections are done in TF32, at half the rate."""
    views = 2 if config.objective.contrastive_weight else 1
    return flops_per_image(config, shape) + views * projection_flops(config, shape)


def message_bytes(job: Job) -> float:
    """What each card sends in a step: a ring passes every gradient, float32, nearly twice."""
    return 2 * (job.cards - 1) / job.cards * 4 * parameters(job.config, job.shape)


def message_seconds(job: Job, site: Site) -> float:
    """The time of that, which comes after the backward pass; the slowest link counts."""
    link = site.link_inside if job.cards <= site.cards_a_machine else site.link_between
    return message_bytes(job) / link


def step_seconds(job: Job, card: Card, site: Site) -> float:
    """A step of the whole job."""
    return compute_seconds(job.config, job.shape, job.batch / job.cards, card) + message_seconds(job, site)


def images_a_second(job: Job, card: Card, site: Site) -> float:
    """Of all cards, if images come as fast as they are asked for."""
    return job.batch / step_seconds(job, card, site)


def hours(job: Job, card: Card, site: Site) -> float:
    """From the first step to the last."""
    return job.epochs * math.ceil(job.images / job.batch) * step_seconds(job, card, site) / 3600


def cores(job: Job, card: Card, site: Site) -> float:
    """CPU cores that decode as fast as the cards train."""
    return images_a_second(job, card, site) / site.decoded_a_core


def training_bytes(config: Config, shape: Shape, images: float) -> float:
    """Memory of a step: the state of every parameter, and what the backward pass reads."""
    return STATE * parameters(config, shape) + KEPT * activations(config, shape) * images


def bytes_a_card(job: Job) -> float:
    """The same, and the leading components."""
    basis = 4 * math.prod(job.shape) * (job.config.space.components or 0)
    return training_bytes(job.config, job.shape, job.batch / job.cards) + basis


@functools.lru_cache(maxsize=4)
def _networks(config: Config, shape: Shape) -> tuple[Encoder, Decoder]:
    with torch.device("meta"):
        encoder = build_encoder(config.encoder, shape)
        return encoder, Decoder(config.decoder, encoder, config.encoder.patch_size or 0)
