"""The table of the README: linear probes beside baselines; and which runs are long."""

from pathlib import Path

from published_runs import RUNS, Kind, all_scores, line, operations, published_runs

from pmae.report.published import published
from pmae.runs import Run

SETS = ("cifar10", "dermamnist", "bloodmnist")
COLUMNS = {"linear": "linear", "mlp": "MLP", "knn": "k-NN", "finetune": "fine-tuned"}
PUBLISHED = {
    ("mae", False): "mae_std",
    ("mae", True): "mae_random",
    ("pmae", False): "pmae_oracle_components",
    ("pmae", True): "pmae_random_components",
}
"""The published row that a method's long runs are set beside, by whether their ratio is random."""
LONG = 800
"""Epochs of the paper's runs."""
PAIR = (("mae", 0.75), ("pmae", 0.2))
RECIPES = ("mae_masking", "masking")
OLDER = {"optim.name=adamw"}
"""What runs of `ours` had that were made before Muon was its default."""
REBUILT = {"dermamnist": " 64x64", "bloodmnist": " 64x64"}


BASELINES = {"random weights": "random weights", "pca features": "PCA features"}


def headline(folder: Path = RUNS) -> str:
    """The README's table: linear probes of what is pretrained and of what is not, with the operations that it took."""
    names = [f"{published()['data'][data]}{REBUILT.get(data, '')}" for data in SETS]
    header = ["", *(text for name in names for text in (name, "operations"))]
    columns = [_column(data, folder) for data in SETS]
    titles = list(dict.fromkeys(title for column in columns for title in column))
    rows = [[title, *(text for column in columns for text in column.get(title, ("–", "–")))] for title in titles]
    return "\n".join([line(header), "|---" * len(header) + "|", *map(line, rows), ""])


def _column(data: str, folder: Path) -> dict[str, tuple[str, str]]:
    """Accuracy and operations by row: baselines, the longest pair of MAE and PMAE, and the longest run of `ours`."""
    runs = published_runs(folder)
    kinds = [k for k in runs if k.data == data and (k.method, k.ratio) in PAIR and k.recipe in RECIPES]
    lengths = [{k.epochs for k in kinds if k.method == method} for method, _ in PAIR]
    longest = max(set.intersection(*lengths), default=None)
    pair = sorted((k for k in kinds if k.epochs == longest), key=lambda k: k.method)
    ours = [k for k in runs if (k.data, k.method, k.recipe) == (data, "pmae", "ours") and {*k.differs} <= OLDER]
    shown = [*pair, *sorted(ours, key=lambda k: k.epochs)[-1:]]
    known = {label: value for k in kinds for label, value in _linear(runs[k][0]).items()}
    found = {title: (f"{known[label]:.1f}", "0") for label, title in BASELINES.items() if label in known}
    scores = {k: next(v for label, v in _linear(runs[k][0]).items() if label.startswith(k.method)) for k in shown}
    for kind, value in scores.items():
        text = f"**{value:.1f}**" if value == max(scores.values()) else f"{value:.1f}"
        found[_title(kind)] = text, operations(runs[kind][0])
    return found


def _title(kind: Kind) -> str:
    return f"{f'`{kind.recipe}`' if kind.recipe == 'ours' else kind.title}, {kind.epochs} epochs"


def _linear(run: Run) -> dict[str, float]:
    """Test accuracy of linear probes on mean-pooled tokens, or on all a baseline has, by label."""
    found = all_scores(run)
    wanted = [
        s for s in found if (s.preset, s.protocol, s.split) == ("strong", "linear", "test") and s.pooling != "cls"
    ]
    return {s.label: s.accuracy.value for s in wanted if s.accuracy.value is not None}


def long_kinds(data: str, folder: Path) -> list[Kind]:
    """The long runs of a data set in the order of telling: the baseline, the paper's method, ours."""
    order = ("mae", "mae_released", "mae_masking", "mae_ours", "paper", "released", "kmae", "masking", "ours", "simclr")
    return sorted(
        (kind for kind in published_runs(folder) if (kind.data, kind.epochs) == (data, LONG)),
        key=lambda kind: order.index(kind.recipe),
    )
