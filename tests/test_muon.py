"""Muon: its steps against torch's own, its matrices against singular values, and training with it to the same bits."""

import copy
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from pmae import muon
from pmae.config import Config, OptimConfig, replace
from pmae.data.images import Splits
from pmae.derive import resolve
from pmae.errors import UserError
from pmae.method import build_method
from pmae.muon import COEFFICIENTS, ITERATIONS, Muon, is_block_matrix, orthogonalized
from pmae.runs import Run
from pmae.train.distributed import require_shardable
from pmae.train.loop import pretrain
from pmae.train.step import build_optimizer

LR, DECAY = 0.02, 0.1


class Model(nn.Module):
    """A block with queries, keys and values in one matrix, a tall and a wide one, and weights that AdamW updates."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"qkv": (16, 48), "proj": (16, 16), "fc1": (16, 40), "fc2": (40, 16)}
        blocks = ({name: nn.Linear(*size) for name, size in sizes.items()} for _ in range(2))
        self.blocks = nn.ModuleList(map(nn.ModuleDict, blocks))
        self.head = nn.Linear(16, 3)


def matrices(model: Model) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if "blocks" in name and p.ndim == 2]


def pieces(p: Tensor) -> list[Tensor]:
    return list(p.detach().chunk(3 if p.shape[0] == 3 * p.shape[1] else 1))


def after_iterations(values: Tensor) -> Tensor:
    """What becomes of singular values."""
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        values = a * values + b * values**3 + c * values**5
    return values


@pytest.mark.parametrize("size", [(5, 32, 32), (3, 24, 60)])
def test_singular_vectors_stay_and_singular_values_are_near_one(size: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    given = torch.randn(size).double()
    left, values, right = torch.linalg.svd(given, full_matrices=False)
    values = values / values.norm(dim=-1, keepdim=True)
    large, values = values > 0.02, after_iterations(values)
    assert 0.6 < values[large].min() < values[large].max() < 1.3
    torch.testing.assert_close(left.mT @ orthogonalized(given) @ right.mT, torch.diag_embed(values), atol=1e-5, rtol=0)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_steps_are_those_of_torchs_muon_and_adamw() -> None:
    """Torch's computes in bfloat16, which is all that they differ by."""
    torch.manual_seed(0)
    model = Model()
    other, start = copy.deepcopy(model), [p.detach().clone() for p in matrices(model)]
    ours = build_optimizer(model, OptimConfig(name="muon", weight_decay=DECAY), on_graph=False)
    parts = [nn.Parameter(piece.clone()) for p in matrices(other) for piece in pieces(p)]
    theirs = torch.optim.Muon(parts, lr=LR, weight_decay=DECAY, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    rest = [p for p in other.parameters() if not any(p is matrix for matrix in matrices(other))]
    decayed = [{"params": [p], "weight_decay": DECAY if p.ndim == 2 else 0.0} for p in rest]
    adamw = torch.optim.AdamW(decayed, lr=LR, betas=OptimConfig().betas)
    for group in ours.param_groups:
        group["lr"] = LR
    for _ in range(4):
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        gradients = [piece for p in matrices(model) if p.grad is not None for piece in pieces(p.grad)]
        for part, gradient in zip(parts, gradients, strict=True):
            part.grad = gradient.clone()
        ours.step(), theirs.step(), adamw.step()
    expected = iter(parts)
    for p, before in zip(matrices(model), start, strict=True):
        exact = torch.cat([next(expected).detach() for _ in pieces(p)])
        assert float((p.detach() - exact).norm() / (exact - before).norm()) < 0.03
    torch.testing.assert_close(model.head.weight, other.head.weight)
    torch.testing.assert_close(model.blocks[1]["fc1"].bias, other.blocks[1]["fc1"].bias)


def test_groups_have_their_own_rates_and_are_orthogonalized_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first step, whose direction is the gradient's, in float64 against singular value decompositions."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(p.detach().double()) for p in matrices(Model())]
    before, halves = [p.detach().clone() for p in parameters], (parameters[:5], parameters[5:])
    given = zip(halves, (LR, LR / 4), (DECAY, 0.0), strict=True)
    groups = [{"params": half, "lr": lr, "weight_decay": decay, "orthogonal": True} for half, lr, decay in given]
    optimizer, stacks = Muon(groups), list[torch.Size]()
    monkeypatch.setattr(muon, "orthogonalized", lambda x: stacks.append(x.shape) or orthogonalized(x))
    for p in parameters:
        p.grad = torch.randn_like(p)
    gradients = [p.grad.clone() for p in parameters if p.grad is not None]
    optimizer.step()
    assert sorted(stacks) == [(4, 16, 40), (8, 16, 16)]
    rates = [(group["lr"], group["weight_decay"]) for group in groups for _ in group["params"]]
    for p, was, gradient, (lr, decay) in zip(parameters, before, gradients, rates, strict=True):
        step = torch.cat([by_decomposition(piece) * 0.2 * max(piece.shape) ** 0.5 for piece in pieces(gradient)])
        torch.testing.assert_close(p.detach(), was - lr * decay * was - lr * step, atol=1e-7, rtol=0)


def by_decomposition(matrix: Tensor) -> Tensor:
    """The polynomial of its singular values."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    return left @ torch.diag(after_iterations(values / values.norm())) @ right


def test_copies_follow_where_only_some_matrices_have_one() -> None:
    model = Model()
    optimizer = build_optimizer(model, OptimConfig(name="muon"), on_graph=False)
    assert isinstance(optimizer, Muon)
    copies = {p: nn.Parameter(p.detach().bfloat16()) for p in matrices(model)[1:]}
    for group in optimizer.param_groups:
        group["lr"] = LR
    for p in matrices(model):
        leaf = copies.get(p, p)
        leaf.grad = torch.randn_like(leaf)
    before = [p.detach().clone() for p in matrices(model)]
    optimizer.update_matrices(lambda p: copies.get(p, p))
    assert not any(torch.equal(p, was) for p, was in zip(matrices(model), before, strict=True))
    assert all(torch.equal(copy, p.bfloat16()) for p, copy in copies.items())


def test_tables_of_relative_positions_are_no_matrices() -> None:
    with torch.device("meta"):
        swin = timm.create_model("swin_tiny_patch4_window7_224", num_classes=0)
    chosen = {name.rpartition(".")[2] for name, p in swin.named_parameters() if is_block_matrix(name, p)}
    assert chosen == {"weight"}


def test_a_matrix_without_a_gradient_stays_as_it_is() -> None:
    model = Model()
    optimizer = build_optimizer(model, OptimConfig(name="muon"), on_graph=False)
    assert isinstance(optimizer, Muon)
    used, unused = model.blocks[0]["proj"].weight, model.blocks[1]["proj"].weight
    before, was = unused.detach().clone(), used.detach().clone()
    for group in optimizer.param_groups:
        group["lr"] = LR
    used.grad = torch.randn_like(used)
    optimizer.step()
    assert torch.equal(unused, before)
    assert not optimizer.state[unused]
    assert not torch.equal(used, was)


def test_a_network_without_blocks_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"optim.name must be adamw for networks without matrices in blocks, got 'muon'"
    ):
        build_optimizer(nn.Linear(4, 4), OptimConfig(name="muon"), on_graph=False)


@pytest.mark.usefixtures("no_figures")
def test_training_goes_on_to_the_same_bits(tiny: Config, toy: Splits, tmp_path: Path) -> None:
    settled = resolve(replace(tiny, optim__name="muon"), len(toy.train), toy.train.shape, gpu=False)[0]
    whole = pretrain(settled, toy, tmp_path / "whole", quiet=True)
    pretrain(settled, toy, tmp_path / "half", quiet=True, until=2)
    again = pretrain(settled, toy, tmp_path / "half", resume=True, quiet=True)
    found, expected = ({**load_file(run.checkpoint() / "encoder.safetensors")} for run in (again, whole))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    kept = load_file(Run(whole.path).checkpoint() / "optimizer.safetensors")
    assert "encoder.net.blocks.0.attn.qkv.weight/momentum_buffer" in kept
    assert "encoder.net.blocks.0.attn.qkv.weight/exp_avg" not in kept
    assert "encoder.net.norm.weight/exp_avg" in kept


def test_beside_a_contrastive_loss_it_has_twice_the_rate(tiny: Config) -> None:
    for weight, times in ((1.0, 2.0), (0.0, 1.0)):
        config = replace(tiny, optim__base_lr=None, objective__contrastive_weight=weight)
        rates = [resolve(replace(config, optim__name=n), 128, (3, 16, 16))[0].optim.base_lr for n in ("adamw", "muon")]
        assert rates[1] == pytest.approx(times * (rates[0] or 0.0))


def test_whole_matrices_are_not_divided(tiny: Config) -> None:
    config = resolve(replace(tiny, optim__name="muon", train__shard=True), 128, (3, 16, 16))[0]
    with pytest.raises(UserError, match=r"train.shard must be off where optim.name is muon"):
        require_shardable(config, build_method(config, (3, 16, 16)), 2)
