"""What is derived from the data, and what is refused once the data is known."""

import math
from pathlib import Path
from typing import Any

import pytest
import timm
from hypothesis import given
from hypothesis import strategies as st

from pmae.config import Config, replace
from pmae.config_file import describe, from_dict, of_older_versions, to_dict
from pmae.derive import batch_for, patch_for, resolve
from pmae.derive_case import PLAIN_VIT
from pmae.errors import UserError
from pmae.method import build_method
from pmae.models import is_vit_name
from pmae.paper.recipes import recipe
from pmae.runs import Run
from pmae.spaces import Pixels

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("size", "patch"), [((32, 32), 4), ((64, 64), 8), ((28, 28), 4), ((8, 8), 2), ((224, 224), 16)]
)
def test_patches_leave_about_eight_tokens_a_side(size: tuple[int, int], patch: int) -> None:
    assert patch_for(*size) == patch


@given(st.integers(4, 300), st.integers(4, 300))
def test_a_derived_patch_divides_both_sides(height: int, width: int) -> None:
    if not any(height % p == 0 and width % p == 0 and p < min(height, width) for p in range(2, 17)):
        with pytest.raises(UserError, match=r"data\.resize"):
            patch_for(height, width)
        return
    patch = patch_for(height, width)
    assert height % patch == 0
    assert width % patch == 0
    assert height // patch * (width // patch) > 1


@given(st.integers(2, 10**7))
def test_a_derived_batch_fits_the_data(count: int) -> None:
    assert 1 <= batch_for(count) <= min(count, 512)


@given(st.integers(1, 4096))
def test_the_peak_rate_never_falls_under_that_of_batches_of_512(batch: int) -> None:
    given = replace(Config(), train__batch_size=batch, objective__contrastive_weight=0.0)
    peak = (resolve(given, 4096, (3, 32, 32))[0].optim.base_lr or 0) * batch / 256
    assert peak == pytest.approx(max(3e-4, 1.5e-4 * batch / 256), rel=5e-3)


def test_resolution_leaves_nothing_open_and_gives_reasons() -> None:
    config, reasons = resolve(Config(), 50_000, (3, 32, 32))
    assert (config.train.batch_size, config.train.epochs, config.encoder.patch_size) == (512, 75, 4)
    assert (config.masking.masked_variance, config.objective.contrastive_weight) == (0.2, 1.0)
    assert (config.optim.base_lr, config.decoder.name, config.encoder.width) == (1.2e-3, "small", None)
    assert "3,750,000 images" in reasons["train.epochs"]
    alone, reasons = resolve(replace(Config(), encoder__first_patch_size=0), 50_000, (3, 32, 32))
    assert (alone.train.epochs, "7,500,000 images" in reasons["train.epochs"]) == (150, True)
    assert "objective.contrastive_weight  1.0   <- two views" in describe(config, reasons)


def test_without_the_second_task_a_run_is_what_the_paper_has() -> None:
    config, reasons = resolve(replace(Config(), objective__contrastive_weight=0.0), 50_000, (3, 32, 32))
    assert (config.train.batch_size, config.train.epochs) == (512, 100)
    assert (config.optim.base_lr, config.decoder.name) == (1.5e-4, "released")
    assert "train.batch_size              512   <- about 64 steps" in describe(config, reasons)


@pytest.mark.parametrize(
    ("count", "shape", "crop", "gpu", "weight"),
    [
        (7_007, (3, 64, 64), True, True, 1.0),
        (4_095, (3, 64, 64), True, True, 0.0),
        (50_000, (3, 64, 64), True, False, 1.0),
        (50_000, (3, 64, 64), False, True, 0.0),
        (50_000, (3, 1, 64), True, True, 0.0),
    ],
)
def test_the_second_task_is_the_default_where_it_was_found_to_help(
    count: int, shape: tuple[int, int, int], crop: bool, gpu: bool, weight: float
) -> None:
    config, reasons = resolve(replace(Config(), augment__crop=crop), count, shape, gpu=gpu)
    assert config.objective.contrastive_weight == weight
    assert reasons["objective.contrastive_weight"]
    if weight:
        assert (config.train.batch_size, config.decoder.name) == (512, "small")


def test_a_contrastive_loss_that_is_named_is_used_however_few_the_images() -> None:
    config, _ = resolve(replace(Config(), objective__contrastive="data2vec"), 300, (3, 64, 64))
    assert config.objective.contrastive_weight == 1.0


def test_a_small_set_takes_steps_as_large_as_a_big_one() -> None:
    config, reasons = resolve(Config(), 198, (3, 32, 32))
    assert (config.train.batch_size, config.optim.base_lr) == (16, 4.8e-3)
    assert "0.0048   <- a peak rate of 0.0003 with batches of 16" in describe(config, reasons)


def test_without_a_gpu_the_networks_are_small_and_say_why() -> None:
    config, reasons = resolve(Config(), 198, (3, 32, 32), gpu=False)
    assert (config.encoder.width, config.encoder.depth, config.decoder.width, config.decoder.depth) == (96, 4, 96, 1)
    assert "encoder.depth                 4   <- no GPU" in describe(config, reasons)
    small, large = (
        sum(
            p.numel()
            for p in build_method(
                resolve(Config(), 198, (3, 32, 32), gpu=gpu)[0], (3, 32, 32), Pixels((3, 32, 32))
            ).parameters()
        )
        for gpu in (False, True)
    )
    assert 20 * small < large  # with the decoder of the authors' code: few images, so no second task
    assert resolve(config, 198, (3, 32, 32)) == (config, {})


@pytest.mark.parametrize("name", ["paper", "released", "mae", "mae_released", "kmae"])
def test_what_a_recipe_of_the_paper_means_does_not_hang_on_the_machine(name: str) -> None:
    on_gpu, on_cpu = (resolve(recipe(name), 50_000, (3, 32, 32), gpu=gpu)[0] for gpu in (True, False))
    assert on_gpu == on_cpu
    assert on_cpu.optim.base_lr == 1.5e-4


@pytest.mark.parametrize("given", [{"encoder__depth": 6}, {"decoder__name": "small"}, {"encoder__name": "resnet10t"}])
def test_a_network_that_was_chosen_is_left_alone(given: dict[str, object]) -> None:
    config, _ = resolve(replace(Config(), **given), 198, (3, 32, 32), gpu=False)
    assert config.encoder.width is None
    assert config.decoder.depth is None
    assert config.decoder.name == "small"


@pytest.mark.parametrize(("count", "epochs"), [(7_007, 800), (7_007, 5), (50_000, 800), (50_000, 10), (300, 1)])
def test_a_run_waits_to_write_its_log_about_a_thousand_times_at_most(count: int, epochs: int) -> None:
    train = resolve(replace(Config(), train__epochs=epochs), count, (3, 32, 32))[0].train
    steps = epochs * (count // (train.batch_size or 1))
    apart = train.log_every or 0
    assert 1 <= apart <= 50
    assert steps / apart <= 2000


@pytest.mark.parametrize(
    ("shape", "gpu", "given", "kept"),
    [
        ((3, 64, 64), False, {}, 512),
        ((3, 64, 64), True, {}, None),
        ((3, 32, 32), False, {}, 512),
        ((1, 28, 28), False, {}, None),
        ((3, 64, 64), False, {"space__components": 12_288}, 12_288),
        ((3, 64, 64), False, {"space__name": "cosine"}, None),
    ],
)
def test_a_cpu_keeps_leading_components_where_the_exact_basis_is_large(
    shape: tuple[int, int, int], gpu: bool, given: dict[str, object], kept: int | None
) -> None:
    config, reasons = resolve(replace(Config(), **given), 1000, shape, gpu=gpu)
    assert config.space.components == kept
    assert (f"{math.prod(shape)} keeps all" in reasons.get("space.components", "")) == (kept == 512)


@pytest.mark.parametrize("gpu", [True, False])
def test_large_images_are_masked_in_components_of_patches(gpu: bool) -> None:
    config, reasons = resolve(recipe("masking"), 10_000, (3, 224, 224), gpu=gpu)
    assert (config.space.name, config.space.components) == ("patch_pca", None)
    assert "all 150,528 components of whole images would take 725 GB to fit" in reasons["space.name"]
    asked = replace(Config(), space__components=1024)
    assert resolve(asked, 10_000, (3, 224, 224), gpu=gpu)[0].space == asked.space
    assert resolve(Config(), 10_000, (3, 96, 96), gpu=gpu)[0].space.name == "pca"


def test_photographs_are_trained_as_they_were_measured() -> None:
    measured = Run(ROOT / "results/runs/imagenette-cosine-contrast-0.2-local=4-200").config
    given = replace(Config(data=measured.data), encoder__name="vit_small_patch16_224")
    given = replace(given, train__epochs=200, probe__every=20, objective__local_views=4)
    config, reasons = resolve(replace(given, optim__name="adamw"), 9_469, (3, 224, 224))
    assert config == measured
    assert {"augment.extra", "space.name", "train.batch_size"} <= set(reasons)
    assert resolve(replace(given, objective__local_views=None), 9_469, (3, 224, 224))[0].objective.local_views == 2


def test_photographs_have_muon_and_large_patches_first_as_they_were_measured() -> None:
    measured = Run(ROOT / "results/runs/imagenette-cosine-contrast-0.2-local=4-48").config
    given = replace(Config(data=measured.data), encoder__name="vit_small_patch16_224", objective__local_views=4)
    config, reasons = resolve(replace(given, train__epochs=48, probe__every=12), 9_469, (3, 224, 224))
    assert config == measured
    assert {"optim.name", "encoder.first_patch_size"} <= set(reasons)
    assert (config.optim.name, config.encoder.first_patch_size) == ("muon", 32)
    assert resolve(given, 9_469, (3, 224, 224))[0].train.epochs == 53  # half a million images, not much longer


@pytest.mark.parametrize(
    ("given", "count", "shape", "kind"),
    [
        ({}, 4_095, (3, 224, 224), {}),  # no contrastive loss
        ({}, 9_469, (1, 224, 224), {}),  # no colors
        ({}, 9_469, (3, 224, 224), {"dtype": "float32"}),
        ({}, 9_469, (3, 128, 128), {}),
        ({}, 9_469, (3, 224, 224), {"gpu": False}),
        ({"encoder__name": "resnet50"}, 9_469, (3, 224, 224), {}),  # which drops no tokens
        ({"encoder__name": "vit_relpos_small_patch16_224"}, 9_469, (3, 224, 224), {}),
        ({"encoder__weights": "weights/"}, 9_469, (3, 224, 224), {}),
        ({"objective__contrastive_weight": 0.0}, 9_469, (3, 224, 224), {}),
        ({"augment__extra": (), "objective__local_views": 0}, 9_469, (3, 224, 224), {}),
    ],
)
def test_what_is_not_like_the_photographs_has_neither_colors_nor_local_views(
    given: dict[str, object], count: int, shape: tuple[int, int, int], kind: dict[str, Any]
) -> None:
    config, reasons = resolve(replace(Config(), **given), count, shape, **kind)
    assert (config.augment.extra, config.objective.local_views) == ((), 0)
    assert not {"augment.extra", "objective.local_views"} & set(reasons)
    assert "local_views" not in describe(config, reasons)


@pytest.mark.parametrize(
    ("given", "shape", "kind", "name"),
    [
        ({}, (3, 64, 64), {}, "muon"),
        ({}, (1, 28, 28), {}, "muon"),
        ({"encoder__weights": "runs/a"}, (3, 32, 32), {"goes_on": True}, "muon"),
        ({"optim__name": "adamw"}, (3, 64, 64), {}, "adamw"),
        ({}, (3, 224, 224), {}, "muon"),
        ({}, (1, 128, 128), {}, "muon"),
        ({}, (3, 64, 64), {"gpu": False}, "adamw"),
        ({"objective__contrastive_weight": 0.0}, (3, 64, 64), {}, "adamw"),
        ({"objective__contrastive": "data2vec"}, (3, 64, 64), {}, "adamw"),
        ({"encoder__name": "resnet50"}, (3, 64, 64), {}, "adamw"),  # without blocks of matrices
        ({"encoder__weights": "weights/"}, (3, 64, 64), {}, "adamw"),
        ({"train__shard": True}, (3, 64, 64), {}, "adamw"),  # which cannot divide matrices
    ],
)  # fmt: skip
def test_muon_is_the_default_where_it_was_ahead(
    given: dict[str, Any], shape: tuple[int, int, int], kind: dict[str, Any], name: str
) -> None:
    config, reasons = resolve(replace(Config(), **given), 50_000, shape, **kind)
    assert config.optim.name == name
    assert ("optim.name" in reasons) == (name == "muon")
    assert ("optim.name" in describe(config, reasons)) == (name == "muon")
    weight = config.objective.contrastive_weight or 0.0
    if not {"encoder__weights"} & set(given):
        assert (config.optim.base_lr or 0) * (config.train.batch_size or 0) == pytest.approx(
            512 * (1.2e-3 if name == "muon" or not kind.get("gpu", True) else 6e-4 if weight else 1.5e-4)
        )


COLORS = ("color_jitter", "grayscale")


@pytest.mark.parametrize(
    ("given", "shape", "hues", "colors"),
    [
        ({}, (3, 32, 32), 0.36, COLORS),  # CIFAR-10
        ({}, (3, 32, 32), 0.93, ()),  # blood cells
        ({}, (3, 224, 224), 0.39, COLORS),
        ({}, (3, 224, 224), 0.98, COLORS),  # H&E: by their size
        ({}, (3, 32, 32), None, ()),
        ({"augment__extra": ()}, (3, 32, 32), 0.36, ()),
        ({"augment__extra": ("grayscale",)}, (3, 32, 32), 0.93, ("grayscale",)),
        ({"objective__contrastive_weight": 0.0}, (3, 32, 32), 0.36, ()),
        ({"encoder__weights": "weights/"}, (3, 32, 32), 0.36, ()),
    ],
)
def test_colors_are_distorted_where_images_differ_in_hue(
    given: dict[str, Any], shape: tuple[int, int, int], hues: float | None, colors: tuple[str, ...]
) -> None:
    settled, reasons = resolve(replace(Config(), **given), 50_000, shape, hues=hues)
    assert settled.augment.extra == colors
    photographs = hues is not None and (hues < 0.8 or shape[1] == 224)
    seen = photographs and not {"objective__contrastive_weight", "encoder__weights"} & set(given)
    assert settled.objective.local_views == (2 if seen else 0)
    line = next((line for line in describe(settled, reasons).splitlines() if "augment.extra" in line), "")
    if hues is not None and not given:
        assert f"none   <- hues are alike ({hues:.2f} of 1)" in line or "color_jitter, grayscale   <- or colors" in line
    assert bool("<-" in line) == (hues is not None and not given)
    assert resolve(settled, 50_000, shape, hues=hues) == (settled, {})
    alone, reasons = resolve(replace(Config(), **given), 50_000, shape, hues=hues, gpu=False)
    assert alone.augment.extra == given.get("augment__extra", ())
    assert alone.objective.local_views == 0
    assert "augment.extra" not in reasons


@pytest.mark.parametrize("given", [{"encoder__name": "resnet50"}, {"objective__contrastive": "data2vec"}])
def test_small_photographs_have_local_views_where_they_can(given: dict[str, Any]) -> None:
    settled, _ = resolve(replace(Config(), **given), 50_000, (3, 32, 32), hues=0.36)
    assert (settled.objective.local_views, settled.augment.extra) == (0, COLORS)


def test_every_encoder_that_is_given_local_views_can_drop_tokens() -> None:
    given = [name for name in ["vit_tiny", *timm.list_models()] if PLAIN_VIT.fullmatch(name)]
    assert {"vit_tiny", "vit_small_patch16_224", "vit_base_patch16_224"} <= set(given)
    assert all(is_vit_name(name) for name in given)


@pytest.mark.parametrize("name", ["paper", "released"])
def test_the_papers_recipes_keep_the_exact_basis_on_every_machine(name: str) -> None:
    assert resolve(recipe(name), 50_000, (3, 64, 64), gpu=False)[0].space.components is None


def test_patches_of_one_number_are_compared_as_they_are() -> None:
    one = replace(Config(), space__name="pixels", encoder__patch_size=1)
    for shape, normalized in (((1, 8, 8), False), ((1, 1, 64), False), ((3, 8, 8), True)):
        assert resolve(one, 500, shape)[0].objective.normalize_patches == normalized


def test_what_is_given_is_kept() -> None:
    config, reasons = resolve(replace(Config(), encoder__patch_size=8, train__epochs=3), 50_000, (3, 32, 32))
    assert (config.encoder.patch_size, config.train.epochs) == (8, 3)
    assert "train.epochs" not in reasons


def test_resolving_twice_changes_nothing() -> None:
    once, _ = resolve(Config(), 1000, (1, 16, 24))
    assert resolve(once, 1000, (1, 16, 24)) == (once, {})


def test_more_than_the_data_holds_is_refused() -> None:
    with pytest.raises(UserError, match=r"train\.batch_size must be at most .* training images \(100\), got 128"):
        resolve(replace(Config(), train__batch_size=128), 100, (3, 32, 32))
    with pytest.raises(UserError, match=r"warmup_epochs must be at most train\.epochs \(3\)"):
        resolve(replace(Config(), train__epochs=3, optim__warmup_epochs=4.0), 100, (3, 32, 32))
    with pytest.raises(UserError, match="at least 2 images"):
        resolve(Config(), 1, (3, 32, 32))


@pytest.mark.parametrize(
    ("given", "shape", "kind", "first"),
    [
        ({}, (3, 32, 32), {}, 8),
        ({}, (1, 64, 96), {}, 16),
        ({"encoder__patch_size": 8}, (3, 32, 32), {}, 16),
        ({"encoder__name": "vit_small_patch16_224"}, (3, 224, 224), {}, 32),
        ({}, (3, 32, 32), {"gpu": True}, 8),
        ({}, (1, 64, 64), {"gpu": True}, 16),
        ({"optim__name": "adamw"}, (3, 32, 32), {"gpu": True}, 0),
        ({}, (3, 112, 112), {"gpu": True}, 28),
        ({"encoder__name": "vit_small_patch16_224"}, (3, 224, 224), {"gpu": True}, 32),
        ({"encoder__first_patch_size": 0}, (3, 32, 32), {}, 0),
        ({"objective__contrastive_weight": 0.0}, (3, 32, 32), {}, 0),
        ({}, (3, 24, 36), {}, 6),
        ({}, (3, 28, 36), {}, 0),  # patches of 4, which 8 does not divide
        ({"encoder__name": "resnet50"}, (3, 64, 64), {}, 0),
        ({"objective__contrastive": "data2vec"}, (3, 32, 32), {}, 0),
        ({"encoder__weights": "runs/a"}, (3, 32, 32), {"goes_on": True}, 0),
    ],
)
def test_large_patches_come_first_as_measured(
    given: dict[str, Any], shape: tuple[int, int, int], kind: dict[str, Any], first: int
) -> None:
    settled, reasons = resolve(replace(Config(), **given), 20_000, shape, **{"gpu": False, **kind})
    assert settled.encoder.first_patch_size == first
    assert ("encoder.first_patch_size" in reasons) == bool(first)
    assert ("encoder.first_patch_size" in describe(settled, reasons)) == bool(first)
    assert resolve(settled, 20_000, shape, **{"gpu": False, **kind}) == (settled, {})
    before = {**to_dict(settled), "encoder": {**to_dict(settled)["encoder"], "first_patch_size": None}}
    assert from_dict(of_older_versions(before)).encoder.first_patch_size == 0


def test_a_cpu_takes_no_longer_for_large_images() -> None:
    small, large = (resolve(Config(), 20_000, (3, side, side), gpu=False)[0] for side in (32, 224))

    def tokens(config: Config, side: int) -> int:
        return (config.train.epochs or 0) * (side // (config.encoder.patch_size or 1)) ** 2

    assert tokens(large, 224) == pytest.approx(tokens(small, 32), rel=0.02)
    assert (small.train.batch_size, large.train.batch_size) == (512, 128)
