"""The captured step of fine-tuning against the eager one: its plumbing; tests/gpu has the whole."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import timm
import torch
from timm.layers.drop import DropPath
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from pmae.config import EncoderConfig
from pmae.data.augment import Standardize
from pmae.evaluate.augment import draw_noise
from pmae.evaluate.finetune import Classifier
from pmae.evaluate.finetune_step import EMA, CapturedFinetuneStep, FinetuneStep, build_optimizer
from pmae.evaluate.protocols import FinetuneProtocol, preset
from pmae.fast import graph
from pmae.models.encoder import build_encoder, set_drop_path

STRONG = preset("strong").finetune
assert STRONG
CONFIGS = {
    "paper": FinetuneProtocol(),
    "strong": STRONG,
    "mixed alone": FinetuneProtocol(augment=None, mixup=0.5, layer_decay=0.5),
}
STEPS = 8


def direct(step: Callable[..., None], captured: object, pool: object) -> Callable[..., None]:
    """Calls the step as it is."""
    return step


class Whole:
    """No weight has a bf16 copy."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.of: dict[Any, Any] = {}

    def in_use(self) -> Any:
        return torch.enable_grad()


class Taken:
    """torch's own update."""

    def __init__(self, optimizer: torch.optim.Optimizer, copies: dict[Any, Any]) -> None:
        self.optimizer = optimizer

    def fill(self) -> None: ...

    def note(self) -> None: ...

    def __call__(self) -> None:
        self.optimizer.step()


def trained(
    kind: type[FinetuneStep], config: FinetuneProtocol, device: torch.device, depth: float = 0.0
) -> tuple[Any, list[float]]:
    """The weights after a few steps, and the loss of each."""
    torch.manual_seed(0)
    encoder = build_encoder(EncoderConfig(patch_size=4, width=48, depth=3, heads=3), (3, 16, 16))
    classifier = Classifier(encoder, "mean", 4).to(device)
    images = torch.randint(0, 255, (32, 3, 16, 16), dtype=torch.uint8).to(device)
    labels = (torch.arange(32) % 4).to(device)
    standardize = Standardize(torch.tensor(128.0), torch.tensor(60.0)).to(device)
    optimizer = build_optimizer(classifier, config, 32, device)
    losses = []
    set_drop_path(encoder, depth)
    step = kind(classifier, optimizer, standardize, config)
    for number in range(STEPS):
        step.total.zero_()
        step(images, labels, draw_noise(images, config, (0, 0, number)), 0.5)
        losses.append(float(step.total))
    return copy.deepcopy(classifier.state_dict()), losses


@pytest.mark.parametrize("name", CONFIGS)
def test_it_is_the_eager_step_but_for_how_it_is_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for part, stand_in in (("Replay", direct), ("WeightCopies", Whole), ("FusedAdamW", Taken)):
        monkeypatch.setattr(graph, part, stand_in)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    config = dataclasses.replace(CONFIGS[name], base_lr=0.01)
    (plain, losses), (quick, same) = (
        trained(kind, config, torch.device("cpu")) for kind in (FinetuneStep, CapturedFinetuneStep)
    )
    assert same == pytest.approx(losses, rel=1e-6)
    # Keys' biases have no gradient but rounding, of which AdamW makes whole steps.
    for key, value in ((key, value) for key, value in plain.items() if not key.endswith("qkv.bias")):
        torch.testing.assert_close(quick[key], value, rtol=1e-5, atol=1e-6, msg=key)


def test_the_average_has_its_closed_form() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    average = EMA(model, 0.9)
    history = [model.weight.detach().clone()]
    for step in range(200):
        with torch.no_grad():
            model.weight.add_(torch.randn(2, 3))
        history.append(model.weight.detach().clone())
        average.update(step)
    decays = [min(0.9, (1 + t) / (10 + t)) for t in range(200)]
    shares = [np.prod(decays)] + [(1 - d) * np.prod(decays[t + 1 :]) for t, d in enumerate(decays)]
    np.testing.assert_allclose(sum(shares), 1.0)
    expected = sum(share * weight for share, weight in zip(shares, history, strict=True))
    torch.testing.assert_close(average.model.weight, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(model.weight, history[-1])


def test_statistics_are_averaged_and_counters_copied() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    average = EMA(model, 0.999)
    model(torch.randn(4, 1, 8, 8) + 3)
    average.update(0)
    ours, theirs = average.model.state_dict(), model.state_dict()
    torch.testing.assert_close(ours["1.running_mean"], 0.9 * theirs["1.running_mean"])
    assert int(ours["1.num_batches_tracked"]) == 1
    assert all(p.requires_grad for p in average.model.parameters())


def test_what_does_not_move_stays_exactly() -> None:
    model = nn.Linear(30, 20)
    average = EMA(model, 0.99)
    for step in range(50):
        average.update(step)
    assert torch.equal(average.model.weight, model.weight)


def dropping(net: nn.Module) -> list[float]:
    return [module.drop_prob for module in net.modules() if isinstance(module, DropPath)]


def test_stochastic_depth_is_timms() -> None:
    shape = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 3, "num_heads": 2, "num_classes": 0}
    reference, net = VisionTransformer(drop_path_rate=0.6, **shape), VisionTransformer(**shape)  # type: ignore[arg-type]
    net.load_state_dict(reference.state_dict())
    keys, x = list(net.state_dict()), torch.randn(8, 3, 8, 8)
    plain = net.eval()(x)
    set_drop_path(net, 0.0)
    assert dropping(net) == []
    set_drop_path(net, 0.6)
    assert dropping(net) == pytest.approx([0.0, 0.0, 0.3, 0.3, 0.6, 0.6])
    assert list(net.state_dict()) == keys
    torch.manual_seed(0)
    ours = net.train()(x)
    torch.manual_seed(0)
    torch.testing.assert_close(ours, reference.train()(x))
    assert torch.equal(net.eval()(x), plain)


def test_a_convolutional_net_has_it_where_timm_gives_it_a_place() -> None:
    net = timm.create_model("convnext_atto", num_classes=0)
    set_drop_path(net, 0.3)
    assert max(dropping(net)) == pytest.approx(0.3)
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    set_drop_path(plain, 0.3)
    assert dropping(plain) == []
