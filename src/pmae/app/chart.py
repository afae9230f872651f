"""The spectrum with some units marked, as an SVG made by hand: matplotlib took a second for what a slider redraws."""

import html
import math

import numpy as np

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 66, 12, 12, 206  # of the upper plot
BAR_TOP, BAR_BOTTOM = 244, 266
SMALLEST = 1e-9  # shares below are no variance at all, and have no place on a logarithm


def spectrum(share: np.ndarray, marked: np.ndarray, things: str, meaning: str) -> str:
    """Shares of variance by rank on logarithms, and all of them as one bar; what is marked differs in shape too."""
    order = np.argsort(-share, kind="stable")
    share, marked = share[order], marked[order]
    label = html.escape(f"share of variance of each of the {things}, those {meaning} marked", quote=True)
    parts = [*_axes(share, things), *_dots(share, marked), *_bar(share, marked, things), *_legend(meaning)]
    return f'<svg role="img" aria-label="{label}" viewBox="0 0 {WIDTH} {HEIGHT}">{"".join(parts)}</svg>'


def _x(rank: np.ndarray | float, count: int) -> np.ndarray:
    return LEFT + (WIDTH - LEFT - RIGHT) * np.log(rank) / max(math.log(count), 1e-9)


def _y(share: np.ndarray | float, low: int, high: int) -> np.ndarray:
    return BOTTOM - (BOTTOM - TOP) * (np.log10(share) - low) / max(high - low, 1)


def _range(share: np.ndarray) -> tuple[int, int]:
    """The decades that hold all shares, as powers of ten."""
    seen = share[share > SMALLEST]
    return math.floor(math.log10(seen.min())), math.ceil(math.log10(seen.max()) + 1e-9)


def _axes(share: np.ndarray, things: str) -> list[str]:
    (low, high), count = _range(share), len(share)
    made = []
    for power in range(high, low - 1, -2):
        y = float(_y(10.0**power, low, high))
        made.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        made.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{100 * 10.0**power:g}%</text>')
    for power in range(math.floor(math.log10(count)) + 1):
        x = float(_x(10.0**power, count))
        made.append(f'<path class="grid" d="M{x:.1f} {TOP}V{BOTTOM}"/>')
        made.append(f'<text x="{x:.1f}" y="{BOTTOM + 16}" text-anchor="middle">{10**power:,}</text>')
    where = f'x="{WIDTH - RIGHT}" y="{BOTTOM + 30}" text-anchor="end"'
    return [*made, f"<text {where}>{html.escape(things)} by rank, each with its share of the variance</text>"]


def _dots(share: np.ndarray, marked: np.ndarray) -> list[str]:
    """Small dots, and diamonds for those marked; of several on one pixel one is drawn."""
    low, high = _range(share)
    seen = np.flatnonzero(share > SMALLEST)
    places = np.stack([_x(seen + 1.0, len(share)), _y(share[seen], low, high)], 1).round().astype(int)
    made = []
    for kind, shape in ((False, "h0"), (True, "m-4 0l4-4 4 4-4 4z")):
        here = np.unique(places[marked[seen] == kind], axis=0)
        path = "".join(f"M{x} {y}{shape}" for x, y in here.tolist())
        made.append(f'<path class="{"marked" if kind else "dots"}" d="{path}"/>')
    return made


def _bar(share: np.ndarray, marked: np.ndarray, things: str) -> list[str]:
    """All variance from left to right, the largest share first, each as wide as it is; neighbours alike are joined."""
    ends = np.concatenate([[0.0], share.cumsum()]) / share.sum()
    edges = np.flatnonzero(np.diff(np.concatenate([[0], marked.astype(int), [0]])))
    scale, made = WIDTH - LEFT - RIGHT, []
    for start, end in edges.reshape(-1, 2).tolist():
        x, wide = LEFT + scale * ends[start], scale * (ends[end] - ends[start])
        if wide > 0.05:  # narrower ones are no ink at all
            made.append(f"M{x:.1f} {BAR_TOP}h{wide:.2f}V{BAR_BOTTOM}h-{wide:.2f}z")
    words = f"all variance, the {html.escape(things)} side by side, the largest first"
    return [
        f'<path class="rest" d="M{LEFT} {BAR_TOP}H{WIDTH - RIGHT}V{BAR_BOTTOM}H{LEFT}z"/>',
        f'<path class="filled" d="{"".join(made)}"/>',
        f'<text x="{LEFT}" y="{BAR_BOTTOM + 18}">{words}</text>',
    ]


def _legend(meaning: str) -> list[str]:
    y = BOTTOM - 14
    return [
        f'<path class="marked" d="M{LEFT + 10} {y}m-4 0l4-4 4 4-4 4z"/>',
        f'<text x="{LEFT + 20}" y="{y + 4}">{html.escape(meaning)}</text>',
        f'<path class="dots" d="M{LEFT + 10} {y - 18}h0"/><text x="{LEFT + 20}" y="{y - 14}">the others</text>',
    ]
