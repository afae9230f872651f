"""Time a training step: ours and the peers' in one table, how its cost grows, or where its time goes."""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from pmae.bench.compare import Pace
    from pmae.bench.work import Work

EXAMPLES = """examples:
  pmae bench --out results/speed
  pmae bench --sizes 32 --methods mae --peers transformers
  pmae bench --grow side batch --methods pmae --out results/speed
  pmae bench --profile --sizes 64"""


def run(arguments: list[str]) -> None:
    """Parse, call, print."""
    options = parser().parse_args(arguments)
    # The profiler tells its own story on the terminal unless asked not to before torch is imported.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from pmae.bench.compare import Pace, refuse_engine
    from pmae.errors import require
    from pmae.train.environment import pick_device

    device = pick_device(options.device)
    cuda = device.type == "cuda"
    _fill_in(options, cuda)
    for name in options.engines:
        refuse_engine(name, cuda)
    require(options.workers >= 0, "workers", "at least 0", options.workers)
    lead_in = max(2, 2 * options.workers) if cuda else 0
    pace = Pace(options.steps, options.repeats, lead_in, 5 if cuda else 1)
    kind = _grow if options.grow is not None else _profile if options.profile else _compare
    kind(options, device, pace)


def _fill_in(options: argparse.Namespace, cuda: bool) -> None:
    """What was not given follows from the device."""
    from pmae.bench.compare import engines

    defaults = {
        "sizes": [32, 64] if cuda else [32],
        "engines": list(engines(cuda)),
        "batch": 512 if cuda else 64 if options.grow is None else 16,
        "steps": 50 if cuda else 2,
        "precision": "bfloat16" if cuda else "float32",
        "workers": min(8, os.cpu_count() or 1) if cuda else 0,
    }
    # Growing takes its own range of sides.
    defaults["sizes"] = [] if options.grow is not None else defaults["sizes"]
    for key, value in defaults.items():
        if getattr(options, key) is None:
            setattr(options, key, value)


def parser() -> argparse.ArgumentParser:
    """What the command takes."""
    parser = argparse.ArgumentParser(
        "pmae bench",
        description=__doc__,
        epilog=EXAMPLES,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--sizes", nargs="+", type=int, help="sides of images; 32 64 on CUDA, 32 on a CPU")
    parser.add_argument("--methods", nargs="+", default=["pmae", "mae"], help="pmae mae")
    parser.add_argument("--engines", nargs="+", help="ours: plain compiled full; plain alone on a CPU")
    peers = ["transformers", "lightly", "stable-pretraining"]
    parser.add_argument("--peers", nargs="*", default=peers, help=" ".join(peers))
    parser.add_argument("--batch", type=int, help="images in a step; 512 on CUDA, 64 on a CPU")
    both = "of all networks, ours and peers'; bfloat16 on CUDA, float32 on a CPU"
    parser.add_argument("--precision", choices=["float32", "bfloat16"], help=both)
    parser.add_argument("--steps", type=int, help="steps in a round; 50 on CUDA, 2 on a CPU")
    parser.add_argument("--repeats", type=int, default=3, help="rounds, of which the median counts")
    parser.add_argument("--workers", type=int, help="loader processes of a peer; up to 8 on CUDA, none on a CPU")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--out", type=Path, help="folder for CSV, Markdown and JSON, and the figure of --grow")
    grow = "how cost grows, with the last engine: side patch batch images masked, or all of them"
    parser.add_argument("--grow", nargs="*", metavar="AXIS", help=grow)
    parser.add_argument("--profile", action="store_true", help="where the time of a step goes, with the last engine")
    return parser


def _compare(options: argparse.Namespace, device: "torch.device", pace: "Pace") -> None:
    """One table of all systems."""
    from pmae.bench import machine, records
    from pmae.bench.compare import compare

    works = _works(options, device, options.sizes)
    rows = compare(works, [*options.engines, *options.peers], options.workers, pace, _say)
    limit = machine.limit(device, options.precision)
    found = [records.of_row(row, limit) for row in rows]
    note = (
        f"Batch {options.batch}, {options.precision}, median of {pace.repeats} rounds of {pace.steps} steps in turn, "
        f"crops and flips included; peers load with {options.workers} workers. Limit: {limit / 1e12:,.3g} TFLOP/s, one "
        "large product. PMAE by a peer: its network with no patch dropped, our masking around it. stable-pretraining "
        "decodes without [CLS], which is less work than its TFLOP/s assume. Peak memory: tensors on "
        "CUDA, growth of the process on a CPU. Warm-up: the first steps, compilation included."
    )
    _finish(options, "speed", f"Training steps on {machine.name_of(device)}", found, note, device, limit)


def _grow(options: argparse.Namespace, device: "torch.device", pace: "Pace") -> None:
    """A table and a figure of how cost grows."""
    from pmae.bench import grow, machine, records
    from pmae.report.speed import cost_curves, save_curves

    axes, cuda, batch = options.grow or list(grow.AXES), device.type == "cuda", options.batch
    base = _works(options, device, [32])
    wanted = [point for work in base for point in grow.points(axes, work, options.sizes, cuda)]
    limit = machine.limit(device, options.precision)
    points = grow.grow(wanted, options.engines[-1], pace, _say)
    found = [records.of_point(point, limit) for point in points]
    note = f"Each against one thing; the others: 32x32, patch 8, batch {batch}, {8 * batch} images, 0.2 or 0.75 masked."
    _finish(options, "cost", f"How cost grows on {machine.name_of(device)}", found, note, device, limit)
    if options.out:
        paths = save_curves(cost_curves(found, machine.name_of(device)), options.out)
        print("figure: " + ", ".join(map(str, paths)))


def _profile(options: argparse.Namespace, device: "torch.device", pace: "Pace") -> None:
    """A table of kernel groups."""
    from pmae.bench import machine, records
    from pmae.bench.profile import profile_step

    found, alone = [], []
    for work in _works(options, device, options.sizes):
        _say(f"{work.method} {work.side}x{work.side}, {options.engines[-1]}: warming up")
        shares, unwatched = profile_step(work, options.engines[-1], pace.steps, pace.warm)
        found += [records.of_share(work, options.engines[-1], share) for share in shares]
        alone.append(f"{work.method} {work.side}x{work.side} {unwatched:,.2f} ms")
    note = f"Milliseconds a step while profiled; a step alone: {', '.join(alone)}."
    title = f"Where a step's time goes on {machine.name_of(device)}"
    _finish(options, "profile", title, found, note, device, machine.limit(device, options.precision))


def _works(options: argparse.Namespace, device: "torch.device", sizes: list[int]) -> "list[Work]":
    """Every size with every method."""
    from pmae.bench.work import Work

    return [
        Work(method, side, options.batch, str(device), precision=options.precision)
        for side in sizes
        for method in options.methods
    ]


def _finish(
    options: argparse.Namespace,
    name: str,
    title: str,
    found: list[dict[str, object]],
    note: str,
    device: "torch.device",
    limit: float,
) -> None:
    """Print the table and, where asked, write it."""
    from pmae.bench import records
    from pmae.report.speed import aligned, save_speed, speed_table

    table = speed_table(name, title, found, note)
    print(f"{title}\n\n{aligned(table)}\n\n{note}")
    if options.out:
        settings = {
            "precision": options.precision,
            "batch": options.batch,
            "steps": options.steps,
            "repeats": options.repeats,
        }
        save_speed(options.out, table, found, records.about(device, limit, workers=options.workers, **settings))
        print(f"written: {options.out / name}.csv, .md and .json")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
