"""Where the time of a step goes, by group of kernels on CUDA and of operators on a CPU."""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from pmae.bench import machine, ours
from pmae.bench.work import Work
from pmae.train.environment import pick_device

REST, GAPS = "GELU and elementwise", "gaps"
GROUPS = (
    ("optimizer", r"adam|optimizer|multi_tensor|foreach"),
    ("attention", r"attention|flash|fmha|softmax|sdpa|^_(forward|backward)_kernel"),
    ("products", r"gemm|gemv|cutlass|cublas|nvjet|xmma|splitk|triton_tem|matmul|addmm|\bb?mm\b|conv(?!ert)|::linear"),
    ("layer norm", r"layer_?norm"),
    (REST, r"gelu"),
    (
        "random numbers, sort, mask",
        r"distribution|philox|rand|uniform|sort|cumsum|scan|argm|mask|scatter|gather|arange",
    ),
    # A fused kernel bears the names of all it fuses: it is a copy if it does nothing else.
    (
        "copies and casts",
        r"^triton_\w+?_fused_(_*(to_copy|clone|copy|cat|view|transpose|permute|expand|slice|t)(?=_))+_\d+",
    ),
    ("copies and casts", r"^(?!triton_).*(memcpy|memset|copy|cat|clone|contiguous|::to|index|fill|zero|empty|stack)"),
    (
        "copies and casts",
        r"^(?!triton_).*(shape|view|transpose|permute|expand|slice|select|unbind|detach|strided|::t$)",
    ),
)
"""Patterns for lower-case names, tried in this order; the names of our attention's kernels are the two at its end."""


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


def profile_step(work: Work, engine: str, steps: int, warm: int) -> tuple[list[Share], float]:
    """The groups of a step, and the milliseconds of a step when nobody watches."""
    device = pick_device(work.device)
    take = ours.build(work, engine)
    take(warm)
    alone = 1e3 * machine.seconds(take, steps, device) / steps
    cuda = device.type == "cuda"
    # On CUDA the host is not watched: recording its operators would widen the gaps.
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as recorded:
        wall = machine.seconds(take, steps, device)
    return shares(list(_kernels(recorded) if cuda else _operators(recorded)), wall, steps), alone


def _kernels(recorded: profile) -> Iterable[Event]:
    for event in recorded.events() or []:
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False):
            yield Event(event.name, event.time_range.elapsed_us())


def _operators(recorded: profile) -> Iterable[Event]:
    for event in recorded.events() or []:
        if event.self_cpu_time_total > 0:
            yield Event(event.name, event.self_cpu_time_total)
