"""Tables of results/trials: what contrast owes to component masks, and what raises `ours` on CIFAR-10."""

from pathlib import Path

from published_runs import ROOT, interval, line, operations

from pmae.report.compare import difference
from pmae.report.contents import Contents, load
from pmae.results import Score, primary
from pmae.runs import Run

TRIALS = ROOT / "results" / "trials"
PROTOCOLS = {"linear": "linear", "mlp": "MLP", "knn": "k-NN"}
VIEWS = {"crops": "crops alone", "colors": "crops, colour jitter and greyscale"}
MASKS = {"": "SimCLR", "+masks": "and component masks", "+masks+prediction": "and their prediction"}
COMPARED = (
    ("crops+masks", "crops", "masks, without colours"),
    ("crops+masks+prediction", "crops+masks", "prediction, without colours"),
    ("colors", "crops", "colours, without masks"),
    ("colors", "crops+masks+prediction", "colours in the place of masks and prediction"),
    ("colors+masks", "colors", "masks beside colours"),
    ("colors+masks+prediction", "colors+masks", "prediction beside colours"),
    ("colors+masks+prediction", "colors", "masks and prediction beside colours"),
)
"""Which run against which, and what the difference is owed to."""
CHANGES = {
    "control": "the start: `ours`, colour jitter, greyscale, two local views, patches of 4",
    "temperature-0.1": "temperature 0.1 instead of 0.2",
    "local-4": "four local views",
    "heads-3": "3 heads instead of 12",
    "drop-path": "stochastic depth 0.1",
    "cosine": "cosines instead of principal components",
    "no-masks": "no masks and no prediction: SimCLR with local views",
    "solarize": "solarization too",
    "no-local": "no local views",
    "smaller-crops": "crops from 8% of the area instead of 20%",
    "moco": "a momentum encoder (MoCo v3) instead of NT-Xent",
    "patch-masks": "75% of the patches hidden instead of components: `mae_ours`",
    "no-colors": "no colour jitter and greyscale",
}
"""What is changed in each trial of `benchmarks.studies frontier`."""


def contrast_table(temperature: str = "0.2", folder: Path = TRIALS / "contrast") -> str:
    """Test accuracies of SimCLR with and without colours, masks and prediction; then what each is worth, paired."""
    runs = {f"{v}{m}": load(folder / f"{v}{m}-{temperature}") for m in MASKS for v in VIEWS}
    lines = [line(["views", "", *PROTOCOLS.values(), "operations"]), "|---" * 6 + "|"]
    for views, title in VIEWS.items():
        for masks, what in MASKS.items():
            run = runs[views + masks]
            shown = [interval(_score(run, protocol)) for protocol in PROTOCOLS]
            lines.append(line(["" if masks else title, what, *shown, operations(Run(run.path))]))
    lines += ["", line(["what it is worth, in points", *PROTOCOLS.values()]), "|---" * 4 + "|"]
    for mine, other, what in COMPARED:
        lines.append(line([what, *(_gain(runs[mine], runs[other], protocol) for protocol in PROTOCOLS)]))
    return "\n".join([*lines, ""])


def _score(run: Contents, protocol: str) -> Score:
    """The score of the test images by the features that stand for the run."""
    return next(s for s in primary(run.scores) if (s.protocol, s.split, s.is_baseline) == (protocol, "test", False))


def _gain(mine: Contents, other: Contents, protocol: str) -> str:
    """The difference and its interval, bold where it is more than chance."""
    found = difference(_score(mine, protocol), _score(other, protocol))
    assert found.paired, "the answers of published trials are kept"
    shown = f"{found.points:+.1f} ({found.low:+.1f} to {found.high:+.1f})"
    return f"**{shown}**" if found.clear else shown


def frontier_table(folder: Path = TRIALS / "frontier") -> str:
    """Held-out training images at the end of each trial, the best first, with gains over the first of them."""
    looks = {name: [each for each in Run(folder / name).metrics() if "linear" in each][-1] for name in CHANGES}
    start = looks["control"]
    lines = [line(["", "linear", "k-NN", "gain", "operations"]), "|---" * 5 + "|"]
    for name in sorted(CHANGES, key=lambda name: (name != "control", -looks[name]["linear"])):
        scores = [100 * looks[name][key] for key in ("linear", "knn")]
        gains = [score - 100 * start[key] for score, key in zip(scores, ("linear", "knn"), strict=True)]
        gain = "" if name == "control" else f"{gains[0]:+.1f} / {gains[1]:+.1f}"
        shown = [f"{score:.1f}" for score in scores]
        lines.append(line([CHANGES[name], *shown, gain, operations(Run(folder / name))]))
    return "\n".join([*lines, ""])
