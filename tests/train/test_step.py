"""The optimizer that a step updates with, and steps that take less memory."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pmae.config import Config, OptimConfig, TrainConfig, replace
from pmae.data.augment import Standardize
from pmae.data.images import Splits
from pmae.derive import resolve
from pmae.errors import UserError
from pmae.method import build_method
from pmae.train.engines import Compiled, FastEngine, Graph
from pmae.train.environment import pick_engine
from pmae.train.loop import pretrain
from pmae.train.step import Inputs, Plain, build_optimizer


class Small(nn.Module):
    """A matrix, a bias, a norm and a token."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(3, 2), nn.LayerNorm(2)
        self.cls_token = nn.Parameter(torch.ones(1, 1, 2))


@pytest.mark.parametrize("decay_all", [False, True])
def test_decay_shrinks_matrices_or_everything(decay_all: bool) -> None:
    model, lr, decay = Small(), 0.1, 0.5
    optimizer = build_optimizer(model, OptimConfig(weight_decay=decay, decay_all=decay_all), on_graph=False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for group in optimizer.param_groups:
        group["lr"] = lr
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        factor = 1 - lr * decay if decay_all or name == "layer.weight" else 1.0
        torch.testing.assert_close(parameter.detach(), factor * before[name])


def losses(config: Config, toy: Splits, out: Path, **changes: Any) -> list[float]:
    settled = resolve(
        replace(config, train__epochs=1, train__log_every=1, **changes), len(toy.train), toy.train.shape, gpu=False
    )[0]
    return [line["loss"] for line in pretrain(settled, toy, out, quiet=True).metrics() if "loss" in line]


@pytest.mark.parametrize("target", ["components", "pixels"])
def test_a_batch_in_parts_is_the_batch(tiny: Config, toy: Splits, tmp_path: Path, target: str) -> None:
    whole = losses(tiny, toy, tmp_path / "whole", objective__target=target)
    parts = losses(tiny, toy, tmp_path / "parts", objective__target=target, train__accumulate=4)
    assert len(whole) == 4
    assert parts == pytest.approx(whole, rel=1e-5)


def test_one_mask_for_a_batch_is_one_for_its_parts(tiny: Config, toy: Splits, tmp_path: Path) -> None:
    whole = losses(tiny, toy, tmp_path / "whole", masking__per="batch")
    assert losses(tiny, toy, tmp_path / "parts", masking__per="batch", train__accumulate=2) == pytest.approx(whole)


@pytest.mark.parametrize(
    "encoder", ["vit_tiny_patch16_224", "vit_wee_patch16_reg1_gap_256", "resnet26", "convnext_atto"]
)
def test_encoders_of_timm_take_a_step(encoder: str) -> None:
    """The smallest of four families, at 64 pixels."""
    shape = (3, 64, 64)
    given = replace(Config(), encoder__name=encoder, space__name="patch_pca", decoder__depth=1, train__batch_size=2)
    config = resolve(given, 8, shape, gpu=False)[0]
    torch.manual_seed(0)
    model = build_method(config, shape).train()
    model.space.fit([torch.randn(8, *shape)])
    standardize = Standardize(torch.zeros(3, 1, 1), torch.ones(3, 1, 1))
    step = Plain(model, standardize, config, build_optimizer(model, config.optim, on_graph=False))
    first = next(p for p in model.encoder.parameters() if p.ndim == 4)
    before, draw = first.detach().clone(), model.draw(2, 0.2, torch.Generator().manual_seed(0))
    step(Inputs(torch.randn(2, *shape), None, draw, lr=1e-3))
    assert step.tally.read()[1] == -1  # no step whose loss is not finite
    assert not torch.equal(first.detach(), before)


@pytest.mark.parametrize("encoder", ["vit_tiny", "resnet10t"])
def test_activations_computed_again_give_the_same_bits(tiny: Config, toy: Splits, tmp_path: Path, encoder: str) -> None:
    given = {"encoder__name": encoder}
    given |= dict.fromkeys(("encoder__width", "encoder__depth", "encoder__heads")) if encoder != "vit_tiny" else {}
    toy = Splits("toy", toy.train.take(np.arange(32)))
    saved: list[int] = []
    numbers = []
    for name, on in (("kept", False), ("again", True)):
        size = 0

        def count(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal size
            size += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            numbers.append(losses(tiny, toy, tmp_path / name, train__activation_checkpointing=on, **given))
        saved.append(size)
    assert numbers[0] == numbers[1]
    assert saved[1] < saved[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train__accumulate": 3}, "train.batch_size must be a multiple of .* train.accumulate, 3, got 32"),
        (
            {"train__accumulate": 2, "objective__contrastive_weight": 1.0},
            "train.accumulate must be 1 with a contrastive",
        ),
        ({"train__accumulate": 2, "objective__scale": "mean"}, "objective.scale must be constant or sum where a batch"),
        ({"train__accumulate": 2, "train__engine": "graph"}, "train.engine must be plain or auto where train.accumul"),
        ({"train__shard": True, "train__bf16_gradients": True}, "train.bf16_gradients must be off where train.shard"),
    ],
)
def test_what_parts_of_a_batch_cannot_do_is_refused(
    tiny: Config, toy: Splits, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        losses(tiny, toy, tmp_path / "run", **changes)
    assert not (tmp_path / "run").exists()


def test_a_rehearsal_takes_a_step_without_the_compiler() -> None:
    given = replace(Config(), encoder__patch_size=8, encoder__depth=1, decoder__depth=1, train__batch_size=2)
    config, built = resolve(given, 8, (3, 16, 16), gpu=False)[0], list[type[Plain]]()
    model = build_method(config, (3, 16, 16)).train()
    standardize = Standardize(torch.zeros(3, 1, 1), torch.ones(3, 1, 1))

    def build(kind: type[Plain]) -> Plain:
        built.append(kind)
        return Plain(model, standardize, config, build_optimizer(model, config.optim, on_graph=False))

    engine = FastEngine(build, Compiled, asked=False)
    engine.rehearse(Inputs(torch.randn(2, 3, 16, 16), None, model.draw(2, 0.2, torch.Generator()), lr=1e-3))
    assert built == [Compiled, Graph]
    assert engine.tally.steps == 1


def test_steps_that_save_memory_are_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pmae.fast.can_capture", lambda device, setting: True)
    cuda = torch.device("cuda")
    assert pick_engine(TrainConfig(), cuda) == "graph"
    assert pick_engine(TrainConfig(), cuda, pixels=50_000 * 800 * 64 * 64) == "compiled"  # half an hour
    assert pick_engine(TrainConfig(engine="graph"), cuda, pixels=1e12) == "graph"
    for given in ({"accumulate": 2}, {"activation_checkpointing": True}, {"bf16_gradients": True}):
        assert pick_engine(TrainConfig(**given), cuda) == "plain"  # type: ignore[arg-type]
