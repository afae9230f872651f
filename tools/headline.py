"""The tables of the README: linear probes beside baselines, and the long runs beside the published numbers."""

from pathlib import Path

from published_runs import FIGURES, ROOT, RUNS, Kind, cell, line, of_encoder, published_runs

from pmae.report import published
from pmae.results import scores_of
from pmae.runs import Run

SETS = ("cifar10", "dermamnist", "bloodmnist")
COLUMNS = {"linear": "linear", "mlp": "MLP", "knn": "k-NN", "finetune": "fine-tuned"}
PUBLISHED = {"mae": "mae_std", "pmae": "pmae_oracle_components"}
"""The published row that a method's long runs are set beside."""
LONG = 800
"""Epochs of the paper's runs."""
PAIR = (("mae", 0.75), ("pmae", 0.2))
RECIPES = ("mae_masking", "masking")
PICTURES = {
    "paper-ratio": "Accuracy of linear probes against the share that is hidden, of MAE and PMAE",
    "paper-curves": "Loss, R2 and probes of MAE and PMAE over 800 epochs",
    "reconstructions-cifar10-pmae-paper-800": "Images, what is left of them, what is hidden, what PMAE predicts of it",
    "spectrum-cifar10": "Images made of the top, the middle and the bottom of the spectrum of CIFAR-10",
    "mask-designs-cifar10": "Images under the masks of MAE and PMAE, and the targets below them",
}
"""The figures that the README may show, by file name, the most telling first."""
REBUILT = {"dermamnist": " 64x64", "bloodmnist": " 64x64"}


def headline(folder: Path = RUNS) -> str:
    """The README's tables: linear probes beside baselines and, where there are long runs, the paper's protocols."""
    header = ["", "epochs", "random weights", "PCA features", "MAE 0.75", "PMAE 0.2", "`ours`", "its epochs"]
    lines = [line(header), "|---" * len(header) + "|", *filter(None, (_linear_line(data, folder) for data in SETS))]
    long = [text for data in SETS for text in _paper_lines(data, folder)]
    if long:
        lines += ["", line([f"{LONG} epochs, published / here", *COLUMNS.values()]), "|---" * 5 + "|", *long]
    return "\n".join([*lines, ""])


def _linear_line(data: str, folder: Path) -> str | None:
    """The longest MAE and PMAE of a data set under preset `strong`, and what needs no pretraining."""
    kinds = {
        k: runs
        for k, runs in published_runs(folder).items()
        if k.data == data and (k.method, k.ratio) in PAIR and k.recipe in RECIPES
    }
    lengths = {method: {k.epochs for k in kinds if k.method == method} for method, _ in PAIR}
    both = lengths["mae"] & lengths["pmae"]
    if not both:
        return None
    found = {k.method: _linear(runs[0]) for k, runs in kinds.items() if k.epochs == max(both)}
    baselines = {label: value for runs in kinds.values() for label, value in _linear(runs[0]).items()}
    mae, pmae = (
        next(v for label, v in found[method].items() if label.startswith(method)) for method in ("mae", "pmae")
    )
    beyond = _ours(data, folder)
    scores = [mae, pmae, *beyond.values()]
    shown = [f"**{value:.1f}**" if value == max(scores) else f"{value:.1f}" for value in scores]
    known = [f"{baselines[label]:.1f}" if label in baselines else "" for label in ("random weights", "pca features")]
    last = [str(epochs) for epochs in beyond] or ["", ""]
    name = f"{published.paper()['data'][data]}{REBUILT.get(data, '')}"
    return line([name, str(max(both)), *known, *shown, *last])


def _ours(data: str, folder: Path) -> dict[int, float]:
    """Epochs and score of the longest run of recipe `ours` as it is, if there is one."""
    kinds = [k for k in published_runs(folder) if (k.data, k.method, k.recipe, k.differs) == (data, "pmae", "ours", ())]
    longest = sorted(kinds, key=lambda kind: kind.epochs)[-1:]
    return {
        k.epochs: next(v for label, v in _linear(published_runs(folder)[k][0]).items() if label.startswith("pmae"))
        for k in longest
    }


def _linear(run: Run) -> dict[str, float]:
    """Test accuracy of linear probes on mean-pooled tokens, or on all a baseline has, by label."""
    found = scores_of(run.evaluations)
    wanted = [
        s for s in found if (s.preset, s.protocol, s.split) == ("strong", "linear", "test") and s.pooling != "cls"
    ]
    return {s.label: s.accuracy.value for s in wanted if s.accuracy.value is not None}


def long_kinds(data: str, folder: Path) -> list[Kind]:
    """The long runs of a data set in the order of telling: the baseline, the paper's method, ours."""
    order = ("mae", "mae_released", "mae_masking", "mae_ours", "paper", "released", "kmae", "masking", "ours")
    return sorted(
        (kind for kind in published_runs(folder) if (kind.data, kind.epochs) == (data, LONG)),
        key=lambda kind: order.index(kind.recipe),
    )


def _paper_lines(data: str, folder: Path) -> list[str]:
    """The long runs of a data set under the paper's preset, on [CLS], beside the published numbers."""
    lines = []
    for kind in (kind for kind in long_kinds(data, folder) if kind.method in PUBLISHED):
        runs = published_runs(folder)[kind]
        scores = [
            s
            for run in runs
            for s in of_encoder(run)
            if (s.preset, s.split, s.pooling) == ("paper", published.split(data), "cls")
        ]
        pairs = [
            (
                published.accuracy(protocol, PUBLISHED[kind.method], data),
                cell([s for s in scores if s.protocol == protocol]),
            )
            for protocol in COLUMNS
        ]
        shown = [f"{'–' if said is None else f'{said:.1f}'} / {ours or '–'}" for said, ours in pairs]
        lines.append(line([f"{published.paper()['data'][data]}, {kind.title}, {kind.settings}", *shown]))
    return lines


def pictures() -> str:
    """The first three figures that there are, side by side."""
    found = {name: alt for name, alt in PICTURES.items() if (FIGURES / f"{name}.png").is_file()}
    figures = FIGURES.relative_to(ROOT)
    shown = [f'<img src="{figures}/{name}.png" width="32%" alt="{alt}">' for name, alt in list(found.items())[:3]]
    return "\n".join([*shown, ""])
