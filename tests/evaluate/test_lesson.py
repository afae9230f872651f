"""The captured step of fine-tuning against the eager one: its plumbing anywhere, the whole where there is a GPU."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pmae.config import EncoderConfig
from pmae.data.augment import Standardize
from pmae.evaluate import finetune_step as lesson
from pmae.evaluate.finetune import Classifier, _optimizer
from pmae.evaluate.finetune_step import Lesson, QuickLesson, draw_noise, stochastic_depth
from pmae.evaluate.protocols import FinetuneProtocol, preset
from pmae.fast import graph
from pmae.models.encoder import build_encoder

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


def taught(
    kind: type[Lesson], config: FinetuneProtocol, device: torch.device, depth: float = 0.0
) -> tuple[Any, list[float]]:
    """The weights after a few steps, and the loss of each."""
    torch.manual_seed(0)
    encoder = build_encoder(EncoderConfig(patch_size=4, width=48, depth=3, heads=3), (3, 16, 16))
    classifier = Classifier(encoder, "mean", 4).to(device)
    images = torch.randint(0, 255, (32, 3, 16, 16), dtype=torch.uint8).to(device)
    labels = (torch.arange(32) % 4).to(device)
    standardize = Standardize(torch.tensor(128.0), torch.tensor(60.0)).to(device)
    optimizer = _optimizer(classifier, config, 32, device)
    losses = []
    with stochastic_depth(encoder, depth):
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
    (plain, losses), (quick, same) = (taught(kind, config, torch.device("cpu")) for kind in (Lesson, QuickLesson))
    assert same == pytest.approx(losses, rel=1e-6)
    # Keys' biases have no gradient but rounding, of which AdamW makes whole steps.
    for key, value in ((key, value) for key, value in plain.items() if not key.endswith("qkv.bias")):
        torch.testing.assert_close(quick[key], value, rtol=1e-5, atol=1e-6, msg=key)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", CONFIGS)
def test_on_a_gpu_its_losses_are_those_of_the_eager_step(name: str) -> None:
    config = dataclasses.replace(CONFIGS[name], base_lr=0.01)
    device = torch.device("cuda")
    assert lesson.can_be_quick(Classifier(build_encoder(EncoderConfig(patch_size=4), (3, 16, 16)), "cls", 2), device)
    (_, losses), (_, quick) = (taught(kind, config, device) for kind in (Lesson, QuickLesson))
    assert quick == pytest.approx(losses, rel=0.02)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_branches_are_dropped_anew_at_every_replay() -> None:
    config = dataclasses.replace(FinetuneProtocol(augment=None), base_lr=1e-12)
    _, losses = taught(QuickLesson, config, torch.device("cuda"), depth=0.5)
    assert len({round(loss, 6) for loss in losses[4:]}) > 1
