"""The update in one kernel against torch's AdamW in float64, run on the CPU by Triton's interpreter."""

import pytest
import torch
from tests.fast.interpreter import interpreted, print_json
from torch import nn

SIZES = {"matrix": (96, 64), "long": (5000,), "odd": (7, 3), "unused": (16,)}
"""Of the weights; `long` needs two programs, `odd` is no multiple of 16."""
DECAY, BETAS, STEPS = 0.05, (0.9, 0.95), 5


def reference(gradients: list[dict[str, torch.Tensor]], rates: list[float]) -> dict[str, torch.Tensor]:
    """Weights after all steps, by torch in float64."""
    torch.manual_seed(0)
    weights = {name: nn.Parameter(torch.randn(size).double()) for name, size in SIZES.items()}
    decayed = [p for p in weights.values() if p.ndim == 2]
    groups = [{"params": decayed}, {"params": [p for p in weights.values() if p.ndim < 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=BETAS, weight_decay=DECAY)
    for of_step, rate in zip(gradients, rates, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate
        for name, gradient in of_step.items():
            weights[name].grad = gradient.double()
        optimizer.step()
    return {name: p.detach() for name, p in weights.items()}


def interpret(patch: pytest.MonkeyPatch) -> dict[str, dict[str, float]]:
    """Errors of either kind; only where Triton interprets."""
    return {"float32": errors_of(False), "bfloat16": errors_of(True), "muon": errors_of_muon()}


def errors_of(bf16: bool) -> dict[str, float]:
    """Errors of weights and of their bf16 copies, after all steps."""
    from pmae.fast.adamw import FusedAdamW

    torch.manual_seed(0)
    weights = {name: nn.Parameter(torch.randn(size)) for name, size in SIZES.items()}
    draw = torch.Generator().manual_seed(1)
    kind = torch.bfloat16 if bf16 else torch.float32
    names = [name for name in SIZES if name != "unused"]
    gradients = [{n: torch.randn(SIZES[n], generator=draw).to(kind) for n in names} for _ in range(STEPS)]
    rates, rate = [0.01 * (step + 1) for step in range(STEPS)], torch.zeros(())
    expected = reference(gradients, rates)
    copies = {p: nn.Parameter(p.detach().bfloat16()) for p in weights.values()} if bf16 else {}
    decayed = [p for p in weights.values() if p.ndim == 2]
    groups = [{"params": decayed}, {"params": [p for p in weights.values() if p.ndim < 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=BETAS, weight_decay=DECAY, capturable=True)
    update = FusedAdamW(optimizer, copies)
    for of_step, value in zip(gradients, rates, strict=True):
        rate.fill_(value)
        for name, gradient in of_step.items():
            update.leaf(weights[name]).grad = gradient.clone()
        update.fill()
        update()
    errors = {name: (weights[name].double() - expected[name]).abs().max().item() for name in SIZES}
    for name in names if bf16 else ():
        whole, rounded = weights[name].detach(), copies[weights[name]].detach()
        # Rounded to 8 bits: within half a unit in the last place.
        errors[f"{name} rounded"] = max(0.0, ((rounded.float() - whole) / whole).abs().max().item() - 2**-8)
    errors["steps"] = abs(float(optimizer.state[weights["long"]]["step"]) - STEPS)
    return errors | {"unused step": float(optimizer.state[weights["unused"]]["step"])}


def errors_of_muon() -> dict[str, float]:
    """Between fused and plain steps of Muon, whose matrices AdamW's kernel must leave alone."""
    from pmae.fast.adamw import FusedAdamW
    from pmae.muon import Muon

    torch.manual_seed(0)
    plain = {name: nn.Parameter(torch.randn(SIZES[name])) for name in ("matrix", "odd", "long")}
    ours = {name: nn.Parameter(p.detach().clone()) for name, p in plain.items()}
    copies = {p: nn.Parameter(p.detach().bfloat16()) for p in ours.values()}
    rate = torch.full((), 0.01)

    def made(weights: dict[str, nn.Parameter], lr: float | torch.Tensor, on_graph: bool) -> Muon:
        rest = [p for name, p in weights.items() if name != "matrix"]
        groups = [{"params": [weights["matrix"]], "orthogonal": True}, {"params": rest, "orthogonal": False}]
        return Muon(groups, lr=lr, betas=BETAS, weight_decay=DECAY, capturable=on_graph)

    optimizer, update = made(plain, 0.01, False), FusedAdamW(made(ours, rate, True), copies)
    for _ in range(STEPS):
        for name, p in plain.items():
            gradient = torch.randn_like(p).bfloat16()
            p.grad, update.leaf(ours[name]).grad = gradient.float(), gradient
        optimizer.step()
        update.fill()
        update()
    pairs = {name: (ours[name].detach(), p.detach()) for name, p in plain.items()}
    errors = {name: (own - p).abs().max().item() for name, (own, p) in pairs.items()}
    errors |= {f"{n} rounded": (copies[ours[n]] - own.bfloat16()).abs().max().item() for n, (own, _) in pairs.items()}
    return errors


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, float]]:
    return interpreted(interpret)


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_the_update_is_torchs_adamw(found: dict[str, dict[str, float]], kind: str) -> None:
    assert {name: error for name, error in found[kind].items() if error > 2e-6} == {}


def test_matrices_of_muon_take_its_own_step(found: dict[str, dict[str, float]]) -> None:
    assert {name: error for name, error in found["muon"].items() if error > 2e-6} == {}


if __name__ == "__main__":
    print_json(interpret)
