"""Time a training step: ours and the peers' in one table, how its cost grows, or where its time goes."""

import argparse
import math
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pmae.errors import UserError

if TYPE_CHECKING:
    import torch

    from benchmarks.contest import Pace
    from benchmarks.work import Work
    from pmae.report.tables import Table

ABOUT = ("precision", "batch", "steps", "repeats", "network", "decoder", "space")
EXAMPLES = """examples:
  python -m benchmarks --out results/speed
  python -m benchmarks --sizes 32 --methods mae --peers transformers
  python -m benchmarks --grow side batch --methods pmae --out results/speed
  python -m benchmarks --profile --sizes 64
  python -m benchmarks --sizes 224 --network small --space patch_pca --batch 256 --peers transformers-compiled"""


def main(arguments: list[str] | None = None) -> int:
    """Run one benchmark; a user's mistake is one line and exit code 2."""
    try:
        run(sys.argv[1:] if arguments is None else arguments)
    except UserError as error:
        print(f"benchmarks: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def run(arguments: list[str]) -> None:
    """Parse, call, print."""
    options = parser().parse_args(arguments)
    # The profiler tells its own story on the terminal unless asked not to before torch is imported.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from benchmarks.contest import refuse_engine
    from pmae.errors import require
    from pmae.train.environment import pick_device

    device = pick_device(options.device)
    cuda = device.type == "cuda"
    _fill_in(options, cuda)
    for name in options.engines:
        refuse_engine(name, cuda)
    require(options.workers is None or options.workers >= 0, "workers", "at least 0", options.workers)
    kind = _grow if options.grow is not None else _profile if options.profile else _compare
    kind(options, device, _pace(options, cuda))


def _fill_in(options: argparse.Namespace, cuda: bool) -> None:
    """What was not given follows from the device."""
    from benchmarks.contest import engines
    from benchmarks.grow import BATCH

    growing = options.grow is not None
    defaults = {
        # Growing takes its own range of sides.
        "sizes": [] if growing else [32, 64] if cuda else [32],
        "engines": list(engines(cuda)),
        "batch": BATCH[0 if cuda else 1] if growing else 512 if cuda else 64,
        "steps": 200 if cuda else 2,
        "seconds": (0.3 if growing else 0.7) if cuda else math.inf,
        "precision": "bfloat16" if cuda else "float32",
    }
    for key, value in defaults.items():
        if getattr(options, key) is None:
            setattr(options, key, value)


def _pace(options: argparse.Namespace, cuda: bool) -> "Pace":
    from benchmarks.contest import Pace

    pace = Pace(options.steps, options.repeats, seconds=options.seconds)
    # Compiling for a CPU takes minutes; on CUDA one that has not answered by then hangs.
    return replace(pace, lead_in=3, warm=5, patience=180) if cuda else replace(pace, warm=1)


def parser() -> argparse.ArgumentParser:
    """What the command takes."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks",
        description=__doc__,
        epilog=EXAMPLES,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--sizes", nargs="+", type=int, help="sides of images; 32 64 on CUDA, 32 on a CPU")
    parser.add_argument("--methods", nargs="+", default=["pmae", "mae"], help="pmae mae")
    parser.add_argument("--engines", nargs="+", help="ours: plain compiled full; plain alone on a CPU")
    peers = ["transformers", "lightly", "stable-pretraining"]
    compiled = "transformers-compiled: with torch.compile and images on the device"
    parser.add_argument("--peers", nargs="*", default=peers, help=f"{' '.join(peers)}; {compiled}")
    networks = "encoder: ViT-T in patches of 8, ViT-S or ViT-B in patches of 16"
    parser.add_argument("--network", choices=["tiny", "small", "base"], default="tiny", help=networks)
    parser.add_argument(
        "--decoder", choices=["released", "small"], default="released", help="512 wide and 8 deep, or 192, 4"
    )
    parser.add_argument("--space", default="pca", help="of PMAE: pca, patch_pca, cosine, ...")
    parser.add_argument("--batch", type=int, help="images in a step; 512 on CUDA, 64 on a CPU")
    both = "of all networks, ours and peers'; bfloat16 on CUDA, float32 on a CPU"
    parser.add_argument("--precision", choices=["float32", "bfloat16"], help=both)
    parser.add_argument("--steps", type=int, help="the most steps of a round; 200 on CUDA, 2 on a CPU")
    fitting = "a round takes as many steps as fit; 0.7 on CUDA (0.3 with --grow), no limit on a CPU"
    parser.add_argument("--seconds", type=float, help=fitting)
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
    from benchmarks import machine, records
    from benchmarks.contest import compare

    works = _works(options, device, options.sizes)
    workers = _workers(options, works, device)
    limit, stated = machine.limit(device, options.precision), machine.nominal(device, options.precision)
    length = f"{pace.steps} steps" if math.isinf(pace.seconds) else f"{pace.seconds:g} s"
    note = (
        f"ViT {options.network}, {options.decoder} decoder, batch {options.batch}, {options.precision}, median of "
        f"{pace.repeats} rounds of {length} in turn, crops and flips included; "
        f"peers load with {workers} workers. Limit: {limit / 1e12:,.3g} TFLOP/s, one large product"
        f"{f' ({stated / 1e12:,.3g} by the data sheet)' if stated else ''}. PMAE by a peer: its network with no patch "
        "dropped, our masking around it; ours, full, projects in bfloat16, all but the target. MAE: our decoder ends "
        "with the hidden patches, the peers' with all, and TFLOP/s count what each computes. stable-pretraining "
        "decodes without [CLS], which is less work than its TFLOP/s "
        "assume. Peak memory: tensors on CUDA, growth of the process on a CPU. Warm-up: the first steps, compilation "
        "included; on CUDA all systems compile at once."
    )
    about = _about(options, device, limit, workers)
    sheet = Sheet("speed", f"Training steps on {machine.name_of(device)}", note, options.out, about)
    for rows in compare(works, [*options.engines, *options.peers], workers, pace, _say):
        sheet.add(records.of_row(row, limit) for row in rows)
    sheet.show()


def _workers(options: argparse.Namespace, works: "list[Work]", device: "torch.device") -> int:
    """Loader processes of a peer; none on a CPU, which the loop itself keeps busy."""
    from benchmarks.peers import workers_that_fit

    if options.workers is not None or device.type != "cuda":
        return options.workers or 0
    wanted = min(8, os.cpu_count() or 1)
    fitting = workers_that_fit(works, len(options.peers), wanted)
    if fitting < wanted:
        _say(f"peers load with {fitting} workers: there is no shared memory for {wanted}")
    return fitting


def _grow(options: argparse.Namespace, device: "torch.device", pace: "Pace") -> None:
    """A table and a figure of how cost grows."""
    from benchmarks import grow, machine, records
    from benchmarks.speed_tables import cost_curves, save_curves

    axes, cuda, batch = options.grow or list(grow.AXES), device.type == "cuda", options.batch
    wanted = [p for work in _works(options, device, [32]) for p in grow.points(axes, work, options.sizes, cuda)]
    limit, name = machine.limit(device, options.precision), machine.name_of(device)
    note = (
        f"Each against one thing; the others: 32x32, patch 8, batch {batch}, {8 * batch} images, 0.2 or 0.75 masked. "
        f"{options.precision}, median of {pace.repeats} rounds. PMAE beyond 64x64: leading components and the rest."
    )
    sheet = Sheet("cost", f"How cost grows on {name}", note, options.out, _about(options, device, limit))
    for point in grow.grow(wanted, options.engines[-1], pace, _say):
        sheet.add([records.of_point(point, limit)])
    sheet.show()
    if options.out:
        paths = save_curves(cost_curves(sheet.records, name), options.out)
        print("figure: " + ", ".join(map(str, paths)))


def _profile(options: argparse.Namespace, device: "torch.device", pace: "Pace") -> None:
    """A table of kernel groups."""
    from benchmarks import machine, records
    from benchmarks.contest import profiles
    from benchmarks.contestant import Entry

    limit, title = machine.limit(device, options.precision), f"Where a step's time goes on {machine.name_of(device)}"
    note = "Milliseconds a step while profiled, the last line of each while not."
    sheet = Sheet("profile", title, note, options.out, _about(options, device, limit))
    entries = [Entry(options.engines[-1], work) for work in _works(options, device, options.sizes)]
    for row, profile in profiles(entries, pace, _say):
        sheet.add(records.of_profile(row, profile))
    sheet.show()


def _works(options: argparse.Namespace, device: "torch.device", sizes: list[int]) -> "list[Work]":
    """Every size with every method."""
    from benchmarks.work import NETWORKS, PATCHES, Work
    from pmae.models.decoder import SIZES

    decoder = {f"decoder_{key}": size for key, size in SIZES[options.decoder].items()}
    network, patch = replace(NETWORKS[options.network], **decoder), PATCHES[options.network]
    given = {"precision": options.precision, "space": options.space, "network": network, "patch": patch}
    return [Work(method, side, options.batch, str(device), **given) for side in sizes for method in options.methods]


def _about(options: argparse.Namespace, device: "torch.device", limit: float, workers: int = 0) -> dict[str, object]:
    """What the files say about a run beside its rows."""
    from benchmarks import records

    settings = {key: getattr(options, key) for key in ABOUT}
    seconds = None if math.isinf(options.seconds) else options.seconds
    return records.about(device, limit, workers=workers, seconds=seconds, **settings)


@dataclass
class Sheet:
    """A table that fills: written whole with every piece that comes, where asked, so that a run cut short leaves it."""

    name: str
    title: str
    note: str
    out: Path | None
    about: dict[str, object]
    records: list[dict[str, object]] = field(default_factory=list)

    def add(self, records: Iterable[dict[str, object]]) -> None:
        """Take in some rows."""
        from benchmarks.speed_tables import save_speed

        self.records += records
        if self.out:
            save_speed(self.out, self.table, self.records, self.about)

    def show(self) -> None:
        """Print the table, and where it was written."""
        from benchmarks.speed_tables import aligned

        print(f"{self.title}\n\n{aligned(self.table)}\n\n{self.note}")
        if self.out:
            print(f"written: {self.out / self.name}.csv, .md and .json")

    @property
    def table(self) -> "Table":
        """The rows for people."""
        from benchmarks.speed_tables import speed_table

        return speed_table(self.name, self.title, self.records, self.note)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
