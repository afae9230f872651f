"""Time attention over short sequences: our kernels, torch's fused attention and plain GEMMs, all compiled.

Each is one layer's forward and backward in bfloat16, replayed from a CUDA graph and timed by CUDA events, so that
neither launches nor Python count. Run `python benchmarks/attention.py`.
"""

import argparse
import statistics
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from pmae.fast import attention_kernels as kernels
from pmae.fast.attention import available

SHAPES = [(17, 12, 16), (17, 16, 32), (5, 12, 16), (26, 6, 16), (33, 6, 16), (65, 12, 16), (65, 16, 32)]
Attend = Callable[[Tensor, int], Tensor]


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


def passes(attend: Attend, qkv: Tensor, grad: Tensor, heads: int) -> Callable[[], tuple[Tensor, Tensor]]:
    """One forward and backward as a function without arguments."""

    def both() -> tuple[Tensor, Tensor]:
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


def measure(name: str, attend: Attend, inputs: tuple[Tensor, Tensor], heads: int) -> None:
    """Print one row: time, and errors of output and gradient against float64."""
    qkv, grad = inputs
    exact = qkv.detach().double().requires_grad_()
    expected = plain(exact, heads)
    (expected_grad,) = torch.autograd.grad(expected, exact, grad.double())
    step = passes(attend, qkv, grad, heads)
    out, qkv_grad = step()
    errors = f"{error(out, expected):9.1e} {error(qkv_grad, expected_grad):9.1e}"
    print(f"{name:<34} {microseconds(step):9.1f} {errors}", flush=True)


def compare(batch: int, shape: tuple[int, int, int]) -> None:
    """Print the rows of one shape under the way a layer would choose for it."""
    tokens, heads, width = shape
    short = available(torch.device("cuda"), tokens, width)
    print(f"{tokens}, {heads}, {width}: {'kernel' if short else 'timm'}")
    torch.manual_seed(0)
    qkv, grad = (torch.randn(batch, tokens, n * heads * width).cuda().bfloat16() for n in (3, 1))
    qkv.requires_grad_()
    for attend in (kernel, fused, plain) if short else (fused, plain):
        compiled = torch.compile(attend, dynamic=False, fullgraph=True)
        measure(f"  {attend.__name__}", compiled, (qkv, grad), heads)


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
