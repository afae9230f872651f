"""Every kernel on the card against float64."""

import copy

import pytest
import torch
from tests.gpu.conftest import Within
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional

from pmae import fast, masking
from pmae.fast import blocks

TOKENS = (5, 17, 33, 50, 65, 197, 257, 330)
HEADS = ((12, 16), (16, 32), (5, 24), (1, 16))
BOUND = {torch.float32: 2e-3, torch.bfloat16: 1e-2}
"""Relative to the norm; float32 allows for matrix units that round to TF32."""


def relative(found: Tensor, exact: Tensor) -> float:
    """Norm of the error over the norm of the exact result; infinite where anything is not a number."""
    error = float(((found.double() - exact).norm() / exact.norm().clamp_min(1e-30)).detach())
    return error if error == error else float("inf")


def exact_attention(qkv: Tensor, heads: int, scale: float) -> Tensor:
    q, k, v = qkv.unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    return ((q @ k.transpose(-2, -1) * scale).softmax(-1) @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    ("heads", "width", "dtype"), [(*head, dtype) for dtype in BOUND for head in HEADS] + [(3, 64, torch.bfloat16)]
)
@pytest.mark.parametrize("tokens", [n for n in TOKENS if n <= 128])
def test_attention_forward_and_backward(
    tokens: int, heads: int, width: int, dtype: torch.dtype, assert_within: Within
) -> None:
    from pmae.fast.attention_kernels import short_attention

    torch.manual_seed(tokens)
    qkv = torch.randn(8, tokens, 3 * heads * width, device="cuda").to(dtype).requires_grad_()
    exact = qkv.detach().double().requires_grad_()
    out, expected = short_attention(qkv, heads, width**-0.5), exact_attention(exact, heads, width**-0.5)
    grad = torch.randn_like(out)
    out.backward(grad)
    expected.backward(grad.double())
    assert qkv.grad is not None
    assert exact.grad is not None
    assert_within(f"attention forward, {dtype}", relative(out, expected), BOUND[dtype])
    assert_within(f"attention backward, {dtype}", relative(qkv.grad, exact.grad), BOUND[dtype])


@pytest.mark.parametrize(("heads", "width"), [(12, 16), (16, 32), (5, 24), (6, 64)])
@pytest.mark.parametrize("tokens", [129, 197, 224, 257, 320])
def test_attention_over_longer_sequences(tokens: int, heads: int, width: int, assert_within: Within) -> None:
    """Twice, as a program reads what its own warps have written: a race would give two answers."""
    from pmae.fast import flash_kernels

    torch.manual_seed(tokens)
    qkv, grad = (torch.randn(64, tokens, n * heads * width, device="cuda").bfloat16() for n in (3, 1))
    exact = qkv.double().requires_grad_()
    expected = exact_attention(exact, heads, width**-0.5)
    expected.backward(grad.double())
    assert exact.grad is not None
    found = []
    for _ in range(2):
        out, to = torch.full_like(grad, torch.nan), torch.full_like(qkv, torch.nan)
        sums = torch.full((64, 3 * heads * width), torch.nan, device="cuda")
        log_sum = flash_kernels.forward_into(out, qkv, heads, width**-0.5)
        flash_kernels.backward_into(to, sums, qkv, out, log_sum, grad, width**-0.5)
        found.append([out, to, sums])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    exacts = {"forward": expected.detach(), "backward": exact.grad, "sums": exact.grad.sum(1)}
    for (what, reference), got in zip(exacts.items(), found[0], strict=True):
        assert_within(f"longer attention, {what}", relative(got, reference), BOUND[torch.bfloat16])


def network(tokens: int, heads: int, drop: float = 0.0, layer_scale: float | None = None) -> VisionTransformer:
    """A ViT of two blocks whose sequences have this many tokens, [CLS] among them."""
    torch.manual_seed(0)
    net = VisionTransformer(
        img_size=(4, 4 * (tokens - 1)), patch_size=4, embed_dim=16 * heads, depth=2, num_heads=heads,
        num_classes=0, drop_path_rate=drop, init_values=layer_scale,
    )  # fmt: skip
    return net.cuda()


@pytest.mark.parametrize(
    ("tokens", "heads", "last", "layer_scale"),
    [(tokens, heads, last, None) for tokens in TOKENS for heads in (3, 12) for last in (None, 3)]
    + [(tokens, 6, last, 0.1) for tokens in (17, 257) for last in (None, 3)],
)
def test_fused_blocks_are_timms_in_float64(
    tokens: int, heads: int, last: int | None, layer_scale: float | None, assert_within: Within
) -> None:
    """Norms, GEMMs, GELU, bias sums and attention together, as training runs them: bf16 weights, fp32 residuals.

    The error may be twice that of timm's own blocks under autocast, whose last norm does not round its output.
    """
    net = network(tokens, heads, layer_scale=layer_scale)
    exact = copy.deepcopy(net).double()
    autocast = copy.deepcopy(net)
    rounded = copy.deepcopy(net)
    for layer in rounded.modules():
        if isinstance(layer, nn.Linear):
            layer.bfloat16()
    x = torch.randn(6, tokens, 16 * heads, device="cuda")
    towards, results = torch.randn_like(x), []
    for model, run in ((exact, None), (autocast, None), (rounded, blocks.run_blocks)):
        given = x.detach().clone().to(torch.float64 if model is exact else torch.float32).requires_grad_()
        with torch.autocast("cuda", torch.bfloat16, enabled=model is not exact):
            if run is None:
                out = model.norm(model.blocks(given))[:, -(last or tokens) :]
            else:
                out = run(model.blocks, model.norm, given, last)
        out.backward(towards[:, -(last or tokens) :].to(out.dtype))
        grads = [p.grad.double() for p in model.blocks.parameters() if p.grad is not None]
        results.append((out.double(), given.grad.double(), torch.cat([g.flatten() for g in grads])))  # type: ignore[union-attr]
    for what, reference, plain, found in zip(
        ("output", "input's gradient", "weights' gradient"), *results, strict=True
    ):
        assert_within(f"fused blocks, {what}", relative(found, reference), 2 * relative(plain, reference) + 2**-8)


@pytest.mark.parametrize("ratio", [0.05, 0.2, 0.5, 0.9])
@pytest.mark.parametrize(
    ("components", "decay"), [(3072, 0.01), (300, 0.0), (17, 1.0), (2, 0.0), (12288, 0.002), (150528, 0.0)]
)
def test_masks_hide_what_the_sort_hides(components: int, decay: float, ratio: float, assert_within: Within) -> None:
    from pmae.fast import mask_kernels

    torch.manual_seed(components)
    share = torch.exp(-decay * torch.arange(components, device="cuda", dtype=torch.float32))
    share, noise = share / share.sum(), torch.rand(512, components, device="cuda")
    found = mask_kernels.hide_components(noise, share, torch.tensor(ratio, device="cuda"))
    expected = masking.hide_components(noise, share, ratio)
    assert found.any(1).all()
    assert not found.all(1).any()
    # Sums in another order may cross the ratio at a neighbouring component.
    hidden, sorted_hidden = ((mask * share.double()).sum(1) for mask in (found, expected))
    assert_within(
        "masked share, kernel against sort", float((hidden - sorted_hidden).abs().max()), float(share.max()) + 1e-6
    )
    # Components of no share come and go without changing the sum.
    differ = (found != expected)[:, share > 1e-6].any(1)
    assert_within("rows whose mask differs from the sort's", float(differ.float().mean()), 0.02)
    if components > 1000:
        chance = found.float().mean(0)
        # Every component is as likely as any other to come first: far more alike than any one share could explain.
        assert_within("spread of the chance to be hidden", float(chance.std()), 4 * (0.25 / 512) ** 0.5)


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("bf16", [False, True])
def test_a_hundred_updates_are_torchs_adamw(bf16: bool, clip: float | None, assert_within: Within) -> None:
    from pmae.fast.adamw import FusedAdamW

    torch.manual_seed(0)
    sizes = [(192, 576), (576,), (7, 3), (5000,), (192, 3, 8, 8)]
    ours = [nn.Parameter(torch.randn(size, device="cuda")) for size in sizes]
    theirs = [nn.Parameter(p.detach().double()) for p in ours]
    copies = {p: nn.Parameter(p.detach().bfloat16()) for p in ours} if bf16 else {}
    rate = torch.zeros((), device="cuda")

    def groups(parameters: list[nn.Parameter]) -> list[dict[str, object]]:
        matrices = [p for p in parameters if p.ndim > 1]
        return [{"params": matrices}, {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0}]

    options = {"betas": (0.9, 0.95), "weight_decay": 0.05}
    fused = FusedAdamW(torch.optim.AdamW(groups(ours), lr=rate, capturable=True, **options), copies)  # type: ignore[arg-type]
    reference = torch.optim.AdamW(groups(theirs), lr=0.0, **options)  # type: ignore[arg-type]
    for step in range(100):
        gradients = [torch.randn_like(p) for p in ours]
        gradients = [g.bfloat16() if bf16 else g for g in gradients]
        for p, q, gradient in zip(ours, theirs, gradients, strict=True):
            fused.leaf(p).grad, q.grad = gradient.clone(), gradient.double()
        if clip is not None:
            nn.utils.clip_grad_norm_([fused.leaf(p) for p in ours], clip)
            nn.utils.clip_grad_norm_(theirs, clip)
        rate.fill_(1e-3 * (step + 1) / 100)
        for group in reference.param_groups:
            group["lr"] = 1e-3 * (step + 1) / 100
        fused.fill()
        fused()
        reference.step()
    # A clipped bf16 gradient is rounded once more.
    bound = 2e-3 if bf16 and clip else 1e-5
    for p, q in zip(ours, theirs, strict=True):
        assert_within(
            f"AdamW, 100 steps, bf16 gradients {bf16}, clipped {clip is not None}", relative(p, q.detach()), bound
        )
        if bf16:
            assert_within("bf16 copies of the weights", relative(copies[p], p.detach().double()), 2**-8)


def test_gelu_and_the_patch_embedding(assert_within: Within) -> None:
    torch.manual_seed(0)
    net = VisionTransformer(img_size=64, patch_size=8, embed_dim=192, depth=1, num_heads=3, num_classes=0).cuda()
    x = torch.randn(16, 3, 64, 64, device="cuda")
    exact = copy.deepcopy(net).double().patch_embed(x.double())
    assert_within("patch embedding, float32", relative(blocks.embed_patches(net.patch_embed, x), exact), 2e-3)
    layer = nn.Linear(192, 768).cuda().bfloat16()
    rows = torch.randn(4096, 192, device="cuda").bfloat16()
    active = torch.empty(4096, 768, device="cuda", dtype=torch.bfloat16)
    hidden = blocks.kernels.linear_gelu(rows, layer.weight, layer.bias, active)
    expected = functional.linear(rows.double(), layer.weight.double(), layer.bias.double())
    assert_within("linear before GELU, bf16", relative(hidden, expected), 5e-3)
    assert_within("GELU, bf16", relative(active, functional.gelu(expected)), 6e-3)


def test_the_switch_turns_everything_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fast.can_capture(torch.device("cuda"))
    monkeypatch.setenv(fast.VARIABLE, "none")
    assert not fast.can_capture(torch.device("cuda"))
