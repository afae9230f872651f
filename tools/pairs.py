"""PMAE against MAE after 800 epochs, protocol by protocol: how far apart, and whether it is more than chance."""

from collections.abc import Sequence
from pathlib import Path

from headline import COLUMNS
from published_runs import RUNS, gain, line, of_encoder

from pmae.report.difference import between
from pmae.results import Score
from pmae.runs import Run

CIFAR10 = (
    ("the text's settings: `paper`, `mae`", "cifar10-pmae-paper-800", "cifar10-mae-paper-800"),
    ("the text's decoder: `masking`, `mae`", "cifar10-pmae-decoder=text-800", "cifar10-mae-paper-800"),
    ("the released code's: `released`, `mae_released`", "cifar10-pmae-released-800", "cifar10-mae-released-800"),
)
MEDICAL = (
    ("DermaMNIST, 20% of the variance, 75% of the patches", "dermamnist-pmae-paper-800", "dermamnist-mae-paper-800"),
    ("DermaMNIST, random ratios", "dermamnist-pmae-paper-random-800", "dermamnist-mae-paper-random-800"),
    ("BloodMNIST, 20% and 75%", "bloodmnist-pmae-paper-800", "bloodmnist-mae-paper-800"),
    ("BloodMNIST, random ratios", "bloodmnist-pmae-paper-random-800", "bloodmnist-mae-paper-random-800"),
)
HOW = (("paper", "cls", "val"), ("paper", "cls", "test"), ("strong", "mean", "test"))
"""Preset, features and images: as the paper has the medical sets and the others, and as we do."""


def pairs_table(pairs: Sequence[tuple[str, str, str]], folder: Path = RUNS) -> str:
    """A line a pair and way of scoring: PMAE less MAE with a 95% interval, bold where it is more than chance."""
    lines = [line(["PMAE above MAE, in points", "preset", "images", *COLUMNS.values()]), "|---" * 7 + "|"]
    for what, *names in pairs:
        runs = [Run(folder / name) for name in names]
        for preset, pooling, split in HOW:
            found = [_scores(run, preset, pooling, split) for run in runs]
            shown = [gain(between(*(each.get(protocol, []) for each in found))) for protocol in COLUMNS]
            if any(shown):
                lines.append(line([what, f"{preset}, {'[CLS]' if pooling == 'cls' else pooling}", split, *shown]))
                what = ""
    return "\n".join([*lines, ""])


def _scores(run: Run, preset: str, pooling: str, split: str) -> dict[str, list[tuple[Run, Score]]]:
    """What a run's encoder was scored, by protocol."""
    wanted = [s for s in of_encoder(run) if (s.preset, s.pooling, s.split) == (preset, pooling, split)]
    return {score.protocol: [(run, score)] for score in wanted}
