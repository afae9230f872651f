"""The tables of the README: linear probes beside baselines, and the long runs beside the published numbers."""

from pathlib import Path

from published_runs import FIGURES, ROOT, RUNS, Kind, cell, line, of_encoder, operations, published_runs

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
    lines = [line(header), "|---" * len(header) + "|", *(text for data in SETS for text in _linear_lines(data, folder))]
    long = [text for data in SETS for text in _paper_lines(data, folder)]
    if long:
        header = [f"{LONG} epochs, published / here", *COLUMNS.values(), "operations, here"]
        lines += ["", line(header), "|---" * len(header) + "|", *long]
    return "\n".join([*lines, ""])


def _linear_lines(data: str, folder: Path) -> list[str]:
    """The longest MAE and PMAE of a data set under preset `strong`, what needs no pretraining, and their operations."""
    kinds = {
        k: runs
        for k, runs in published_runs(folder).items()
        if k.data == data and (k.method, k.ratio) in PAIR and k.recipe in RECIPES
    }
    lengths = {method: {k.epochs for k in kinds if k.method == method} for method, _ in PAIR}
    both = lengths["mae"] & lengths["pmae"]
    if not both:
        return []
    longest = {k.method: runs[0] for k, runs in kinds.items() if k.epochs == max(both)}
    found = {method: _linear(run) for method, run in longest.items()}
    baselines = {label: value for runs in kinds.values() for label, value in _linear(runs[0]).items()}
    mae, pmae = (
        next(v for label, v in found[method].items() if label.startswith(method)) for method in ("mae", "pmae")
    )
    ours = _ours(data, folder)
    beyond = {k.epochs: next(v for label, v in _linear(run).items() if label.startswith("pmae")) for k, run in ours}
    scores = [mae, pmae, *beyond.values()]
    shown = [f"**{value:.1f}**" if value == max(scores) else f"{value:.1f}" for value in scores]
    known = [f"{baselines[label]:.1f}" if label in baselines else "" for label in ("random weights", "pca features")]
    last = [str(epochs) for epochs in beyond] or ["", ""]
    name = f"{published.paper()['data'][data]}{REBUILT.get(data, '')}"
    spent = [operations(run) for run in (longest["mae"], longest["pmae"], *(run for _, run in ours))]
    spent += [""] * (4 - len(spent))
    return [line([name, str(max(both)), *known, *shown, *last]), line(["operations", "", "", "", *spent])]


def _ours(data: str, folder: Path) -> list[tuple[Kind, Run]]:
    """The longest run of recipe `ours` as it is, if there is one."""
    kinds = [k for k in published_runs(folder) if (k.data, k.method, k.recipe, k.differs) == (data, "pmae", "ours", ())]
    return [(k, published_runs(folder)[k][0]) for k in sorted(kinds, key=lambda kind: kind.epochs)[-1:]]


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
    """The long runs of a data set with their recipe's decoder beside the published numbers: preset `paper`, [CLS]."""
    lines = []
    for kind in (kind for kind in long_kinds(data, folder) if kind.method in PUBLISHED and not kind.decoder):
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
        name = f"{published.paper()['data'][data]}, {kind.title}, {kind.settings}"
        lines.append(line([name, *shown, operations(runs[0])]))
    return lines


def pictures() -> str:
    """The first three figures that there are, side by side."""
    found = {name: alt for name, alt in PICTURES.items() if (FIGURES / f"{name}.png").is_file()}
    figures = FIGURES.relative_to(ROOT)
    shown = [f'<img src="{figures}/{name}.png" width="32%" alt="{alt}">' for name, alt in list(found.items())[:3]]
    return "\n".join([*shown, ""])
