"""The attention kernels, for short sequences and longer ones, against float64, run by Triton's interpreter."""

import copy
from typing import Any

import pytest
import torch
from tests.fast.interpreter import distance, interpreted, print_json
from timm.layers import RmsNorm
from timm.models.vision_transformer import Attention, VisionTransformer
from torch import Tensor, nn
from torch.nn import functional

from pmae.fast import attention as layers
from pmae.models.encoder import run_blocks as plain_blocks

# Tokens, heads and their width: each edge of the kernels' tiles once; the GPU suite crosses them.
SHAPES = [(2, 1, 16), (5, 12, 16), (17, 3, 32), (17, 1, 24), (32, 2, 8), (33, 3, 24), (40, 3, 24), (65, 1, 64)]
SHAPES += [(66, 2, 32), (128, 1, 32)]
HALF_SHAPES = [(2, 3, 64), (17, 2, 32), (33, 3, 16), (65, 2, 16)]
CASES = [("float32", *shape) for shape in SHAPES]
CASES += [(dtype, *shape) for dtype in ("bfloat16", "float16") for shape in HALF_SHAPES]
BOUND = {"float32": 3e-6, "bfloat16": 2**-7, "float16": 2**-10}  # in units of the largest element: an ulp or two
SUM_SHAPES = [(5, 12, 16), (40, 3, 24), (65, 1, 24)]
SUMS = [(dtype, *shape) for dtype in BOUND for shape in SUM_SHAPES]
FLASH_SHAPES = [("float32", 129, 2, 16), ("float32", 192, 1, 24), ("bfloat16", 130, 2, 32), ("float16", 197, 1, 64)]
"""One token more than whole blocks, whole blocks alone, and two and five beyond."""
SPECIAL = dict.fromkeys(("strided", "layer", "group", "last token"), BOUND["float32"])
SPECIAL |= {f"sums {dtype}": bound for dtype, bound in BOUND.items()}
SPECIAL |= {f"flash {dtype}": bound for dtype, bound in BOUND.items()}
SPECIAL["sharp"] = 2e-3  # scores of several thousand, whose float32 rounding alone is near 3e-4 in the exponent


def reference(qkv: Tensor, heads: int, scale: float) -> Tensor:
    """Attention by torch, in the precision of qkv."""
    q, k, v = qkv.unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    return functional.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2).flatten(2)


def errors(qkv: Tensor, heads: int, scale: float) -> list[float]:
    """Errors of the output and of the gradient."""
    from pmae.fast.attention_kernels import short_attention

    qkv = qkv.detach().requires_grad_()
    exact = qkv.detach().double().requires_grad_()
    out, expected = short_attention(qkv, heads, scale), reference(exact, heads, scale)
    grad = torch.randn(out.shape).to(out.dtype)
    out.backward(grad)
    expected.backward(grad.double())
    assert qkv.grad is not None
    assert exact.grad is not None
    assert (out.dtype, qkv.grad.dtype) == (qkv.dtype, qkv.dtype)
    return [distance(out, expected), distance(qkv.grad, exact.grad)]


def sum_errors(dtype: str, tokens: int, heads: int, width: int) -> list[float]:
    """Errors of the gradient and of its sums over the tokens, each written into given memory."""
    from pmae.fast.attention_kernels import backward_into

    qkv, grad = (torch.randn(2, tokens, n * heads * width).to(getattr(torch, dtype)) for n in (3, 1))
    expected = torch.func.vjp(lambda exact: reference(exact, heads, width**-0.5), qkv.double())[1](grad.double())[0]
    found, sums = torch.full_like(qkv, torch.nan), torch.full((2, 3 * heads * width), torch.nan)
    backward_into(found, sums, qkv, grad, heads, width**-0.5)
    return [distance(found, expected), distance(sums, expected.sum(1))]


def flash_errors(dtype: str, tokens: int, heads: int, width: int, scale: float | None = None) -> list[float]:
    """Errors of the kernels for longer sequences: output, gradient, and its sums, each written into given memory."""
    from pmae.fast import flash_kernels

    scale = scale or width**-0.5
    qkv, grad = (torch.randn(2, tokens, n * heads * width).to(getattr(torch, dtype)) for n in (3, 1))
    expected, pull = torch.func.vjp(lambda exact: reference(exact, heads, scale), qkv.double())
    out, to, sums = (
        torch.full_like(grad, torch.nan),
        torch.full_like(qkv, torch.nan),
        torch.full((2, 3 * heads * width), torch.nan),
    )
    log_sum = flash_kernels.forward_into(out, qkv, heads, scale)
    flash_kernels.backward_into(to, sums, qkv, out, log_sum, grad, scale)
    exact = pull(grad.double())[0]
    return [distance(out, expected), distance(to, exact), distance(sums, exact.sum(1))]


def last_token_errors(tokens: int, share: str) -> list[float]:
    """Errors where every query gives the last key all its weight, or none."""
    qkv = torch.randn(1, tokens, 96)
    qkv[:, :, :32] += 4.0
    qkv[:, -1, 32:64] = 8.0 if share == "all" else -8.0  # a score of 128, give or take, in heads of 16
    return errors(qkv, 2, 0.25)


def layer_errors() -> list[float]:
    """Errors of a whole layer that takes the kernel, output and qkv weight's gradient, against timm's in float64."""
    plain = Attention(48, num_heads=3, qkv_bias=True)
    exact = copy.deepcopy(plain).double()
    x = torch.randn(2, 17, 48)
    layers.attend(plain, x).square().sum().backward()
    exact(x.double()).square().sum().backward()
    return [
        distance(layers.attend(plain, x), exact(x.double())),
        distance(plain.qkv.weight.grad, exact.qkv.weight.grad),
    ]


def interpret(patch: pytest.MonkeyPatch) -> dict[str, list[float]]:
    """Every case's errors; only where Triton interprets."""
    from pmae.fast import attention_kernels as kernels

    patch.setattr(kernels, "wrap_triton", lambda kernel: kernel)  # one interpreted cannot be traced, nor need it be
    patch.setattr(layers, "available", lambda device, tokens, head_dim: True)
    torch.manual_seed(0)
    found = {}
    for name, tokens, heads, width in CASES:
        qkv = torch.randn(1 + (heads == 1), tokens, 3 * heads * width).to(getattr(torch, name))
        found[case_key((name, tokens, heads, width))] = errors(qkv, heads, width**-0.5)
    found |= {f"sums {case_key(case)}": sum_errors(*case) for case in SUMS}
    for tokens in (17, 33, 65):
        found |= {f"last token gets {share} of {tokens}": last_token_errors(tokens, share) for share in ("all", "none")}
    found |= {f"sharp {tokens}": errors(torch.randn(1, tokens, 96) * 30, 2, 1.0) for tokens in (17, 20, 33, 65)}
    found |= {f"flash {case_key(case)}": flash_errors(*case) for case in FLASH_SHAPES}
    found["sharp flash"] = flash_errors("float32", 133, 1, 16, scale=900.0)
    found["strided"] = errors(torch.randn(1, 96, 17).transpose(1, 2), 2, 0.3)
    found["layer"] = layer_errors()
    for tokens, group in [(n, group) for n in (17, 20) for group in (1, 2, 4)]:
        patch.setattr(kernels, "plan", lambda heads, width, group=group: group)
        found[f"group {tokens} {group}"] = errors(torch.randn(2, tokens, 3 * 64), 4, 0.25)
    return found


def case_key(case: tuple[str, int, int, int]) -> str:
    """A case as text, for JSON and for the test's name."""
    return "-".join(map(str, case))


@pytest.fixture(scope="module")
def found() -> dict[str, list[float]]:
    return interpreted(interpret)


@pytest.mark.parametrize("case", CASES, ids=case_key)
def test_output_and_gradient_match_float64(found: dict[str, list[float]], case: tuple[str, int, int, int]) -> None:
    assert max(found[case_key(case)]) < BOUND[case[0]]


@pytest.mark.parametrize("kind", SPECIAL)
def test_special_cases_match_float64(found: dict[str, list[float]], kind: str) -> None:
    cases = {name: max(case) for name, case in found.items() if name.startswith(kind)}
    assert max(cases.values()) < SPECIAL[kind], cases


def small_vit(**options: Any) -> VisionTransformer:
    return VisionTransformer(img_size=16, patch_size=8, embed_dim=48, depth=3, num_heads=3, num_classes=0, **options)


@pytest.mark.parametrize("options", [{}, {"qk_norm": True, "norm_layer": RmsNorm}, {"attn_drop_rate": 0.5}], ids=str)
@pytest.mark.parametrize("last", [None, 2])
def test_where_nothing_is_faster_blocks_are_timms(options: dict[str, Any], last: int | None) -> None:
    net, x, found = small_vit(**options), torch.randn(2, 5, 48), []
    for run in (plain_blocks, layers.run_blocks):
        torch.manual_seed(1)  # dropout must draw the same
        found.append(run(net.blocks, net.norm, x, last))
    torch.testing.assert_close(*found)


def test_only_plain_layers_do_without_timm() -> None:
    """What must stay with timm: normalized queries, dropped weights while training, classes of another name."""
    normed, dropping = Attention(32, 2, qk_norm=True, norm_layer=nn.LayerNorm), Attention(32, 2, attn_drop=0.1)
    module = nn.ModuleList([Attention(32, 2), normed, dropping, type("Other", (Attention,), {})(32, 2)])
    assert [layers.is_plain(layer) for layer in module] == [True, False, False, False]
    assert [layers.is_plain(layer) for layer in module.eval()] == [True, False, True, False]


def test_each_call_decides_by_its_own_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer, as on a GPU: the kernel up to 128 tokens, timm's own forward above."""
    seen = []

    def kernel(qkv: Tensor, heads: int, scale: float) -> Tensor:
        seen.append(qkv.shape[1])
        return reference(qkv, heads, scale)

    monkeypatch.setattr(layers, "short_attention", kernel)
    monkeypatch.setattr(layers, "on_recent_gpu", lambda device: True)
    layer = Attention(32, num_heads=2)
    for tokens in (2, 17, 32, 33, 128, 129):
        x = torch.randn(2, tokens, 32)
        torch.testing.assert_close(layers.attend(layer, x), layer(x))
    assert seen == [2, 17, 32, 33, 128]


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 12, 16])
@pytest.mark.parametrize("head_dim", [8, 16, 24, 32, 64])
def test_plan_divides_the_heads(heads: int, head_dim: int) -> None:
    kernels = pytest.importorskip("pmae.fast.attention_kernels")
    group = kernels.plan(heads, head_dim)
    assert heads % group == 0
    assert group & (group - 1) == 0  # Triton's tiles and warps come in powers of two


def test_compiles_in_one_graph() -> None:
    net, x = small_vit(), torch.randn(2, 5, 48)
    run = torch.compile(layers.run_blocks, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(run(net.blocks, net.norm, x), net.norm(net.blocks(x)))


def test_cpu_in_bfloat16_is_plain_gemms(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer, x = Attention(48, num_heads=3, qkv_bias=True), torch.randn(4, 17, 48, requires_grad=True)
    exact = copy.deepcopy(layer).double()(x.detach().double())
    by_gemms, used = layers._by_gemms, []
    monkeypatch.setattr(layers, "_by_gemms", lambda *inputs: used.append(1) or by_gemms(*inputs))
    torch.testing.assert_close(layers.attend(layer, x).double(), exact, rtol=1e-5, atol=1e-6)
    assert not used
    with torch.autocast("cpu", torch.bfloat16):
        out = layers.attend(layer, x)
    assert len(used) == 1
    assert distance(out, exact) < 2**-6
    out.float().square().sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_cpu_in_float32_has_timms_bits_and_copies_less() -> None:
    torch.manual_seed(0)
    layer, found, copies = Attention(48, num_heads=3, qkv_bias=True), [], []
    images = torch.randn(4, 17, 48)
    for attend in (layer, lambda x: layers.attend(layer, x)):
        x = images.clone().requires_grad_()
        with torch.profiler.profile() as profile:
            out = attend(x)
            grads = torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])
        found.append([out, *grads])
        copies.append(sum(event.name == "aten::copy_" for event in profile.events()))
    assert all(torch.equal(theirs, ours) for theirs, ours in zip(*found, strict=True))
    assert copies[1] < copies[0]


def test_cpu_has_no_kernel() -> None:
    assert not layers.available(torch.device("cpu"), 5, 16)


if __name__ == "__main__":
    print_json(interpret)
