"""Accuracy against the number of labels, drawn from what `benchmarks.labels` measured.

python -m benchmarks.label_curves results/labels.jsonl -o results/figures/labels.png
"""

import argparse
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.labels import COMPONENTS, SCRATCH, read
from pmae.report.style import NEUTRAL, PALETTE, WHOLE, WIDTH, Drawing, legend, save_drawing, styled

LINES: dict[tuple[str, str], dict[str, Any]] = {
    ("ours", "fine-tuned"): {"color": PALETTE[0], "marker": "o"},
    ("ours, adapted from Tiny ImageNet", "fine-tuned"): {"color": PALETTE[2], "marker": "^", "linestyle": "--"},
    ("MAE", "fine-tuned"): {"color": PALETTE[1], "marker": "s", "linestyle": "-."},
    (SCRATCH, "fine-tuned"): {"color": PALETTE[3], "marker": "D", "linestyle": ":"},
    (COMPONENTS, "linear"): {"color": NEUTRAL, "marker": "v"},
}
"""Which start and head are drawn, and how."""
Row = dict[str, Any]


@styled
def label_curves(rows: list[Row]) -> Drawing:
    """A panel for each set, two beside each other; bars reach from the lowest to the highest draw."""
    names = list(dict.fromkeys(row["set"] for row in rows))
    figure = Figure(figsize=(2 * WIDTH, 2.6 * -(-len(names) // 2)), layout="constrained")
    axes = list(figure.subplots(-(-len(names) // 2), 2, squeeze=False).flat)
    for panel, name in zip(axes, names, strict=False):
        for (start, head), look in LINES.items():
            found = [row for row in rows if (row["set"], row["start"], row["how"]) == (name, start, head)]
            label = start if head == "fine-tuned" else f"{start}, {head}"
            for kind in ("shot", "labels"):  # two lines: as many of every class are other labels than a share of all
                if points := by_labels([row for row in found if row["budget"].endswith(kind)]):
                    counts, means, low, high = zip(*points, strict=True)
                    panel.errorbar(counts, means, (low, high), label=label, markersize=4, capsize=2, **look)
        panel.set(title=f"{name}, test accuracy (%)", xscale="log", xlabel="labelled images")
        panel.xaxis.set_major_formatter(WHOLE)
    legend(figure, axes, ncols=3)
    caption = (
        "Fine-tuned unless said otherwise, three draws, one with all labels. Left lines: 1, 5 and 20 labels of every "
        "class; right ones: 1, 10 and 100% of all labels."
    )
    return Drawing("labels", "Accuracy against the number of labels", caption, figure)


def by_labels(rows: list[Row]) -> list[tuple[int, float, float, float]]:
    """For each number of labels the mean over the draws, and how far below and above it they reach."""
    points = []
    for count in sorted({row["labels"] for row in rows}):
        found = [row["accuracy"] for row in rows if row["labels"] == count]
        mean = sum(found) / len(found)
        points.append((count, mean, mean - min(found), max(found) - mean))
    return points


def main() -> None:
    """Draw the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("-o", "--out", type=Path, default=Path("labels.png"))
    options = parser.parse_args()
    print(save_drawing(label_curves(read(options.file)), options.out))


if __name__ == "__main__":
    main()
