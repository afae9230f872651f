"""The plans of docs/scale.md and their numbers, as its tables: the model of `scale`, and nothing by hand."""

from collections.abc import Iterator, Sequence

from benchmarks import scale
from benchmarks.scale import Job, Profile, Site
from benchmarks.work import Work
from pmae.config import Config, DecoderConfig, EncoderConfig, SpaceConfig
from pmae.flops import flops_per_image
from pmae.spaces.base import FitCost
from pmae.spaces.pca import cost_of_exact, cost_of_leading

SPEEDS = {("pmae", 32): 87_954, ("mae", 32): 110_554, ("pmae", 64): 25_612, ("mae", 64): 35_014}
"""Images a second measured on one H200 at batch 512, by method and side (results/speed.md)."""
PARTS = {32: (3.48e-3, 2.32e-3), 64: (11.62e-3, 8.05e-3)}
"""Seconds of GEMMs and of the rest in a profile of PMAE's step there, by side."""
PEAKS = {("pmae", 32): 3.1, ("mae", 32): 2.6, ("pmae", 64): 10.8, ("mae", 64): 7.9}
"""GiB at the peak of those runs."""
CORE = {("pmae", 32): 30.4, ("mae", 32): 39.4, ("pmae", 64): 7.2, ("mae", 64): 9.8}
"""Images a second measured on one core of a server CPU, float32, batch 32, plain engine."""
BATCH, H200_MEMORY, DOUBLE = 512, 141e9, 30e12
"""Batch of the measurements, bytes of an H200, and an assumption: operations a second of its float64 GEMMs."""
LARGE = (3, 224, 224)
COMPONENTS = 1024
SITE = Site()
Row = tuple[object, ...]


def h200() -> scale.Card:
    """The card, from the two profiles of PMAE."""
    return scale.calibrated(_profile(32), _profile(64))


def _profile(side: int) -> Profile:
    config, shape = _measured("pmae", side)
    gemms, rest = PARTS[side]
    work, numbers = BATCH * scale.weighed(config, shape), BATCH * scale.activations(config, shape)
    return Profile(work, numbers, gemms, rest)


def _measured(method: str, side: int) -> tuple[Config, scale.Shape]:
    work = Work(method, side, BATCH)
    return work.config, work.shape


def vit(width: int, depth: int, heads: int) -> Config:
    """A PMAE for images of 224x224 with leading components, in patches of 16."""
    return Config(
        space=SpaceConfig("pca", components=COMPONENTS),
        encoder=EncoderConfig(patch_size=16, width=width, depth=depth, heads=heads),
        decoder=DecoderConfig("released"),
    )


TINY, BASE, BIG = vit(192, 12, 12), vit(768, 12, 12), vit(1024, 24, 16)
IMAGENET, BILLION = 1_281_167, 10**9
JOBS = (
    Job("ImageNet-1k, ViT-T/16", TINY, LARGE, IMAGENET, 300, 8, 4096),
    Job("ImageNet-1k, ViT-B/16", BASE, LARGE, IMAGENET, 300, 8, 4096),
    Job("a billion, ViT-B/16", BASE, LARGE, BILLION, 10, 64, 16_384),
    Job("a billion, ViT-L/16", BIG, LARGE, BILLION, 10, 64, 16_384),
)


def checks() -> str:
    """The model against what was measured, on the card and on a core."""
    heads = ("", "GFLOP an image", "H200, images/s: measured / model", "", "GiB: measured / model")
    rows = [_check(method, side, h200()) for method, side in SPEEDS]
    return _table((*heads, "one core, images/s: measured / model", ""), rows)


def _check(method: str, side: int, card: scale.Card) -> Row:
    (config, shape), speed, core = _measured(method, side), SPEEDS[method, side], CORE[method, side]
    said = BATCH / scale.compute_seconds(config, shape, BATCH, card)
    # A core has one number, operations a second, from the first row.
    of_core = CORE["pmae", 32] * flops_per_image(*_measured("pmae", 32)) / flops_per_image(config, shape)
    peak = scale.training_bytes(config, shape, BATCH) / 2**30
    return (
        f"{method.upper()} {side}x{side}",
        f"{flops_per_image(config, shape) / 1e9:.2f}",
        f"{speed:,} / {said:,.0f}",
        f"{said / speed - 1:+.0%}",
        f"{PEAKS[method, side]} / {peak:.1f}",
        f"{core:.1f} / {of_core:.1f}",
        f"{of_core / core - 1:+.0%}",
    )


def plans() -> str:
    """Every job, from its work to its price."""
    card = h200()
    lines: dict[str, list[str]] = {}
    for job in JOBS:
        for name, value in _numbers(job, card):
            lines.setdefault(name, []).append(value)
    return _table(("", *(job.name for job in JOBS)), [(name, *values) for name, values in lines.items()])


def _numbers(job: Job, card: scale.Card) -> Iterator[tuple[str, str]]:
    step, message = scale.step_seconds(job, card, SITE), scale.message_seconds(job, SITE)
    speed, time = scale.images_a_second(job, card, SITE), scale.hours(job, card, SITE)
    yield "images, epochs", f"{job.images:,}, {job.epochs}"
    yield "cards, batch", f"{job.cards}, {job.batch:,}"
    yield "parameters, millions", f"{scale.parameters(job.config, job.shape) / 1e6:.0f}"
    yield "GFLOP an image", f"{flops_per_image(job.config, job.shape) / 1e9:.0f}"
    yield "GB of a card's memory", f"{scale.bytes_a_card(job) / 1e9:.0f}"
    yield "ms a step", f"{1000 * step:.0f}"
    yield "MB a card sends a step", f"{scale.message_bytes(job) / 1e6:.0f}"
    yield "of the step, for that", f"{message / step:.0%}"
    yield "images/s", f"{speed:,.0f}"
    yield "hours", f"{time:.1f}"
    yield "dollars", f"{time * job.cards * SITE.dollars_an_hour:,.0f}"
    yield "GB/s from disks", f"{speed * SITE.image_bytes / 1e9:.1f}"
    yield "TB on disks", f"{job.images * SITE.image_bytes / 1e12:.1f}"
    there = job.cards * SITE.cores_a_card
    yield "cores to decode / there", f"{scale.cores(job, card, SITE):,.0f} / {there:,}"
    yield "hours if decoding limits", f"{max(time, job.epochs * job.images / there / SITE.decoded_a_core / 3600):.1f}"


def fits() -> str:
    """The fits of a space at 224x224 to ImageNet-1k."""
    pixels, patch = 3 * 224 * 224, 3 * 16 * 16
    leading = cost_of_leading(IMAGENET, pixels, COMPONENTS)
    # the numbers of a basis, multiplications of an image by it in a step (one more where a rest is kept), and passes.
    rows = [
        _fit("all components, exact", cost_of_exact(IMAGENET, pixels), pixels**2, 4 * pixels**2, 1),
        _fit(f"{COMPONENTS:,} leading and the rest", leading, COMPONENTS * pixels, 5 * COMPONENTS * pixels, 6),
        _fit("patches of 16x16", cost_of_exact(IMAGENET * pixels // patch, patch), patch**2, 4 * patch * pixels, 2),
        _fit("DCT", FitCost(0, 0), 2 * 224**2, 4 * (224 + 224) * pixels, 2),
    ]
    heads = ("", "GB for the fit", "operations", "minutes on one card", "GB of the basis", "GFLOP an image")
    return _table((*heads, "passes over the images"), rows)


def _fit(name: str, cost: FitCost, basis: int, gemms: int, passes: int) -> Row:
    fit = f"{cost.bytes / 1e9:.2f}", f"{cost.operations:.1e}", f"{cost.operations / DOUBLE / 60:.1f}"
    return (name, *fit, f"{4 * basis / 1e9:.2f}", f"{2 * gemms / 1e9:.1f}", passes)


def assumptions() -> str:
    """What the plans take for granted, and the card as it was calibrated."""
    card = h200()
    rows = [
        ("a step, whatever its size", f"{1000 * card.fixed:.2f} ms", "calibrated"),
        ("GEMMs", f"{card.gemms / 1e12:.0f} TFLOP/s", "calibrated"),
        ("activations, tokens x width x blocks", f"{card.numbers / 1e9:.1f} billion/s", "calibrated"),
        ("memory for an activation", f"{scale.KEPT} bytes", "calibrated"),
        ("float64 GEMMs, for the fit", f"{DOUBLE / 1e12:.0f} TFLOP/s", "assumed"),
        ("memory of a card", f"{H200_MEMORY / 1e9:.0f} GB", "the maker's figure"),
        ("cards in a machine", SITE.cards_a_machine, "assumed"),
        ("a card's link inside the machine", f"{SITE.link_inside / 1e9:.0f} GB/s each way", "the maker's figure"),
        ("and between machines", f"{SITE.link_between / 1e9:.0f} GB/s each way", "assumed: 400 Gbit/s a card"),
        ("an image on disk", f"{SITE.image_bytes / 1e3:.0f} kB", "assumed: a JPEG of ImageNet-1k"),
        (
            "images a core decodes",
            f"{SITE.decoded_a_core:.0f} a second",
            "measured: a JPEG of 500x375 (benchmarks.decoding)",
        ),
        ("cores beside a card", SITE.cores_a_card, "assumed"),
        ("an hour of a card", f"{SITE.dollars_an_hour:.0f} dollars", "assumed"),
    ]
    return _table(("", "", ""), rows)


def _table(heads: Sequence[str], rows: Sequence[Row]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


TABLES = (checks, assumptions, plans, fits)
