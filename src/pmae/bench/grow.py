"""How the cost of a step grows with the side of an image, the patch, the batch, the number of images and the mask."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pmae.bench.compare import Pace, Row, Say, measure
from pmae.bench.contestant import Entry
from pmae.bench.work import Work
from pmae.errors import unknown_name

AXES: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "side": ((32, 64, 96, 128), (16, 32, 48, 64)),
    "patch": ((4, 8, 16), (4, 8, 16)),
    "batch": ((64, 256, 512, 1024, 2048), (4, 16, 32, 64)),
    "images": ((10_000, 100_000, 1_000_000), (1_000, 10_000, 100_000)),
    "masked": ((0.1, 0.3, 0.5, 0.75, 0.9), (0.1, 0.5, 0.75, 0.9)),
}
"""What grows, and how far: on CUDA, and on a CPU."""


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


def grow(wanted: Sequence[tuple[str, float, Work]], system: str, pace: Pace, say: Say) -> list[Point]:
    """Measure every point; one that several axes share is measured once, one that does not fit is named and skipped."""
    known: dict[Work, Row] = {}
    found = []
    for axis, value, work in wanted:
        if work not in known:
            known[work] = measure(Entry(system, work), pace, lambda _: None)
            say(_line(axis, value, known[work]))
        found.append(Point(axis, value, known[work]))
    return found


def _line(axis: str, value: float, row: Row) -> str:
    did = f"skipped: {row.note}" if row.note else f"{row.images_per_second:,.0f} images/s"
    return f"{row.work.method}, {axis} {value:g}: {did}"
