"""Time attention: our kernels, torch's fused attention and plain GEMMs, all compiled.

Each is one layer's forward and backward in bfloat16, replayed from a CUDA graph and timed by CUDA events, so that
neither launches nor Python count. Beyond 128 tokens, ours and torch's own are timed as a fused stack of blocks calls
them, with the copies that torch's need. Run `python -m benchmarks.attention`.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from pmae.fast import attention_kernels as kernels
from pmae.fast import flash_kernels
from pmae.fast.attention import LIMIT, Attended, available, takes_flash

SHAPES = [(17, 12, 16), (17, 16, 32), (5, 12, 16), (26, 6, 16), (33, 6, 16), (65, 12, 16), (65, 16, 32)]
SHAPES += [(145, 12, 16), (197, 6, 64), (197, 16, 32), (197, 12, 16), (257, 12, 16), (577, 6, 64)]
Attend = Callable[[Tensor, int], Tensor]
Both = tuple[Tensor, Tensor]
"""The output, and the gradient in qkv."""


def split(qkv: Tensor, heads: int) -> tuple[Tensor, ...]:
    """Queries, keys and values (B, H, N, D) as timm splits them."""
    return qkv.unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)


def kernel(qkv: Tensor, heads: int) -> Tensor:
    """Our kernel."""
    return kernels.short_attention(qkv, heads, (qkv.shape[2] // (3 * heads)) ** -0.5)


def fused(qkv: Tensor, heads: int) -> Tensor:
    """torch's scaled_dot_product_attention."""
    q, k, v = split(qkv, heads)
    return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def plain(qkv: Tensor, heads: int) -> Tensor:
    """Two batched GEMMs and a softmax."""
    q, k, v = split(qkv, heads)
    weights = (q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1)).softmax(-1)
    return (weights @ v).transpose(1, 2).flatten(2)


def flash(qkv: Tensor, grad: Tensor, heads: int) -> Both:
    """Our kernels for longer sequences, as a stack of blocks calls them: with the sums that a bias wants."""
    scale, (out, to) = (qkv.shape[2] // (3 * heads)) ** -0.5, (torch.empty_like(each) for each in (grad, qkv))
    sums = qkv.new_empty(len(qkv), qkv.shape[2], dtype=torch.float32)
    log_sum = flash_kernels.forward_into(out, qkv, heads, scale)
    flash_kernels.backward_into(to, sums, qkv, out, log_sum, grad, scale)
    return out, to


def with_copies(qkv: Tensor, grad: Tensor, heads: int) -> Both:
    """torch's fastest kernel, as a stack of blocks calls it."""
    out, to = torch.empty_like(grad), torch.empty_like(qkv)
    sums = qkv.new_empty(len(qkv), qkv.shape[2], dtype=torch.float32)
    found = Attended.into(out.flatten(0, 1), qkv, heads, (qkv.shape[2] // (3 * heads)) ** -0.5)
    found.backward_into(to, sums, grad.flatten(0, 1))
    return out, to


def passes(attend: Attend, qkv: Tensor, grad: Tensor, heads: int) -> Callable[[], Both]:
    """One forward and backward as a function without arguments."""

    def both() -> Both:
        out = attend(qkv, heads)
        return out.detach(), torch.autograd.grad(out, qkv, grad)[0]

    return both


def captured(step: Callable[[], object], repeats: int) -> torch.cuda.CUDAGraph:
    """Several steps as one CUDA graph, compiled and warmed up on a side stream first."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            step()
    return graph


def microseconds(step: Callable[[], object], repeats: int = 10, samples: int = 50) -> float:
    """The median time of one step."""
    graph = captured(step, repeats)
    times = []
    for _ in range(samples):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / repeats)
    return statistics.median(times)


def error(got: Tensor, expected: Tensor) -> float:
    """The largest error in units of the largest element."""
    return ((got.double() - expected).abs().max() / expected.abs().max()).item()


def measure(name: str, step: Callable[[], Both], inputs: tuple[Tensor, Tensor], heads: int) -> None:
    """Print one row: time, and errors of output and gradient against float64."""
    qkv, grad = (each[:8] for each in inputs)  # all of a batch would not fit in float64
    exact = qkv.detach().double().requires_grad_()
    expected = plain(exact, heads)
    (expected_grad,) = torch.autograd.grad(expected, exact, grad.double())
    out, qkv_grad = (each[:8] for each in step())
    errors = f"{error(out, expected):9.1e} {error(qkv_grad, expected_grad):9.1e}"
    print(f"{name:<34} {microseconds(step):9.1f} {errors}", flush=True)


def compare(batch: int, shape: tuple[int, int, int]) -> None:
    """Print the rows of one shape under the way a layer would choose for it."""
    tokens, heads, width = shape
    short = available(torch.device("cuda"), tokens, width)
    print(f"{tokens}, {heads}, {width}: {'kernels' if short or takes_flash(tokens, width) else 'torch'}")
    torch.manual_seed(0)
    qkv, grad = (torch.randn(batch, tokens, n * heads * width).cuda().bfloat16() for n in (3, 1))
    if tokens > LIMIT:
        for both in (flash, with_copies):
            measure(f"  {both.__name__}", partial(both, qkv, grad, heads), (qkv, grad), heads)
        return
    qkv.requires_grad_()
    for attend in (kernel, fused, plain) if short else (fused, plain):
        compiled = torch.compile(attend, dynamic=False, fullgraph=True)
        measure(f"  {attend.__name__}", passes(compiled, qkv, grad, heads), (qkv, grad), heads)


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=512)
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, batch {options.batch}, bfloat16")
    print(f"{'tokens, heads, width':<34} {'us':>9} {'out err':>9} {'grad err':>9}")
    for shape in SHAPES:
        compare(options.batch, shape)


if __name__ == "__main__":
    main()
