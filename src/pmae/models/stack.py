"""A stack of transformer blocks as one function with its own backward, for weights in bfloat16 on a recent GPU.

Between the products, which are the library's, everything is done in one pass over memory: residual and norm forward,
norm, residual and bias gradients backward, GELU and its bias. The numbers are those of the blocks under autocast, where
the stream of residuals keeps its own precision. Everywhere else the blocks run as timm wrote them.
"""

from typing import Any

import torch
from timm.layers.mlp import Mlp
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from pmae.models.short_attention import ShortAttention, available

try:
    from pmae.models import stack_kernels as kernels
    from pmae.models.short_attention_kernels import backward_with_sums, short_attention
except ImportError:  # no Triton: a machine without a GPU, or not Linux
    kernels = None  # type: ignore[assignment]

PARTS = 12
"""Tensors of a block: weight and bias of norm1, qkv, proj, norm2, fc1, fc2."""


def run_blocks(blocks: nn.Sequential, norm: nn.Module, x: Tensor) -> Tensor:
    """The blocks one after another, and the last norm."""
    if not _fusable(blocks, norm, x):
        return norm(blocks(x))
    return _run_fused(blocks, norm, x)


@torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
def _run_fused(blocks: Any, norm: Any, x: Tensor) -> Tensor:
    layers = [m for b in blocks for m in (b.norm1, b.attn.qkv, b.attn.proj, b.norm2, b.mlp.fc1, b.mlp.fc2)] + [norm]
    tensors = [tensor for layer in layers for tensor in (layer.weight, layer.bias)]
    return Stack.apply(x, blocks[0].attn.num_heads, blocks[0].attn.scale, norm.eps, *tensors)


class Stack(torch.autograd.Function):
    """Tokens (B, N, W) through all blocks and the last norm."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, heads: int, scale: float, eps: float, *tensors: Tensor) -> Tensor:
        """Each block keeps what its backward reads: stream, norm, qkv, attention, stream, norm, hidden, activation."""
        shape, stream, branch, kept = x.shape, x.flatten(0, 1), None, []
        for first in range(0, len(tensors) - 2, PARTS):
            w1, b1, w_qkv, b_qkv, w_proj, b_proj, w2, b2, w_in, b_in, w_out, b_out = tensors[first : first + PARTS]
            stream, h, *stats = kernels.add_norm(stream, branch, w1, b1, eps, w_qkv.dtype)
            qkv = torch.addmm(b_qkv, h, w_qkv.t())
            attended = short_attention(qkv.unflatten(0, shape[:2]), heads, scale).flatten(0, 1)
            before, before_h, *before_stats = stream, h, *stats
            branch = torch.addmm(b_proj, attended, w_proj.t())
            stream, h, *stats = kernels.add_norm(stream, branch, w2, b2, eps, w_in.dtype)
            hidden = torch.addmm(b_in, h, w_in.t())
            active = kernels.gelu(hidden)
            branch = torch.addmm(b_out, active, w_out.t())
            kept += [before, before_h, *before_stats, qkv, attended, stream, h, *stats, hidden, active]
        stream, out, *stats = kernels.add_norm(stream, branch, tensors[-2], tensors[-1], eps, tensors[2].dtype)
        ctx.save_for_backward(*tensors, *kept, stream, *stats)
        ctx.heads, ctx.scale, ctx.shape, ctx.count = heads, scale, shape, len(tensors)
        return out.view(shape)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        """The blocks in reverse; sums over rows are collected as partial sums and added up once at the end."""
        saved = ctx.saved_tensors
        tensors, kept, (last, mean, rstd) = saved[: ctx.count], saved[ctx.count : -3], saved[-3:]
        depth, (rows, width), hidden_width = ctx.count // PARTS, last.shape, tensors[8].shape[0]
        wide = {"device": last.device, "dtype": torch.float32}
        norms = torch.empty(2 * depth + 1, kernels.programs(rows), 3, width, **wide)
        of_qkv = torch.empty(depth, ctx.shape[0], 3 * width, **wide)
        of_hidden = torch.empty(depth, kernels.chunks(rows, hidden_width), hidden_width, **wide)
        grads: list[Any] = [None] * ctx.count
        grad_out = grad_out.reshape(rows, width)
        g, half = kernels.norm_backward(grad_out, last, mean, rstd, tensors[-2], None, norms[-1])
        for block in reversed(range(depth)):
            first = PARTS * block
            w1, _, w_qkv, _, w_proj, _, w2, _, w_in, _, w_out, _ = tensors[first : first + PARTS]
            x1, h1, m1, r1, qkv, attended, x2, h2, m2, r2, hidden, active = kept[12 * block : 12 * block + 12]
            grads[first + 10] = half.t() @ active
            to_hidden = kernels.gelu_backward(half @ w_out, hidden, of_hidden[block])
            grads[first + 8] = to_hidden.t() @ h2
            g, half = kernels.norm_backward(to_hidden @ w_in, x2, m2, r2, w2, g, norms[2 * block + 1])
            grads[first + 4] = half.t() @ attended
            to_attended = (half @ w_proj).unflatten(0, ctx.shape[:2])
            qkv = qkv.unflatten(0, ctx.shape[:2])
            to_qkv = backward_with_sums(qkv, to_attended, ctx.heads, ctx.scale, of_qkv[block]).flatten(0, 1)
            grads[first + 2] = to_qkv.t() @ h1
            g, half = kernels.norm_backward(to_qkv @ w_qkv, x1, m1, r1, w1, g, norms[2 * block])
        _fill_sums(grads, norms.sum(1), of_qkv.sum(1), of_hidden.sum(1), tensors[3].dtype)
        return g.view(ctx.shape), None, None, None, *grads


def _fill_sums(grads: list[Any], norms: Tensor, of_qkv: Tensor, of_hidden: Tensor, dtype: torch.dtype) -> None:
    """Gradients of norms and biases. A product's bias sums the stream's gradient, which the norm behind it saw."""
    biases, of_qkv, of_hidden = norms[:, 2].to(dtype), of_qkv.to(dtype), of_hidden.to(dtype)
    for block in range(len(of_qkv)):
        first = PARTS * block
        grads[first], grads[first + 1] = norms[2 * block, 0], norms[2 * block, 1]
        grads[first + 6], grads[first + 7] = norms[2 * block + 1, 0], norms[2 * block + 1, 1]
        grads[first + 3], grads[first + 9] = of_qkv[block], of_hidden[block]
        grads[first + 5], grads[first + 11] = biases[2 * block + 1], biases[2 * block + 2]
    grads[-2], grads[-1] = norms[-1, 0], norms[-1, 1]


def _fusable(blocks: nn.Sequential, norm: nn.Module, x: Tensor) -> bool:
    """Whether these are plain pre-norm blocks of one shape, their weights in bfloat16, on a GPU with the kernels."""
    if kernels is None or not len(blocks) or not all(map(_is_plain, blocks)):
        return False
    attention: Any = blocks[0].attn
    same_eps = len({layer.eps for layer in blocks.modules() if isinstance(layer, nn.LayerNorm)} | {norm.eps}) == 1
    return same_eps and available(x.device, x.shape[1], attention.head_dim)


def _is_plain(block: Any) -> bool:
    if type(block) is not Block or type(block.attn) is not ShortAttention or type(block.mlp) is not Mlp:
        return False
    extras = (block.ls1, block.ls2, block.drop_path1, block.drop_path2, block.mlp.norm)
    dropped = (block.attn.proj_drop.p, block.mlp.drop1.p, block.mlp.drop2.p)
    gelu = type(block.mlp.act) is nn.GELU and block.mlp.act.approximate == "none"
    halves = all(p.dtype == torch.bfloat16 for m in (block.attn.qkv, block.mlp.fc1) for p in m.parameters())
    plain = all(isinstance(extra, nn.Identity) for extra in extras) and not any(dropped) and not block.attn._altered()
    return plain and gelu and halves and block.attn.qkv.bias is not None
