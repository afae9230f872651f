"""A stack of transformer blocks as one function with its own backward, for weights in bfloat16 on a recent GPU.

Between the GEMMs, which are the library's, everything is one pass over memory: residual and norm forward; norm,
residual and bias gradients backward; GELU and its bias. The gradients of all blocks' weights are taken together at the
end, one batched GEMM for each kind of layer: one by one, narrow layers leave most of a GPU idle. The numbers are those
of the blocks under autocast, where the residual stream keeps its own precision, and so are the images that stochastic
depth leaves out. Where only the last tokens of each sequence are read, the others end with the last block's attention,
which needs their keys and values. Importing this needs no Triton.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from timm.layers.drop import DropPath
from timm.layers.mlp import Mlp
from timm.layers.patch_embed import PatchEmbed
from timm.models.vision_transformer import Block, LayerScale  # type: ignore[attr-defined]  # where every timm has both
from torch import Tensor, nn
from torch.nn import functional

from pmae.fast import attention
from pmae.fast.attention import Attended

try:
    from pmae.fast import attention_kernels, flash_kernels, kernels
except ImportError:  # no Triton: a machine without a GPU, or not Linux
    kernels = None  # type: ignore[assignment]

PARTS = 12  # tensors of a block: weight and bias of norm1, qkv, proj, norm2, fc1, fc2
GEMMS = (2, 4, 8, 10)  # which of them are the weights of qkv, proj, fc1 and fc2
How = tuple[int, float, float, bool]
"""The number of heads, the scale of their scores, the norms' epsilon, and whether the last norm is left out."""
KEPT = 8
"""What a block keeps of its own: input, mean and rstd of the first norm, qkv, the same of the second norm, hidden."""


def embed_patches(patch_embed: Any, x: Tensor) -> Tensor:
    """Images (B, C, H, W) to patch tokens (B, N, width): on a GPU one GEMM, at a fifth of the convolution's time."""
    if not _is_one_gemm(patch_embed, x):
        return patch_embed(x)
    proj, (batch, channels, height, width) = patch_embed.proj, x.shape
    rows, columns = proj.kernel_size
    x = x.reshape(batch, channels, height // rows, rows, width // columns, columns).permute(0, 2, 4, 1, 3, 5)
    return patch_embed.norm(functional.linear(x.flatten(3).flatten(1, 2), proj.weight.flatten(1), proj.bias))


def _is_one_gemm(patch_embed: Any, x: Tensor) -> bool:
    if type(patch_embed) is not PatchEmbed or type(patch_embed.proj) is not nn.Conv2d or not patch_embed.flatten:
        return False
    proj, sides = patch_embed.proj, tuple(x.shape[-2:])
    apart = proj.kernel_size == proj.stride and proj.padding == (0, 0)
    whole = sides == patch_embed.img_size and all(a % b == 0 for a, b in zip(sides, proj.stride, strict=True))
    return apart and whole and (x.is_cuda or proj.weight.dtype == torch.bfloat16)


def run_blocks(blocks: nn.Sequential, norm: nn.Module, x: Tensor, last: int | None = None) -> Tensor:
    """Tokens (B, N, width) through timm's blocks and the last norm; out come all, or each sequence's `last`."""
    if _fusable(blocks, norm, x):
        return _run_fused(blocks, norm, x, last)
    return attention.run_blocks(blocks, norm, x, last)


@torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
def _run_fused(blocks: Any, norm: Any, x: Tensor, last: int | None = None) -> Tensor:
    bare = isinstance(norm, nn.Identity)
    norm = blocks[0].norm1 if bare else norm  # a stand-in, whose result nobody reads
    tensors = [tensor for block in blocks for tensor in _parameters(block)] + [norm.weight, norm.bias]
    factors = _draw_factors([place for b in blocks for place in (b.drop_path1, b.drop_path2)], x)
    return Stack.apply(x, (blocks[0].attn.num_heads, blocks[0].attn.scale, norm.eps, bare), factors, last, *tensors)


def _parameters(block: Any) -> Iterator[Tensor]:
    """A block's `PARTS` tensors in the order in which they are used."""
    for layer, scale in (
        (block.norm1, None), (block.attn.qkv, None), (block.attn.proj, block.ls1),
        (block.norm2, None), (block.mlp.fc1, None), (block.mlp.fc2, block.ls2),
    ):  # fmt: skip
        if isinstance(scale, LayerScale):  # into the layer before it: one product a weight instead of one a token
            yield (layer.weight * scale.gamma[:, None]).to(layer.weight.dtype)
            yield (layer.bias * scale.gamma).to(layer.bias.dtype)
        else:
            yield from (layer.weight, layer.bias)


def _draw_factors(places: list[nn.Module], x: Tensor) -> Tensor | None:
    """Stochastic depth's factor of every branch and image (2 depth, B), drawn as timm draws it; None if none drops."""
    active = [(i, p) for i, p in enumerate(places) if isinstance(p, DropPath) and p.training and p.drop_prob > 0]
    if not active:
        return None
    factors = torch.ones(len(places), x.shape[0], device=x.device)
    for index, place in active:
        keep = 1 - place.drop_prob
        # One call a branch and in float32: a GPU draws the same numbers as for timm's (B, 1, 1) in half precision.
        factors[index].bernoulli_(keep)
        if keep > 0 and place.scale_by_keep:
            factors[index].div_(keep)
    return factors


class Stack(torch.autograd.Function):
    """Tokens (B, N, W) through all blocks and the last norm; out come all, or each sequence's `last`.

    Without the last norm there is no backward: the residual stream is for teachers.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, how: How, factors: Tensor | None, last: int | None, *params: Tensor) -> Tensor:
        """Each block keeps what its backward reads; what its GEMMs read lies in one tensor for all blocks."""
        (heads, scale, eps, bare), shape, stream, branch = how, x.shape, x.flatten(0, 1), None
        kept: list[Tensor] = []
        beside: list[Attended | Tensor | None] = []
        depth, hidden_width, (rows, width) = len(params) // PARTS, params[8].shape[0], stream.shape
        few = rows if last is None else shape[0] * last
        read: dict[str, Any] = {"device": x.device, "dtype": params[2].dtype}
        inputs = [torch.empty(depth, rows, size, **read) for size in (width, width, width, hidden_width)]
        normed, (attended, normed_2, active) = inputs[0], (_by_block(each, few) for each in inputs[1:])
        (of_attention, of_mlp), of_branch = _by_kind(factors, depth), None
        for block in range(depth):
            w1, b1, w_qkv, b_qkv, w_proj, b_proj, w2, b2, w_in, b_in, w_out, b_out = _of(params, block)
            before, *stats = kernels.add_norm(stream, branch, w1, b1, eps, normed[block], of_branch)
            qkv = torch.addmm(b_qkv, normed[block], w_qkv.t())
            beside.append(_attend(attended[block], qkv.unflatten(0, shape[:2]), heads, scale))
            branch = torch.addmm(b_proj, attended[block], w_proj.t())
            # One token of each sequence would be a view with gaps, and the kernels read rows without any.
            stream = _last_tokens(before.view(shape), len(branch)).flatten(0, 1).contiguous()
            stream, *stats_2 = kernels.add_norm(stream, branch, w2, b2, eps, normed_2[block], of_attention[block])
            hidden = kernels.linear_gelu(normed_2[block], w_in, b_in, active[block])
            branch, of_branch = torch.addmm(b_out, active[block], w_out.t()), of_mlp[block]
            kept += [before, *stats, qkv, stream, *stats_2, hidden]
        out = torch.empty(few, width, **read)
        end, *stats = kernels.add_norm(stream, branch, params[-2], params[-1], eps, out, of_branch)
        ctx.save_for_backward(*params, *kept, end, *stats, *inputs, factors)
        ctx.heads, ctx.scale, ctx.shape, ctx.count, ctx.beside = heads, scale, shape, len(params), beside
        return (end if bare else out).view(shape[0], -1, width)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        """The blocks in reverse; sums over rows are collected as partial sums and added up once at the end."""
        params, kept = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count : -8]
        normed, inputs, factors = ctx.saved_tensors[-8:-5], ctx.saved_tensors[-5:-1], ctx.saved_tensors[-1]
        (depth, rows, hidden_width), (few, width) = inputs[3].shape, normed[0].shape
        of_attention, of_mlp = _by_kind(factors, depth)
        wide: dict[str, Any] = {"device": grad_out.device, "dtype": torch.float32}
        norms = torch.empty(2 * depth + 1, kernels.programs(rows, width), 3, width, **wide)
        of_qkv = torch.empty(depth, ctx.shape[0], 3 * width, **wide)
        hidden_sums = torch.empty(depth, kernels.gelu_programs(rows, width), hidden_width, **wide)
        of_hidden = _by_block(hidden_sums, kernels.gelu_programs(few, width))
        hidden_sums[-1, len(of_hidden[-1]) :] = 0  # fewer rows may leave fewer partial sums
        # Gradients of what each GEMM put out: qkv, proj, fc1, fc2.
        outputs = [inputs[0].new_empty(depth, rows, size) for size in (3 * width, width, hidden_width, width)]
        to_qkv, (to_proj, to_hidden, to_branch) = outputs[0], (_by_block(each, few) for each in outputs[1:])
        attended = _by_block(inputs[1], few)
        grad_out, g = grad_out.reshape(few, width).contiguous(), None
        weight, partial = params[-2], norms[-1]
        for block in reversed(range(depth)):
            w1, _, w_qkv, _, w_proj, _, w2, _, w_in, _, w_out, _ = _of(params, block)
            *normed_1, qkv, x2, mean_2, rstd_2, hidden = kept[KEPT * block : KEPT * (block + 1)]
            g = kernels.norm_backward(grad_out, normed, weight, g, partial, to_branch[block], of_mlp[block])
            kernels.linear_gelu_backward(to_branch[block], w_out, hidden, of_hidden[block], to_hidden[block])
            grad_out = to_hidden[block] @ w_in
            normed, partial, to = (x2, mean_2, rstd_2), norms[2 * block + 1], to_proj[block]
            g = kernels.norm_backward(grad_out, normed, w2, g, partial, to, of_attention[block])
            grad_out, g, qkv = to @ w_proj, _among_all(g, ctx.shape), qkv.unflatten(0, ctx.shape[:2])
            _attend_backward(ctx, to_qkv[block].view_as(qkv), of_qkv[block], qkv, attended[block], grad_out)
            grad_out = to_qkv[block] @ w_qkv
            normed, weight, partial = normed_1, w1, norms[2 * block]
        g = kernels.norm_backward(grad_out, normed, weight, g, partial)
        grads: list[Any] = [None] * ctx.count
        for first, to, seen, count in zip(GEMMS, outputs, inputs, (rows, few, few, few), strict=True):
            grads[first:-2:PARTS] = _of_weights(to, seen, count)
        added = [kernels.add_up(partial) for partial in (norms, of_qkv, hidden_sums)]
        _fill_sums(grads, added[0], added[1], added[2], params[3].dtype)
        return g.view(ctx.shape), None, None, None, *grads


def _by_block(each: Tensor, few: int) -> list[Tensor]:
    """Every block's rows of a tensor that all blocks share; the last block has but a few."""
    return [*each[:-1].unbind(0), each[-1, :few]]


def _last_tokens(x: Tensor, rows: int) -> Tensor:
    """As many of each sequence's last tokens (B, N, W) as give so many rows."""
    return x[:, x.shape[1] - rows // x.shape[0] :]


def _among_all(rows: Tensor, shape: torch.Size) -> Tensor:
    """Rows of each sequence's last tokens with rows of 0 for the tokens before them; all rows stay as they are."""
    missing = shape[1] - len(rows) // shape[0]
    return functional.pad(rows.view(shape[0], -1, shape[2]), (0, 0, missing, 0)).flatten(0, 1) if missing else rows


def _attend(out: Tensor, qkv: Tensor, heads: int, scale: float) -> Attended | Tensor | None:
    """Attention (B, N, W) of every token; `out` takes the rows of each sequence's last ones.

    Back comes what its backward reads beside qkv and `out`.
    """
    (batch, tokens, width), short = qkv.shape, qkv.shape[1] <= attention.LIMIT
    if not short and not attention.takes_flash(tokens, width // (3 * heads)):
        return Attended.into(out, qkv, heads, scale)
    all_read = len(out) == batch * tokens
    whole = out if all_read else out.new_empty(batch * tokens, out.shape[1])
    kept = (attention_kernels if short else flash_kernels).forward_into(whole, qkv, heads, scale)
    if not all_read:
        out.view(batch, -1, out.shape[1]).copy_(_last_tokens(whole.view(batch, tokens, -1), len(out)))
    return kept


def _attend_backward(ctx: Any, to: Tensor, sums: Tensor, qkv: Tensor, out: Tensor, grad_out: Tensor) -> None:
    """The gradient in qkv and its sums over tokens, from that of the rows that `_attend` gave, blocks in reverse."""
    kept = ctx.beside.pop()
    if isinstance(kept, Attended):
        kept.backward_into(to, sums, grad_out)
        return
    grad_out = _among_all(grad_out, ctx.shape)  # rows that nobody read have no gradient
    if kept is None:
        attention_kernels.backward_into(to, sums, qkv, grad_out, ctx.heads, ctx.scale)
    else:
        flash_kernels.backward_into(to, sums, qkv, _among_all(out, ctx.shape), kept, grad_out, ctx.scale)


def _of_weights(to: Tensor, seen: Tensor, few: int) -> tuple[Tensor, ...]:
    """Gradients of all blocks' weights of one kind: a batched GEMM, without a last block that has fewer rows."""
    if few == to.shape[1]:
        return (to.transpose(1, 2) @ seen).unbind(0)
    return *(to[:-1].transpose(1, 2) @ seen[:-1]).unbind(0), to[-1, :few].t() @ seen[-1, :few]


def _of(params: tuple[Tensor, ...], block: int) -> tuple[Tensor, ...]:
    return params[PARTS * block : PARTS * (block + 1)]


def _by_kind(factors: Tensor | None, depth: int) -> tuple[Sequence[Tensor | None], Sequence[Tensor | None]]:
    """Each block's factors (B,) of its attention, and those of its MLP."""
    each = [None] * (2 * depth) if factors is None else factors.unbind(0)
    return each[0::2], each[1::2]


def _fill_sums(grads: list[Any], norms: Tensor, of_qkv: Tensor, of_hidden: Tensor, dtype: torch.dtype) -> None:
    """Gradients of norms and biases. A layer's bias sums the branch's gradient, which the norm behind it saw."""
    biases, of_qkv, of_hidden = norms[:, 2].to(dtype), of_qkv.to(dtype), of_hidden.to(dtype)
    for block in range(len(of_qkv)):
        first = PARTS * block
        grads[first], grads[first + 1] = norms[2 * block, 0], norms[2 * block, 1]
        grads[first + 6], grads[first + 7] = norms[2 * block + 1, 0], norms[2 * block + 1, 1]
        grads[first + 3], grads[first + 9] = of_qkv[block], of_hidden[block]
        grads[first + 5], grads[first + 11] = biases[2 * block + 1], biases[2 * block + 2]
    grads[-2], grads[-1] = norms[-1, 0], norms[-1, 1]


@torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
def _fusable(blocks: nn.Sequential, norm: nn.Module, x: Tensor) -> bool:
    """Whether these are plain pre-norm blocks of one shape, their weights in bfloat16, on a GPU with the kernels.

    The compiler would take longer to trace these questions than all the rest of a step.
    """
    if kernels is None or not len(blocks) or not all(map(_is_plain, blocks)):
        return False
    bare = isinstance(norm, nn.Identity)
    if bare and torch.is_grad_enabled():
        return False
    layers = [layer for layer in blocks.modules() if isinstance(layer, nn.LayerNorm)] + ([] if bare else [norm])
    same_eps = len({layer.eps for layer in layers}) == 1
    first: Any = blocks[0]
    kept = x.shape[1] > attention.LIMIT or first.attn.head_dim <= attention.WIDEST  # beyond, attention is torch's
    return same_eps and kept and attention.on_recent_gpu(x.device)


def _is_plain(block: Any) -> bool:
    if type(block) is not Block or not attention.is_plain(block.attn) or type(block.mlp) is not Mlp:
        return False
    attn: Any = block.attn
    extras = [block.mlp.norm, *(scale for scale in (block.ls1, block.ls2) if type(scale) is not LayerScale)]
    extras += [place for place in (block.drop_path1, block.drop_path2) if type(place) is not DropPath]
    dropped = (attn.proj_drop.p, block.mlp.drop1.p, block.mlp.drop2.p)
    gelu = type(block.mlp.act) is nn.GELU and block.mlp.act.approximate == "none"
    in_bf16 = all(p.dtype == torch.bfloat16 for m in (attn.qkv, block.mlp.fc1) for p in m.parameters())
    plain = all(isinstance(extra, nn.Identity) for extra in extras) and not any(dropped)
    biased = all(layer.bias is not None for layer in (attn.qkv, attn.proj, block.mlp.fc1, block.mlp.fc2))
    return plain and gelu and in_bf16 and biased
