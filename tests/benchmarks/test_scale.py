"""The model of costs against counted tensors and measured speeds, and the page of plans against the model."""

import re
from pathlib import Path

import pytest
import torch
from benchmarks.scale import Card, Job, Profile, Site

from benchmarks import plans, scale
from pmae.config import Config, DecoderConfig, EncoderConfig, SpaceConfig
from pmae.derive import resolve
from pmae.method import build_method
from pmae.spaces import build_space

ROOT = Path(__file__).parents[2]
SMALL = {
    "encoder": EncoderConfig(patch_size=4, width=24, depth=2, heads=2),
    "decoder": DecoderConfig("small", width=32, depth=3, heads=4),
}
SHAPE = (1, 8, 24)


@pytest.mark.parametrize("space", ["pca", "pixels"])
def test_activations_and_parameters_are_those_of_the_networks(space: str) -> None:
    config = resolve(Config(**SMALL, space=SpaceConfig(space)), 64, SHAPE)[0]
    model = build_method(config, SHAPE)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert scale.parameters(config, SHAPE) == sum(p.numel() for p in trained)
    passed = []
    for block in (*model.encoder.net.blocks, *model.decoder.blocks):
        block.attn.register_forward_hook(lambda _module, _inputs, tokens: passed.append(tokens[0].numel()))
    model(torch.zeros(2, *SHAPE), model.draw(2, 0.75 if space == "pixels" else 0.2, torch.Generator()))
    assert scale.activations(config, SHAPE) == sum(passed)


def test_two_profiles_settle_a_card() -> None:
    card = Card(0.002, 4e14, 2e10)
    profiles = [Profile(w, a, 0.0015 + w / 4e14, 0.0005 + a / 2e10) for w, a in ((1e12, 5e7), (7e12, 2e8))]
    found = scale.calibrated(*profiles)
    assert (found.fixed, found.gemms, found.numbers) == pytest.approx((card.fixed, card.gemms, card.numbers))


def test_the_card_predicts_the_speeds_that_were_measured() -> None:
    for (method, side), speed in plans.SPEEDS.items():
        config, shape = plans._measured(method, side)
        said = plans.BATCH / scale.compute_seconds(config, shape, plans.BATCH, plans.h200())
        assert said == pytest.approx(speed, rel=0.1)
        assert scale.training_bytes(config, shape, plans.BATCH) / 2**30 == pytest.approx(
            plans.PEAKS[method, side], rel=0.12
        )


def test_the_measured_numbers_are_those_of_the_page_on_speed() -> None:
    page = (ROOT / "results" / "speed.md").read_text()
    assert all(f"**{speed:,}**" in page for speed in plans.SPEEDS.values())
    line = next(line for line in page.splitlines() if line.startswith("| GEMMs (library)"))
    whole = next(line for line in page.splitlines() if line.startswith("| all |"))
    gemms, totals = (re.findall(r"([\d.]+) \(", text) for text in (line, whole))
    for column, side in ((0, 32), (2, 64)):
        assert plans.PARTS[side][0] == pytest.approx(float(gemms[column]) / 1000)
        assert sum(plans.PARTS[side]) == pytest.approx(float(totals[column]) / 1000)
    peaks = " ".join(f"{gib}" for gib in plans.PEAKS.values())
    assert peaks in re.sub(r"[,\sand]+", " ", page)


def test_a_ring_sends_every_gradient_nearly_twice() -> None:
    """Counted by playing it: n - 1 turns of adding up and n - 1 of handing round, each of a part of the gradients."""
    config = resolve(Config(**SMALL), 64, SHAPE)[0]
    job, numbers = Job("", config, SHAPE, 64, 1, 4, 32), scale.parameters(config, SHAPE)
    sent = sum(numbers / job.cards for _ in range(2 * (job.cards - 1)))
    assert scale.message_bytes(job) == pytest.approx(4 * sent)
    inside, between = (
        Site(link_inside=1e9, link_between=1e8),
        Site(cards_a_machine=2, link_inside=1e9, link_between=1e8),
    )
    assert scale.message_seconds(job, between) == pytest.approx(10 * scale.message_seconds(job, inside))
    slow = scale.step_seconds(job, Card(0, 1e12, 1e12), between)
    assert scale.images_a_second(job, Card(0, 1e12, 1e12), between) == pytest.approx(32 / slow)
    assert scale.hours(job, Card(0, 1e12, 1e12), between) == pytest.approx(2 * slow / 3600)


def test_the_fits_of_the_page_are_what_the_spaces_say() -> None:
    with torch.device("meta"):
        leading = build_space(SpaceConfig("pca", components=plans.COMPONENTS), plans.LARGE)
        patches = build_space(SpaceConfig("patch_pca"), plans.LARGE)
    table = plans.fits()
    for space in (leading, patches):
        cost = space.fit_cost(plans.IMAGENET)
        assert f"| {cost.bytes / 1e9:.2f} | {cost.operations:.1e} |" in table


def test_the_page_is_what_the_model_says() -> None:
    page = (ROOT / "docs" / "scale.md").read_text()
    for table in plans.TABLES:
        assert table() in page, f"{table.__name__} of docs/scale.md is not what benchmarks.plans says"
    assert f"Peak memory is {scale.STATE} bytes for a parameter and {scale.KEPT} for an activation" in page
    assert f"{plans.H200_MEMORY / scale.STATE / 1e9:.1f} billion parameters" in page
    assert 0.18 < min(_message_share(job) for job in plans.JOBS[2:]) < max(map(_message_share, plans.JOBS)) < 0.22


def _message_share(job: Job) -> float:
    card = plans.h200()
    return scale.message_seconds(job, plans.SITE) / scale.step_seconds(job, card, plans.SITE)
