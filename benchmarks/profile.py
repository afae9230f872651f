"""Where the time of a step goes, by group of kernels on CUDA and of operators on a CPU."""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from benchmarks import machine
from benchmarks.machine import Steps

REST, GAPS = "crops, patches, loss and the rest", "gaps"
GROUPS = (
    ("optimizer", r"adam|optimizer"),
    ("rounding, clipping", r"multi_tensor|foreach|vector_norm|clip"),
    # The names of our attention's kernels are the four at the end.
    ("attention", r"attention|flash|fmha|softmax|sdpa|^_(short|tiled)_(forward|backward)_kernel"),
    # Before GELU, which a product may have at its end. Products that add up parts clear their counters first: of a
    # hundred memsets in a step nearly all are theirs.
    ("gemms", r"nvjet|gemm|gemv|cutlass|cublas|xmma|splitk|wgrad|dgrad|convol|triton_tem|^memset"),
    ("gemms", r"^(?!triton_).*(matmul|addmm|\bb?mm\b|conv(?!ert)|::linear)"),
    ("GELU", r"gelu"),
    ("masks, random numbers, order", r"^_hide|distribution|philox|rand|uniform|sort|scan|cumsum|radix"),
    ("masks, random numbers, order", r"^(?!triton_).*(argm|mask|scatter|arange)"),
    ("norms and residuals", r"norm"),
    ("sums", r"reduce_kernel|^_add_up|^aten::sum"),
    # A fused kernel bears the names of all that it fuses, copies among them.
    ("copies and casts", r"^(?!triton_).*(memcpy|copy|cat|clone|contiguous|::to|gather|index|fill|zero|empty|stack)"),
    ("copies and casts", r"^(?!triton_).*(shape|view|transpose|permute|expand|slice|select|unbind|detach|strided)"),
    ("copies and casts", r"::t$"),
)
"""Patterns for lower-case names, tried in this order."""


@dataclass(frozen=True)
class Share:
    """A group's part of a step: milliseconds, share of the step, and kernels (on a CPU, operators) started."""

    group: str
    milliseconds: float
    share: float
    launches: float


@dataclass(frozen=True)
class Event:
    """One kernel or operator: its name, and the microseconds it took itself."""

    name: str
    microseconds: float


@dataclass(frozen=True)
class Profile:
    """The groups of a step, and the milliseconds of a step when nobody watches."""

    shares: tuple[Share, ...]
    alone: float


def watch(take: Steps, steps: int, device: torch.device) -> Profile:
    """Take steps alone, then as many while every kernel or operator is recorded."""
    alone = 1e3 * machine.seconds(take, steps, device) / steps
    cuda = device.type == "cuda"
    # On CUDA the host is not watched: recording its operators would widen the gaps.
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as recorded:
        wall = machine.seconds(take, steps, device)
    return Profile(tuple(shares(_kernels(recorded) if cuda else _operators(recorded), wall, steps)), alone)


def group_of(name: str) -> str:
    """The group that a kernel or an operator belongs to."""
    lowered = name.lower()
    return next((group for group, pattern in GROUPS if re.search(pattern, lowered)), REST)


def shares(events: Iterable[Event], wall: float, steps: int) -> list[Share]:
    """Groups of a profile that took `wall` seconds, longest first and what is left as gaps: they sum to the step."""
    times: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for event in events:
        group = group_of(event.name)
        times[group] += event.microseconds / 1e6
        counts[group] += 1
    # Kernels on two streams may overlap, and then there is no gap.
    whole = max(wall, sum(times.values()))
    ordered = sorted(times, key=lambda group: -times[group])
    times[GAPS] = whole - sum(times.values())
    return [
        Share(group, 1e3 * times[group] / steps, times[group] / whole, counts[group] / steps)
        for group in [*ordered, GAPS]
    ]


def _kernels(recorded: profile) -> Iterable[Event]:
    for event in recorded.events() or []:
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False):
            yield Event(event.name, event.time_range.elapsed_us())


def _operators(recorded: profile) -> Iterable[Event]:
    for event in recorded.events() or []:
        if event.self_cpu_time_total > 0:
            yield Event(event.name, event.self_cpu_time_total)
