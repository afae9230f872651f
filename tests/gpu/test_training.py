"""Training on the card through the front door: fast against plain, resumed, deterministic, damaged, too large."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import smooth_images
from tests.gpu.conftest import Within

from pmae import api
from pmae.config import Config, DecoderConfig, EncoderConfig, TrainConfig, replace
from pmae.errors import UserError
from pmae.fast import graph
from pmae.files import read_tensors
from pmae.runs import Run

BATCH, STEPS = 64, 5
SPACES: dict[str, dict[str, Any]] = {
    "pca": {},
    "pca leading": {"space__components": 64},
    "patch_pca": {"space__name": "patch_pca"},
    "kernel_pca": {"space__name": "kernel_pca", "space__landmarks": 128},
    "cosine": {"space__name": "cosine"},
    "wavelet": {"space__name": "wavelet"},
    "ica": {"space__name": "ica", "space__components": 32},
    "learned": {"space__name": "learned", "space__components": 32},
    "mae": {"space__name": "pixels", "objective__target": "patches", "objective__scale": "mean"},
    "contrastive": {"objective__contrastive_weight": 1.0},
    "local views": {"objective__contrastive_weight": 1.0, "objective__local_views": 2},
    "simclr": {
        "masking__enabled": False,
        "objective__reconstruction_weight": 0.0,
        "objective__contrastive_weight": 1.0,
    },
    "drop_path": {"encoder__drop_path": 0.3},
    "muon": {"optim__name": "muon"},
    "colors": {"augment__extra": ("color_jitter", "grayscale", "blur", "solarize")},
    "teacher": {"objective__contrastive_weight": 1.0, "objective__contrastive": "data2vec(momentum=0.5)"},
}
BOUND = {"kernel_pca": 1e-4, "learned": 1e-4, "contrastive": 3e-5, "teacher": 1e-4, "colors": 1e-4, "pca leading": 3e-5}
BOUND["muon"] = 1e-3  # it orthogonalizes in bfloat16
BOUND["local views"] = BOUND["simclr"] = BOUND["contrastive"]
"""In float32 over five steps: small eigenvalues, a basis that trains and updates of nearly no gradient enlarge what
rounding does. The first loss, before any update, has one bound for all."""
CASES = [(space, 32) for space in SPACES] + [(space, 64) for space in ("pca leading", "mae", "patch_pca")]
CASES += [(space, side) for side in (96, 224) for space in ("patch_pca", "pca leading", "mae")]


def config_for(space: str, side: int, **changes: Any) -> Config:
    """A ViT of four narrow blocks over 17 to 197 tokens."""
    patch = {32: 8, 64: 8, 96: 8, 224: 16}[side]
    base = Config(
        encoder=EncoderConfig(patch_size=patch, width=96, depth=4, heads=6),
        decoder=DecoderConfig("small", width=64, depth=2, heads=4),
        train=TrainConfig(epochs=1, batch_size=BATCH, log_every=1, checkpoint_every=1, device="cuda"),
    )
    given = {
        "objective__contrastive_weight": 0.0,
        "optim__base_lr": 1e-3,
        "optim__warmup_epochs": 0.5,
        "probe__every": 1,
    }
    return replace(base, **{**given, **SPACES[space], **changes})


def images_for(side: int, count: int = 356) -> np.ndarray:
    return smooth_images(count, (3, side, side), seed=side)


def losses(config: Config, images: np.ndarray, out: Path) -> list[float]:
    """The loss of every step."""
    run = api.pretrain(config, images, out, quiet=True, figures=False)
    return [line["loss"] for line in run.metrics() if "loss" in line]


def apart(found: list[float], expected: list[float]) -> float:
    """The largest relative difference."""
    assert len(found) == len(expected) > 0
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(("space", "side"), CASES)
def test_the_fast_engine_gives_the_plain_ones_losses(
    space: str, side: int, tmp_path: Path, assert_within: Within
) -> None:
    # More images than components: those without variance would be hidden or not by chance.
    images = images_for(side, 3584 if side == 32 else 356)
    batch = 640 if side == 32 else BATCH
    common = {"train__batch_size": batch, "optim__base_lr": 2.5e-4 * 256 / batch}
    made = {}
    for precision in ("float32", "bfloat16"):
        for engine, kernels in (("plain", "none"), ("graph", "all"), ("compiled", "all")):
            chosen = {"train__engine": engine, "train__kernels": kernels, "train__precision": precision}
            config = config_for(space, side, **common, **chosen)
            made[engine, precision] = losses(config, images, tmp_path / f"{engine}-{precision}")
    exact, bound = made["plain", "float32"], BOUND.get(space, 1e-5)
    # A hue is divided by the color's strength, which may be next to none. Of 1,280 views one may have a component at
    # the very edge of its mask, which one order of sums hides and another does not: a hundredth of its loss.
    first = 3e-5 if space in ("colors", "contrastive", "local views") else 1e-5
    autocast = apart(made["plain", "bfloat16"], exact)
    for engine in ("graph", "compiled"):
        what, found = f"{space} {side}x{side}, {engine}", made[engine, "float32"]
        assert_within(f"{what}, float32, first step", apart(found[:1], exact[:1]), first)
        assert_within(f"{what}, float32", apart(found, exact), bound)
        assert_within(f"{what}, bfloat16", apart(made[engine, "bfloat16"], exact), 2 * autocast + 2e-3)


@pytest.mark.parametrize("kind", ["vit_tiny", "resnet10t"])
def test_a_finished_teacher_is_the_same_in_every_engine(kind: str, tmp_path: Path, assert_within: Within) -> None:
    images, ours = images_for(32), kind == "vit_tiny"
    sizes = {} if ours else {"encoder__width": None, "encoder__depth": None, "encoder__heads": None}
    start = config_for("pca", 32, encoder__name=kind, encoder__patch_size=8 if ours else None, **sizes)
    teacher = api.pretrain(start, images[:64], tmp_path / "teacher", quiet=True, figures=False)
    given = {"objective__contrastive": f"distill(teacher={str(teacher.path)!r})", "objective__contrastive_weight": 1.0}
    made = {}
    for engine, kernels in (("plain", "none"), ("graph", "all"), ("compiled", "all")):
        chosen = {"train__engine": engine, "train__kernels": kernels, "train__precision": "float32"}
        made[engine] = losses(config_for("pca", 32, **given, **chosen), images, tmp_path / engine)
    for engine in ("graph", "compiled"):
        assert_within(f"a finished {kind} as teacher, {engine}, float32", apart(made[engine], made["plain"]), 1e-3)


def test_attention_kernels_alone_train_too(tmp_path: Path, assert_within: Within) -> None:
    images = images_for(32)
    made = [
        losses(config_for("pca", 32, train__kernels=kernels, train__precision="float32"), images, tmp_path / kernels)
        for kernels in ("attention", "none")
    ]
    assert_within("attention kernels alone, float32", apart(*made), 1e-4)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_captured_steps_teacher_is_the_average_of_its_students(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, assert_within: Within
) -> None:
    """One step an epoch and a checkpoint after each: every teacher follows from the one before and its student."""
    chosen = {"train__epochs": 8, "train__keep": 9, "train__engine": "graph", "train__precision": precision}
    chosen |= {"space__name": "cosine"}  # so few images leave principal components without variance
    images, made = images_for(32, 80), list[Any]()
    copies = graph.WeightCopies
    monkeypatch.setattr(graph, "WeightCopies", lambda model: made.append(copies(model)) or made[0])
    run = api.pretrain(config_for("teacher", 32, **chosen), images, tmp_path / "run", quiet=True, figures=False)
    prefix = "projector.teacher.encoder.net."
    students = [read_tensors(path / "encoder.safetensors") for path in run.checkpoints()]
    teachers = [read_tensors(path / "decoder.safetensors", prefix) for path in run.checkpoints()]
    assert len(teachers) == 8
    for before, student, after in zip(teachers, students, teachers[1:], strict=False):
        far = max((after[name] - (before[name] + student[name]) / 2).abs().max().item() for name in student)
        assert_within(f"the teacher's weights, {precision}", far, 1e-6)
    moved = [name for name in students[0] if not torch.equal(teachers[0][name], teachers[-1][name])]
    assert len(moved) == len(students[0]) - 1  # all but the fixed positions
    for rounded in made:  # in bfloat16 alone
        frozen = {p: copy for p, copy in rounded.of.items() if not p.requires_grad}
        assert frozen
        assert all(torch.equal(copy, p.bfloat16()) for p, copy in frozen.items())
    assert bool(made) == (precision == "bfloat16")
    plain = config_for("teacher", 32, **chosen | {"train__engine": "plain", "train__kernels": "none"})
    expected = losses(plain, images, tmp_path / "plain")
    found = [line["loss"] for line in run.metrics() if "loss" in line]
    assert_within(f"losses with a teacher, {precision}", apart(found, expected), 0.02)


@pytest.mark.parametrize(
    ("space", "engine"),
    [*((space, "graph") for space in ("pca", "mae", "contrastive", "teacher", "drop_path")), ("teacher", "compiled")],
)
def test_a_resumed_run_is_an_uninterrupted_one(space: str, engine: str, tmp_path: Path) -> None:
    config, images = config_for(space, 32, train__epochs=4, train__engine=engine), images_for(32)
    api.pretrain(config, images, tmp_path / "whole", quiet=True, figures=False)
    api.pretrain(config, images, tmp_path / "parts", quiet=True, figures=False, until=2)
    api.pretrain(Run(tmp_path / "parts").config, images, tmp_path / "parts", resume=True, quiet=True, figures=False)
    ends = [(Run(tmp_path / name).checkpoint() / "encoder.safetensors").read_bytes() for name in ("whole", "parts")]
    assert ends[0] == ends[1]


def test_deterministic_runs_have_the_same_bits(tmp_path: Path) -> None:
    config, images = config_for("pca", 32, train__deterministic=True), images_for(32)
    ends = []
    for name in ("first", "second"):
        run = api.pretrain(config, images, tmp_path / name, quiet=True, figures=False)
        ends.append((run.checkpoint() / "encoder.safetensors").read_bytes())
    assert ends[0] == ends[1]


@pytest.mark.parametrize("engine", ["plain", "graph", "compiled"])
def test_a_bad_batch_is_caught(engine: str, tmp_path: Path) -> None:
    config = config_for("pca", 32, train__engine=engine, optim__base_lr=1e8, train__epochs=3)
    with pytest.raises(UserError, match="loss must be finite, got NaN or infinity at step"):
        api.pretrain(config, images_for(32), tmp_path / "run", quiet=True, figures=False)
    assert any((tmp_path / "run").glob("failure_step_*.safetensors"))


def test_out_of_memory_is_a_sentence(tmp_path: Path) -> None:
    torch.cuda.empty_cache()
    # A small part of the card for this process alone: others may be testing on it.
    torch.cuda.set_per_process_memory_fraction(3e9 / torch.cuda.get_device_properties(0).total_memory)
    sizes = {"encoder__width": 768, "encoder__depth": 12, "encoder__heads": 12}
    config = config_for("pca", 32, train__batch_size=4096, **sizes)
    try:
        with pytest.raises(UserError, match=r"train.batch_size must fit in the memory of cuda.*got 4096"):
            api.pretrain(config, images_for(32, 4800), tmp_path / "run", quiet=True, figures=False)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
    assert not (tmp_path / "run" / "config.json").exists()


def test_what_the_compiler_cannot_do_trains_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise RuntimeError("the compiler gave up")

    monkeypatch.setattr("pmae.train.engines.compiled", lambda measure: refuse)
    monkeypatch.setattr("pmae.fast.graph.COMPILE_FROM", 0)
    images = images_for(32)
    run = api.pretrain(config_for("pca", 32), images, tmp_path / "run", quiet=True, figures=False)
    assert len([line for line in run.metrics() if "loss" in line]) == STEPS
    said = [str(w.message) for w in recwarn if "the compiler gave up" in str(w.message)]
    assert len(said) == 1
    assert "about a tenth longer" in said[0]  # the captured step took over
    monkeypatch.setattr("pmae.train.engines.CapturedStep.__call__", refuse)
    run = api.pretrain(config_for("pca", 32), images, tmp_path / "plain", quiet=True, figures=False)
    assert len([line for line in run.metrics() if "loss" in line]) == STEPS
    assert [w for w in recwarn if "a few times as long" in str(w.message)]
    asked = config_for("pca", 32, train__engine="compiled")
    with pytest.raises(UserError, match=r"train.engine must be plain or auto here, got 'compiled': .*compiler gave"):
        api.pretrain(asked, images, tmp_path / "asked", quiet=True, figures=False)


def test_a_fast_path_that_is_wrong_is_stopped_at_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pmae.fast import blocks

    right = blocks.run_blocks
    monkeypatch.setitem(
        __import__("pmae.fast", fromlist=["FAST"]).FAST["all"],
        "run_blocks",
        lambda *arguments, **options: 1.5 * right(*arguments, **options),
    )
    with pytest.raises(UserError, match="first step"):
        api.pretrain(config_for("pca", 32), images_for(32), tmp_path / "run", quiet=True, figures=False)


def test_evaluation_fine_tuning_and_export_after_training(tmp_path: Path, assert_within: Within) -> None:
    from pmae.data.images import ImageSet, Splits
    from pmae.evaluate.protocols import only, preset
    from pmae.export import export

    images = images_for(32, 640)
    labels = (images.mean((1, 2, 3)) > 128).astype(np.int64)
    parts = [ImageSet(images[a:b], labels[a:b], ("dark", "bright")) for a, b in ((0, 512), (512, 640))]
    splits = Splits("toy", parts[0], None, parts[1])
    run = api.pretrain(config_for("pca", 32, train__epochs=3), splits, tmp_path / "run", quiet=True, figures=False)
    api.evaluate(run.path, only(preset("plain"), ["linear", "knn"]), splits, baselines=False, figures=False)
    results = json.loads((run.path / "results.json").read_text())
    assert results["pretrain"]["epoch"] == 3
    assert_within("export to timm after training on the card", export(run.path, "timm", tmp_path / "timm"), 1e-4)
