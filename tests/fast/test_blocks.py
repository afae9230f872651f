"""The fused stack of blocks against timm's own blocks in float64, run on the CPU by Triton's interpreter."""

import copy
from typing import Any

import pytest
import torch
from tests.fast.interpreter import interpreted, print_json
from timm.layers.drop import DropPath
from timm.layers.patch_embed import PatchEmbed
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from pmae.fast import attention
from pmae.fast import blocks as stack
from pmae.models.encoder import embed_patches

CASES = {"17 tokens": (17, 32, 2), "odd width": (5, 24, 1), "odd bytes": (5, 20, 1)}
"""Tokens, width and heads: few, since an interpreter is slow; the GPU suite has them up to 257 tokens."""
BOUND = {"float32": 2e-5, "bfloat16": 0.03}
DROPPED = {"5 tokens": (5, 24, 1)}
LAST = {
    "3 of 130 tokens": (130, 16, 1, 3),
    "3 of 321 tokens": (321, 8, 1, 3),
    "6 of 9 tokens": (9, 32, 2, 6),
    "1 of 5 tokens": (5, 24, 1, 1),
    "all of 5 tokens": (5, 24, 1, 5),
}
IMAGES = 5
"""With 5 tokens an image, and four rows at a time, the kernels' programs lie across images."""


class Times(nn.Module):
    """A place of stochastic depth whose factors are given."""

    def __init__(self, factors: Tensor) -> None:
        super().__init__()
        self.factors = factors

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factors[:, None, None].to(x)


def blocks_of(width: int, heads: int, **options: Any) -> tuple[nn.Sequential, nn.LayerNorm]:
    """Two blocks and a norm whose every parameter is random, biases too."""
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block(width, heads, qkv_bias=True, **options) for _ in range(2)))
    norm = nn.LayerNorm(width, eps=1e-6)
    for layer in blocks.modules():
        if isinstance(layer, nn.LayerNorm):
            layer.eps = 1e-6
    for p in [*blocks.parameters(), *norm.parameters()]:
        nn.init.normal_(p, 0.5 if p.ndim == 1 else 0.0, 0.3)
    return blocks, norm


def run(blocks: nn.Sequential, norm: nn.Module, x: Tensor, fused: bool, last: int | None = None) -> list[Tensor]:
    """Output, all or of the last tokens, gradient of the input and gradients of all parameters."""
    x = x.detach().clone().requires_grad_()
    out = stack._run_fused(blocks, norm, x, last) if fused else norm(blocks(x))[:, -(last or x.shape[1]) :]
    return results(out, x, blocks, norm)


def results(out: Tensor, x: Tensor, blocks: nn.Sequential, norm: nn.Module) -> list[Tensor]:
    """An output and what follows from it backward."""
    (out.double() * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
    found = [out.detach(), x.grad, *(p.grad for p in [*blocks.parameters(), *norm.parameters()])]
    assert all(tensor is not None for tensor in found)
    return found  # type: ignore[return-value]


def distance(got: list[Tensor], expected: list[Tensor]) -> float:
    """The largest error of any tensor in units of its own largest element."""
    ratios = [((a.double() - b).abs().max() / b.abs().max()).item() for a, b in zip(got, expected, strict=True)]
    return max(ratio if ratio == ratio else float("inf") for ratio in ratios)


def errors(tokens: int, width: int, heads: int, last: int | None, dtype: str, depth: int = 2, **options: Any) -> float:
    """The fused stack against timm in float64."""
    blocks, norm = blocks_of(width, heads, **options)
    blocks, x = blocks[:depth], torch.randn(2, tokens, width)
    expected = run(copy.deepcopy(blocks).double(), copy.deepcopy(norm).double(), x.double(), False, last)
    return distance(run(in_dtype(blocks, dtype), norm, x, True, last), expected)


def in_dtype(blocks: nn.Sequential, dtype: str) -> nn.Sequential:
    """The blocks with their GEMMs in this dtype; norms keep float32, as they do under the step."""
    for layer in blocks.modules():
        if isinstance(layer, nn.Linear):
            layer.to(getattr(torch, dtype))
    return blocks


def with_places(blocks: nn.Sequential, places: list[nn.Module]) -> nn.Sequential:
    """A copy with these modules at the ends of the branches, in the order in which they run."""
    blocks = copy.deepcopy(blocks)
    for index, place in enumerate(places):
        setattr(blocks[index // 2], f"drop_path{index % 2 + 1}", place)
    return blocks


def some_rates() -> list[nn.Module]:
    """Four places: one that never drops, and three rates, of which one is not made up for."""
    return [nn.Identity(), DropPath(0.3), DropPath(0.5, scale_by_keep=False), DropPath(0.6)]


def drop_errors(tokens: int, width: int, heads: int, dtype: str, last: int | None = None) -> float:
    """The fused stack that drops branches against timm's blocks in float64 with the same factors."""
    blocks, norm = blocks_of(width, heads)
    x = torch.randn(IMAGES, tokens, width)
    torch.manual_seed(4)
    factors = stack._draw_factors(some_rates(), x)
    assert factors is not None
    assert all(0 < (row == 0).sum() < IMAGES for row in factors[1:])
    reference = with_places(blocks, [Times(row) for row in factors]).double()
    expected = run(reference, copy.deepcopy(norm).double(), x.double(), False, last)
    torch.manual_seed(4)
    return distance(run(in_dtype(with_places(blocks, some_rates()), dtype), norm, x, True, last), expected)


def bare_errors(dtype: str) -> float:
    """The residual stream without a last norm, as a teacher's layers need it, block after block."""
    blocks, _ = blocks_of(24, 1)
    x, expected = torch.randn(2, 5, 24), copy.deepcopy(blocks).double()
    with torch.no_grad():
        wanted = [expected[0](x.double()), expected(x.double())]
        first = stack._run_fused(in_dtype(blocks, dtype)[:1], nn.Identity(), x)
        return distance([first, stack._run_fused(blocks[1:], nn.Identity(), first)], wanted)


def idle_difference(training: bool, rate: float) -> float:
    """What DropPath changes where it drops nothing: the largest difference of any number."""
    blocks, norm = blocks_of(24, 1)
    x = torch.randn(2, 5, 24)
    dropping = with_places(blocks, [DropPath(rate) for _ in range(4)]).train(training)
    got, expected = run(dropping, copy.deepcopy(norm), x, fused=True), run(blocks, norm, x, fused=True)
    return max((a - b).abs().max().item() for a, b in zip(got, expected, strict=True))


def interpret(patch: pytest.MonkeyPatch) -> dict[str, float]:
    """Every case's error; only where Triton interprets."""
    from pmae.fast import attention_kernels

    patch.setattr(attention_kernels, "wrap_triton", lambda kernel: kernel)
    answer = {f"{name} {dtype}": errors(*case, None, dtype) for dtype in BOUND for name, case in CASES.items()}
    answer |= {f"{name} float32": errors(*case, "float32") for name, case in LAST.items()}
    answer |= {
        "one block": errors(5, 24, 1, 3, "float32", depth=1),
        "last and drop": drop_errors(5, 24, 1, "float32", 3),
    }
    answer |= {f"{name} {dtype} drop": drop_errors(*case, dtype) for dtype in BOUND for name, case in DROPPED.items()}
    answer |= {f"bare {dtype}": bare_errors(dtype) for dtype in BOUND}
    answer |= {f"scaled {dtype}": errors(5, 24, 1, 3, dtype, init_values=0.1) for dtype in BOUND}
    return answer | {"eval": idle_difference(False, 0.5), "rate 0": idle_difference(True, 0.0)}


@pytest.fixture(scope="module")
def found() -> dict[str, float]:
    return interpreted(interpret)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", BOUND)
def test_the_fused_stack_is_timms_blocks(found: dict[str, float], case: str, dtype: str) -> None:
    assert found[f"{case} {dtype}"] < BOUND[dtype]


@pytest.mark.parametrize("case", LAST)
def test_the_last_tokens_alone_are_those_of_timms_blocks(found: dict[str, float], case: str) -> None:
    assert found[f"{case} float32"] < BOUND["float32"]


@pytest.mark.parametrize("case", ["one block", "last and drop"])
def test_the_last_tokens_of_one_block_and_of_dropped_branches(found: dict[str, float], case: str) -> None:
    assert found[case] < BOUND["float32"]


@pytest.mark.parametrize("dtype", BOUND)
def test_without_a_last_norm_the_residual_stream_comes_out(found: dict[str, float], dtype: str) -> None:
    assert found[f"bare {dtype}"] < BOUND[dtype]


@pytest.mark.parametrize("dtype", BOUND)
def test_layer_scale_is_timms_and_learns(found: dict[str, float], dtype: str) -> None:
    """As DINOv2 and DeiT III have it; its gradient is among those compared."""
    assert found[f"scaled {dtype}"] < BOUND[dtype]


@pytest.mark.parametrize("case", DROPPED)
@pytest.mark.parametrize("dtype", BOUND)
def test_branches_are_dropped_as_in_timms_blocks(found: dict[str, float], case: str, dtype: str) -> None:
    assert found[f"{case} {dtype} drop"] < BOUND[dtype]


@pytest.mark.parametrize("case", ["eval", "rate 0"])
def test_drop_path_that_drops_nothing_changes_no_number(found: dict[str, float], case: str) -> None:
    assert found[case] == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_factors_are_those_timm_draws_under_the_same_seed(dtype: str) -> None:
    """In timm's bfloat16 a factor is rounded, here it is not; the images are the same."""
    places, ones = some_rates(), torch.ones(64, 3, 2, dtype=getattr(torch, dtype))
    torch.manual_seed(5)
    factors = stack._draw_factors(places, ones)
    torch.manual_seed(5)
    expected = torch.stack([place(ones)[:, 0, 0] for place in places]).float()
    assert factors is not None
    assert factors.dtype == torch.float32
    assert 0 < (factors == 0).sum() < factors.numel()
    torch.testing.assert_close(factors, expected, rtol=0 if dtype == "float32" else 2**-8, atol=0)


def test_places_that_drop_nothing_draw_nothing() -> None:
    before = torch.get_rng_state()
    assert stack._draw_factors([nn.Identity(), DropPath(0.0), DropPath(0.5).eval()], torch.ones(2, 3, 4)) is None
    assert torch.equal(torch.get_rng_state(), before)


def test_a_place_that_drops_all_has_factors_of_zero() -> None:
    factors = stack._draw_factors([DropPath(1.0), nn.Identity()], torch.ones(3, 2, 4))
    assert factors is not None
    assert factors.tolist() == [[0.0] * 3, [1.0] * 3]


def test_stochastic_depth_is_fused_and_a_foreign_module_in_its_place_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(attention, "on_recent_gpu", lambda device: True)
    x = torch.zeros(1, 17, 48)
    blocks, norm = blocks_of(48, 3)
    blocks.bfloat16()
    assert stack._fusable(with_places(blocks, some_rates()), norm, x)
    for foreign in (Times(torch.ones(1)), nn.Dropout(0.5), type("OtherDropPath", (DropPath,), {})(0.5)):
        assert not stack._fusable(with_places(blocks, [nn.Identity(), foreign]), norm, x)
    assert stack._fusable(blocks_of(48, 3, init_values=0.1)[0].bfloat16(), norm, x)
    blocks[1].ls1 = DropPath(0.5)
    assert not stack._fusable(blocks, norm, x)


def test_only_plain_blocks_with_bf16_weights_are_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(attention, "on_recent_gpu", lambda device: True)
    x = torch.zeros(1, 17, 48)
    blocks, norm = blocks_of(48, 3)
    assert not stack._fusable(blocks, norm, x)
    blocks.bfloat16()
    assert stack._fusable(blocks, norm, x)
    assert not stack._fusable(blocks, nn.Identity(), x)
    with torch.no_grad():
        assert stack._fusable(blocks, nn.Identity(), x)
    for other in ({"qk_norm": True}, {"proj_bias": False}, {"qkv_bias": False}, {"scale_mlp_norm": True}):
        net = VisionTransformer(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3, **other)
        assert not stack._fusable(net.blocks.bfloat16(), net.norm, x)
    blocks[0].mlp.act = nn.ReLU()
    assert not stack._fusable(blocks, norm, x)


def test_blocks_that_are_not_fused_run_as_timm_wrote_them() -> None:
    blocks, norm = blocks_of(48, 3)
    x = torch.randn(2, 17, 48)
    assert torch.equal(stack.run_blocks(blocks, norm, x), norm(blocks(x)))


class Other(Block):
    """A block of another class, as torch's sharding makes one."""


@pytest.mark.parametrize("kind", [Block, Other])
def test_the_last_tokens_alone_equal_those_of_all(kind: type[Block]) -> None:
    torch.manual_seed(0)
    blocks = nn.Sequential(*(kind(24, 2, qkv_bias=True, init_values=0.5, drop_path=0.4) for _ in range(2))).double()
    norm, x = nn.LayerNorm(24).double(), torch.randn(6, 9, 24, dtype=torch.float64, requires_grad=True)
    expected, got = copy.deepcopy((blocks, norm, x)), (blocks, norm, x)
    torch.manual_seed(1)
    whole = run(*expected, fused=False, last=4)
    torch.manual_seed(1)
    assert distance(results(stack.run_blocks(*got, 4), got[2], *got[:2]), whole) < 1e-12


def test_tokens_that_nobody_reads_do_not_pass_the_last_mlp() -> None:
    blocks, norm = blocks_of(24, 1)
    seen: list[int] = []
    for block in blocks:
        block.mlp.register_forward_hook(lambda layer, inputs, output: seen.append(output.shape[1]))
    assert stack.run_blocks(blocks, norm, torch.randn(2, 5, 24), 3).shape == (2, 3, 24)
    assert seen == [5, 3]


def test_the_patch_embedding_as_a_gemm_is_the_convolution() -> None:
    layer, x = PatchEmbed((8, 16), (4, 8), 3, 16), torch.randn(2, 3, 8, 16)
    expected = embed_patches(layer, x)
    assert torch.equal(stack.embed_patches(layer, x), expected)
    half = stack.embed_patches(layer.bfloat16(), x.bfloat16())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), expected, rtol=0.05, atol=0.05)


if __name__ == "__main__":
    print_json(interpret)
