"""The fused stack of blocks against timm's own blocks in float64, run on the CPU by Triton's interpreter.

Run as a script this file is the process in which Triton interprets: it prints errors as JSON.
"""

import copy
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from pmae.models import short_attention, stack

CASES = {"17 tokens": (17, 48, 3), "40 tokens": (40, 32, 2), "odd width": (5, 24, 1)}
BOUND = {"float32": 2e-5, "bfloat16": 0.03}


def blocks_of(width: int, heads: int) -> tuple[nn.Sequential, nn.LayerNorm]:
    """Two blocks and a norm whose every parameter is random, biases too."""
    torch.manual_seed(0)
    blocks, norm = nn.Sequential(*(Block(width, heads, qkv_bias=True) for _ in range(2))), nn.LayerNorm(width, eps=1e-6)
    for layer in blocks.modules():
        if isinstance(layer, nn.LayerNorm):
            layer.eps = 1e-6
    for p in [*blocks.parameters(), *norm.parameters()]:
        nn.init.normal_(p, 0.5 if p.ndim == 1 else 0.0, 0.3)
    short_attention.install(blocks)
    return blocks, norm


def run(blocks: nn.Sequential, norm: nn.Module, x: Tensor, fused: bool) -> list[Tensor]:
    """Output, gradient of the input and gradients of all parameters."""
    x = x.detach().clone().requires_grad_()
    out = stack._run_fused(blocks, norm, x) if fused else norm(blocks(x))
    (out.double() * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
    found = [out.detach(), x.grad, *(p.grad for p in [*blocks.parameters(), *norm.parameters()])]
    assert all(tensor is not None for tensor in found)
    return found  # type: ignore[return-value]


def distance(got: list[Tensor], expected: list[Tensor]) -> float:
    """The largest error of any tensor in units of its own largest element."""
    ratios = [((a.double() - b).abs().max() / b.abs().max()).item() for a, b in zip(got, expected, strict=True)]
    return max(ratio if ratio == ratio else float("inf") for ratio in ratios)


def errors(tokens: int, width: int, heads: int, dtype: str) -> float:
    """The fused stack against timm in float64; norms keep float32, as they do under the step."""
    blocks, norm = blocks_of(width, heads)
    x = torch.randn(2, tokens, width)
    expected = run(copy.deepcopy(blocks).double(), copy.deepcopy(norm).double(), x.double(), fused=False)
    for layer in blocks.modules():
        if isinstance(layer, nn.Linear):
            layer.to(getattr(torch, dtype))
    return distance(run(blocks, norm, x, fused=True), expected)


def interpret() -> dict[str, float]:
    """Every case's error; only in a process where Triton interprets."""
    spec = importlib.util.spec_from_file_location("attention_test", Path(__file__).with_name("test_short_attention.py"))
    assert spec is not None
    assert spec.loader is not None
    attention: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(attention)
    attention.repair_interpreter()
    from pmae.models import short_attention_kernels

    short_attention_kernels.wrap_triton = lambda kernel: kernel
    return {f"{name} {dtype}": errors(*case, dtype) for dtype in BOUND for name, case in CASES.items()}


@pytest.fixture(scope="module")
def found() -> dict[str, float]:
    pytest.importorskip("triton")
    settings = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, __file__], env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answer: dict[str, float] = json.loads(done.stdout)
    return answer


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", BOUND)
def test_the_fused_stack_is_timms_blocks(found: dict[str, float], case: str, dtype: str) -> None:
    assert found[f"{case} {dtype}"] < BOUND[dtype]


def test_only_plain_blocks_with_half_weights_are_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(stack, "available", lambda device, tokens, head_dim: True)
    x = torch.zeros(1, 17, 48)
    blocks, norm = blocks_of(48, 3)
    assert not stack._fusable(blocks, norm, x)
    blocks.bfloat16()
    assert stack._fusable(blocks, norm, x)
    other = VisionTransformer(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3, init_values=1e-5)
    short_attention.install(other)
    assert not stack._fusable(other.blocks.bfloat16(), other.norm, x)
    blocks[0].mlp.act = nn.ReLU()
    assert not stack._fusable(blocks, norm, x)


def test_blocks_that_are_not_fused_run_as_timm_wrote_them() -> None:
    blocks, norm = blocks_of(48, 3)
    x = torch.randn(2, 17, 48)
    assert torch.equal(stack.run_blocks(blocks, norm, x), norm(blocks(x)))


if __name__ == "__main__":
    print(json.dumps(interpret()))
