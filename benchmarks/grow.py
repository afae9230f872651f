"""How the cost of a step grows with the side of an image, the patch, the batch, the number of images and the mask."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.contest import Pace, Row, Say, contest
from benchmarks.contestant import Entry
from benchmarks.work import Work
from pmae.errors import unknown_name

BATCH = (192, 16)
"""Images in a step, on CUDA and on a CPU, unless told otherwise."""
AXES: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "side": ((32, 64, 96, 128), (16, 32, 48, 64)),
    "patch": ((4, 8, 16), (4, 8, 16)),
    "batch": ((48, 192, 768), (4, 16, 32, 64)),
    "images": ((1_536, 65_536, 1_048_576), (1_000, 10_000, 100_000)),
    "masked": ((0.2, 0.5, 0.75, 0.9), (0.2, 0.5, 0.75, 0.9)),
}
"""What grows, and how far: on CUDA, and on a CPU.

On CUDA every point but the shared one is a compilation, of 10 to 25 seconds, and of 50 at sides of 96 and 128, whose
sequences are too long for our kernels, so that the compiler sees all blocks. One after another two methods would take
ten minutes. So they compile at once, which bounds the plan by the card's memory: these 26 points with batches of 192
fit on a card of 140 GB together.
"""


@dataclass(frozen=True)
class Point:
    """One measurement on a curve."""

    axis: str
    value: float
    row: Row


def points(axes: Sequence[str], base: Work, sides: Sequence[int], cuda: bool) -> Iterator[tuple[str, float, Work]]:
    """Every axis in turn, all else as in `base`; `sides` replaces the usual ones."""
    for axis in axes:
        if axis not in AXES:
            raise unknown_name("grow", axis, AXES)
        usual = AXES[axis][0 if cuda else 1]
        for value in sides if axis == "side" and sides else usual:
            number = float(value) if axis == "masked" else int(value)
            images = {"batch": 8 * int(value), "images": int(value)}.get(axis, base.images)
            # A share for masking; otherwise the number itself, with as many images as the batch needs.
            yield axis, value, replace(base, **{"images": images, axis: number})  # type: ignore[arg-type]


def grow(wanted: Sequence[tuple[str, float, Work]], system: str, pace: Pace, say: Say) -> Iterator[Point]:
    """Measure every point; one that several axes share is measured once, one that does not fit is named and skipped."""
    works = list(dict.fromkeys(work for _, _, work in wanted))
    rows = contest([[Entry(system, work)] for work in works], pace, lambda _: None)
    known: dict[Work, Row] = {}
    for axis, value, work in wanted:
        if work not in known:
            # Both go through the works in the order in which they are first wanted.
            (known[work],) = next(rows)
            say(_line(axis, value, known[work]))
        yield Point(axis, value, known[work])


def _line(axis: str, value: float, row: Row) -> str:
    did = f"skipped: {row.note}" if row.note else f"{row.images_per_second:,.0f} images/s"
    return f"{row.work.method}, {axis} {value:g}: {did}"
