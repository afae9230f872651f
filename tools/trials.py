"""Tables and a figure of results/trials: contrast and component masks, what raises `ours` on CIFAR-10, the speedrun."""

import json
from pathlib import Path

from published_runs import ROOT, gain, interval, line, of_encoder, operations

from pmae.report.contents import Contents, load
from pmae.report.difference import difference
from pmae.report.style import Drawing, color, legend, marker, panels, styled
from pmae.results import Score
from pmae.runs import Run
from pmae.standing import primary
from pmae.train.stages import first_stage

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
    "patch-masks": "75% of the patches hidden instead of components: `mae_ours`",
    "no-colors": "no colour jitter and greyscale",
}
"""What is changed in each trial of `benchmarks.studies frontier`."""

STAGES = {
    "frontier/control": "patches of 4, 30 epochs",
    "patches/8": "patches of 8, 56 epochs",
    "patches/8-rate": "patches of 8, 56 epochs, twice the rate",
    "patches/8-then-4": "patches of 8, 56 epochs, then of 4, 14 epochs",
    "patches/8-then-4-half-rate": "the same, the encoder goes on at half the rate",
    "patches/8-then-4-fifth-rate": "the same, at a fifth of the rate",
}
"""Runs of `benchmarks.studies patches`, and one of `frontier` beside them."""
MUON = {
    "patches/8": "AdamW, base rate 6e-4",
    "patches/8-rate": "AdamW, 1.2e-3",
    "patches/8-muon": "Muon, 6e-4",
    "patches/8-muon-rate": "Muon, 1.2e-3",
    "optimizers/cifar10-muon-rate": "Muon, 2.4e-3",
    "optimizers/cifar10-muon-rate-4": "Muon, 4.8e-3",
    "patches/cpu-8": "two cores: AdamW, 6e-4",
    "patches/cpu-8-rate": "two cores: AdamW, 1.8e-3",
    "patches/cpu-8-muon": "two cores: Muon, 6e-4",
    "patches/cpu-8-muon-rate": "two cores: Muon, 1.8e-3",
}
"""Runs that differ in optimizer and rate."""
MEDICAL = {"dermamnist": "DermaMNIST", "bloodmnist": "BloodMNIST"}
SEEDS = (0, 1, 2)
LONGER = {
    "stages/cifar10-staged-8": "CIFAR-10, patches of 8, 96 epochs, then of 4, 24 epochs: `ours`",
    "stages/cifar10-simclr-8": "the same without masks and prediction: SimCLR",
    "stages/cifar10-patch-masks-8": "the same with 75% of the patches hidden: `mae_ours`",
    "stages/derma-plain": "DermaMNIST 64x64, patches of 8, 100 epochs",
    "stages/derma-staged-16": "patches of 16, 200 epochs, then of 8, 50 epochs",
}
"""Runs of `benchmarks.studies stages`."""
BEST = {
    "runs/cifar10-contrast-150": "`ours`, patches of 4, 150 epochs, no colours and no local views",
    "runs/cifar10-contrast-800": "`ours`, patches of 8, 800 epochs, no colours and no local views",
    "trials/speedrun/patch_4": "the speedrun with AdamW: colours, local views, patches of 8, then of 4; 15 minutes",
    "trials/speedrun-muon/patch_4": "the speedrun with Muon; 13 minutes",
    "trials/speedrun-three/patch_2": "patches of 8, of 4 and of 2, one schedule: 260, 80 and 16 epochs",
    "trials/speedrun-long/patch_2": "the speedrun as it is now: 260, 130 and 24 epochs",
    "trials/speedrun-long/patch_4": "its encoder before patches of 2",
}
ENDS = {
    "speedrun-muon/patch_8": "a cosine for each: patches of 8, 411 epochs",
    "speedrun-muon/patch_4": "then of 4, 128 epochs",
    "speedrun-three/patch_8": "one schedule: patches of 8 at a constant rate, 260 epochs",
    "speedrun-three/patch_4": "then of 4, the rate going to 0, 80 epochs",
    "speedrun-three/patch_2": "then of 2, from 0.3 of the rate to 0, 16 epochs",
    "speedrun-long/patch_4": "longer: after the same first stage patches of 4, 130 epochs",
    "speedrun-long/patch_2": "then of 2, 24 epochs",
}
"""Ends of the stages of three speedruns."""
ABLATION = {
    "speedrun-three/patch_8": "patches of 8, 260 epochs: `ours`",
    "speedrun-simclr/patch_8": "without masks and prediction: SimCLR",
    "speedrun-mae_ours/patch_8": "with 75% of the patches hidden: `mae_ours`",
    "speedrun-three/patch_4": "then patches of 4, 80 epochs: `ours`",
    "speedrun-simclr/patch_4": "SimCLR",
}
"""The first stages of the speedrun with and without component masks."""
TINY = {
    "tiny/tiny-16": "patches of 16 at a constant rate, stopped after 119 epochs; its look at 80",
    "tiny/tiny": "then of 8, the rate going to 0, 73 epochs",
}
"""Stages on Tiny ImageNet."""
WITHOUT_GPU = {
    "cifar10-now": "CIFAR-10, 10,000 images: as before",
    "cifar10-staged-rate": "leading components, 3 heads, large patches first, twice the rate: the default now",
    "bloodmnist-now": "BloodMNIST: as before",
    "bloodmnist-staged-rate": "the default now",
}
"""Runs on one core of a CPU."""
PUBLISHED = ["PatchMix, ViT-T, patches of 2, 800 epochs, no component masks (published)", "94.4", "92.9", "97.5", ""]


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
    """The difference between two runs on the same images."""
    found = difference(_score(mine, protocol), _score(other, protocol))
    assert found.paired, "the answers of published trials are kept"
    return gain(found)


def looked_at(runs: dict[str, str]) -> str:
    """Held-out training images at the end of each run, with the operations of all its stages."""
    lines = [line(["", "linear", "k-NN", "operations"]), "|---" * 4 + "|"]
    for name, what in runs.items():
        run = Run(TRIALS / name)
        end = [each for each in run.metrics() if "linear" in each][-1]
        scores = [f"{100 * end[key]:.1f}" for key in ("linear", "knn")]
        lines.append(line([what, *scores, operations(*_stages(run))]))
    return "\n".join([*lines, ""])


def cpu_table(runs: dict[str, str] = WITHOUT_GPU, folder: Path = TRIALS / "cpu") -> str:
    """Images that no run was trained on, and the epochs and operations of both stages."""
    lines = [line(["", "epochs", "linear", "k-NN", "operations"]), "|---" * 5 + "|"]
    for name, what in runs.items():
        run, epochs = Run(folder / name), f"{Run(folder / name).config.train.epochs}"
        if first := run.config.encoder.first_patch_size:
            before = first_stage(run.config)
            epochs = f"{before.train.epochs} with patches of {first}, {epochs} of {run.config.encoder.patch_size}"
        scores = [interval(_score(load(run.path), protocol)) for protocol in ("linear", "knn")]
        lines.append(line([what, epochs, *scores, operations(run)]))
    return "\n".join([*lines, ""])


def _stages(run: Run) -> list[Run]:
    """A run and the published ones that its encoder came from."""
    weights = run.config.encoder.weights
    return [*_stages(Run(run.path.parent / Path(weights).name)), run] if weights else [run]


def speedrun_table() -> str:
    """Test images, by preset strong and mean-pooled features: the speedrun beside what there was."""
    lines = [line(["", "linear", "k-NN", "fine-tuned", "operations"]), "|---" * 5 + "|"]
    for name, what in BEST.items():
        run = Run(ROOT / "results" / name)
        scores = {score.protocol: score for score in of_encoder(run) if _is_shown(score)}
        shown = [interval(scores[p]) if p in scores else "–" for p in ("linear", "knn", "finetune")]
        lines.append(line([what, *shown, operations(*_stages(run))]))
    return "\n".join([*lines, line(PUBLISHED), ""])


def tiny_table() -> str:
    """Looks at held-out training images of Tiny ImageNet, then its test images, by preset strong and pooling."""
    scores = of_encoder(Run(TRIALS / "tiny/tiny"))
    lines = [looked_at(TINY), line(["test images", "linear", "k-NN"]), "|---" * 3 + "|"]
    for pooling, what in (("mean", "mean of the patch tokens"), ("cls", "[CLS]")):
        shown = {score.protocol: interval(score) for score in scores if score.pooling == pooling}
        lines.append(line([what, shown["linear"], shown["knn"]]))
    return "\n".join([*lines, ""])


def medical_table() -> str:
    """Test images of the medical sets, by preset strong and mean-pooled features: each seed with Muon, and AdamW."""
    lines = [line(["", "epochs", "linear", "k-NN", "operations"]), "|---" * 5 + "|"]
    for name, title in MEDICAL.items():
        named = {f"{title}, AdamW": ROOT / "results" / "runs" / f"{name}-contrast-150"}
        named |= {f"Muon, seed {seed}": TRIALS / "optimizers" / f"{name}-muon-seed{seed}" for seed in SEEDS}
        for what, path in named.items():
            run = Run(path)
            scores = {score.protocol: score for score in of_encoder(run) if _is_shown(score)}
            shown = [interval(scores[protocol]) for protocol in ("linear", "knn")]
            lines.append(line([what, str(run.config.train.epochs), *shown, operations(run)]))
    return "\n".join([*lines, ""])


def _is_shown(score: Score) -> bool:
    return (score.preset, score.pooling, score.split) == ("strong", "mean", "test")


def looks_table(folder: Path = TRIALS / "speedrun-long") -> str:
    """Some looks of the speedrun: the first and last of each stage, the one that reached the target, a few between."""
    found = json.loads((folder / "speedrun.json").read_text(encoding="utf-8"))
    looks = found["looks"]
    ends = [place for place, look in enumerate(looks) if place + 1 == len(looks) or looks[place + 1]["epoch"] == 0]
    kept = {*range(0, len(looks), 3), *ends, *(end + 1 for end in ends[:-1]), looks.index(found["reached"])}
    lines = [line(["minutes", "patches", "epoch", "linear", "k-NN"]), "|---" * 5 + "|"]
    for place in sorted(kept):
        look = looks[place]
        scores = [f"{100 * look[key]:.2f}" for key in ("linear", "knn")]
        lines.append(line([f"{look['minutes']:.1f}", str(look["patch_size"]), str(look["epoch"]), *scores]))
    return "\n".join([*lines, ""])


@styled
def speedrun_figure(folder: Path = TRIALS / "speedrun-long") -> Drawing:
    """Both scores against the minutes; the patches change where the line begins anew, and 90% is marked."""
    found = json.loads((folder / "speedrun.json").read_text(encoding="utf-8"))
    figure, (axes,) = panels((2.9,))
    for position, (key, label) in enumerate((("linear", "linear probe"), ("knn", "k-NN"))):
        for patch, line_style in ((8, ":"), (4, "--"), (2, "-")):
            points = [(a["minutes"], 100 * a[key]) for a in found["looks"] if a["patch_size"] == patch and a["epoch"]]
            look = {"color": color(position), "linestyle": line_style, "marker": marker(position), "markersize": 3.5}
            axes.plot(*zip(*points, strict=True), label=f"{label}, patches of {patch}", **look)
    axes.axhline(100 * found["target"], color="#888888", linewidth=0.8)
    axes.set(xlabel="minutes on a shared H200", title="CIFAR-10, held-out training images (%)", xlim=(0, None))
    legend(figure, [axes])
    caption = "The speedrun: patches of 8, then of 4, then of 2. The grey line is 90%."
    return Drawing("speedrun", "The speedrun", caption, figure)


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
