"""The studies behind the pages in results/, each run as two commands: pretraining, then one look at the test images.
Where a study is there to choose by, the second is left out.

    python -m benchmarks.studies                                    all studies and their runs
    python -m benchmarks.studies photographs --data imagenette/     the commands of one study
    python -m benchmarks.studies photographs ours simclr --data imagenette/ --out runs/photographs --run

What is finished in --out is left as it is, what was stopped goes on from its checkpoint. `--epochs` shortens all
runs, to see on a small set that they work; several calls with other names may share a card.
"""

import argparse
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pmae.errors import UserError, require_known
from pmae.runs import Run
from pmae.sweep.find import finished

ADAMW = "--optim.name adamw"
"""What is derived for small images now is Muon; these were, or are to be set beside, runs with AdamW."""
OURS = f"--recipe ours --decoder small --augment.extra color_jitter grayscale {ADAMW}"
PLAIN = f"{OURS} --space patch_pca --objective.local-views 0"
"""What was the default at 224 pixels before local views and cosines."""
VIT_S = "--encoder vit_small_patch16_224 --patch-size 16 --data.labels folders --data.resize 224 --data.channels 3"
HELD_OUT = ""
"""No look at the test images: what is chosen by, is the probe of held-out training images at the end of training."""


@dataclass(frozen=True)
class Study:
    """A question, and the runs that answer it: options of `pmae pretrain` by name, and those all of them share.

    One that starts from another names it below `{out}`, and comes after it.
    """

    question: str
    runs: dict[str, str]
    shared: str
    evaluate: str = "--protocols linear mlp knn --seeds 0 1 2"


PHOTOGRAPHS = Study(
    "What do photographs of 224 pixels gain (results/photographs.md)?",
    {
        "ours": PLAIN,
        "mae": "--recipe mae_masking --decoder released",
        "mae-published": "--recipe mae_masking --decoder small --decoder.width 384 --optim.base-lr 1e-3 "
        "--optim.warmup-epochs 2 --batch-size 128",
        "simclr": "--recipe simclr",
        "simclr-local-4": "--recipe simclr --objective.local-views 4",
        "ours-local": f"{PLAIN} --objective.local-views 2",
        "ours-local-4": f"{OURS} --objective.local-views 4 --space cosine",
        "ours-moco": f"{PLAIN} --objective.contrastive moco",
        "ours-moco-local": f"{PLAIN} --objective.contrastive moco --objective.local-views 2",
    },
    f"{VIT_S} --epochs 200 --batch-size 256 --probe.every 20",
    "--protocols linear knn --seeds 0 1 2",
)
SPACES = Study(
    "Which masking space is the one for 224 pixels?",
    {
        "patch_pca": "",
        "patch_pca-half": "--masked-variance 0.5",
        "patch_pca-grouped": "--space.grouped",
        "cosine": "--space cosine",
        "cosine-grouped": "--space cosine --space.grouped",
        "wavelet": "--space wavelet",
        "wavelet-grouped": "--space wavelet --space.grouped",
        "none": "--masking.no-enabled --objective.reconstruction-weight 0",
    },
    f"{PLAIN} {VIT_S} --epochs 30 --batch-size 256 --probe.every 10",
    HELD_OUT,
)
STEPS = Study(
    "What raises `ours` at 224 pixels, thirty epochs each (beside patch_pca of `spaces`)?",
    {
        "local": "--objective.local-views 2",
        "batch-128": "--batch-size 128",
        "temperature-0.1": "--objective.temperature 0.1",
        "smaller-crops": "--augment.crop-scale 0.08 1.0",
        "moco": "--objective.contrastive moco",
    },
    SPACES.shared,
    HELD_OUT,
)
LONGER = Study(
    "With local views and cosines: what do the masks give, and what raises it further, sixty epochs each?",
    {
        "masks": "",
        "none": "--masking.no-enabled --objective.reconstruction-weight 0",
        "blur-solarize": "--augment.extra color_jitter grayscale blur solarize",
        "batch-128": "--batch-size 128",
        "smaller-crops": "--augment.crop-scale 0.08 1.0",
    },
    f"{OURS} --objective.local-views 2 --space cosine {VIT_S} --epochs 60 --batch-size 256 --probe.every 20",
    HELD_OUT,
)
DECODERS = Study(
    "Does the decoder explain MAE against PMAE?",
    {
        f"{method}-{width}x{depth}": f"--recipe {recipe} --decoder.width {width} --decoder.depth {depth}"
        for method, recipe in (("mae", "mae_masking"), ("pmae", "masking"))
        for width in (192, 512)
        for depth in (1, 4, 8, 12)
    },
    "--patch-size 8 --epochs 200 --batch-size 512 --decoder small",
)
PAPER = Study(
    "Do the claims of the paper hold under each decoder, at its length?",
    {
        "mae": "--recipe mae",
        "mae-512x8": "--recipe mae --decoder released",
        "mae_released": "--recipe mae_released",
        "paper": "--recipe paper",
        "released": "--recipe released",
        "masking-192x12": "--recipe masking --decoder text",
        "masking-small": "--recipe masking --decoder small",
        "kmae": "--recipe kmae",
        "kmae-rest": "--recipe kmae --space.keep-rest",
    },
    "--patch-size 8 --epochs 800 --batch-size 512",
    "--preset paper --protocols linear mlp knn finetune --seeds 0 1 2",
)
RELEASED = Study(
    "Which of the released code's settings costs MAE its 20 points: each taken back alone (results/RESULTS.md)?",
    {
        "mae_released": "",
        "normalized-patches": "--objective.normalize-patches",
        "decoder-text": "--decoder text",
        "statistics-of-channels": "--data.standardize channel",
        "xavier": "--encoder.init xavier --decoder.init xavier",
        "cosine": "--optim.schedule cosine",
        "decay-of-matrices": "--optim.no-decay-all",
    },
    "--recipe mae_released --epochs 800",
    "--preset paper --protocols linear mlp knn --seeds 0 1 2",
)
VIEWS = {"crops": "--augment.extra", "colors": "--augment.extra color_jitter grayscale"}
MASKS = {
    "": "",
    "+masks": "--masking.enabled",
    "+masks+prediction": "--masking.enabled --objective.reconstruction-weight 1",
}
CONTRAST = Study(
    "What does the contrastive loss owe to component masks, to colors and to reconstruction?",
    {
        f"{colors}{masks}-{temperature}": f"--objective.temperature {temperature} {MASKS[masks]} {VIEWS[colors]}"
        for temperature in (0.1, 0.2)
        for masks in MASKS
        for colors in VIEWS
    },
    f"--recipe simclr --decoder small --patch-size 8 --epochs 150 {ADAMW}",
)
FRONTIER = Study(
    "What raises `ours` on CIFAR-10, one change at a time, thirty epochs each (results/frontier.md)?",
    {
        "control": "",
        "no-local": "--objective.local-views 0",
        "no-colors": "--augment.extra",
        "no-masks": "--masking.no-enabled --objective.reconstruction-weight 0",
        "patch-masks": "--recipe mae_ours",
        "local-4": "--objective.local-views 4",
        "temperature-0.1": "--objective.temperature 0.1",
        "cosine": "--space cosine",
        "smaller-crops": "--augment.crop-scale 0.08 1.0",
        "solarize": "--augment.extra color_jitter grayscale solarize",
        "drop-path": "--encoder.drop-path 0.1",
        "heads-3": "--encoder.heads 3",
        "moco": "--objective.contrastive moco",
        "patch-2": "--patch-size 2",
    },
    f"{OURS} --objective.local-views 2 --patch-size 4 --epochs 30 --batch-size 512 --probe.every 10",
    HELD_OUT,
)
THEN = "--encoder.weights {out}/8 --patch-size 4 --epochs 14 --optim.layer-decay 1 --optim.encoder-rate"
PATCHES = Study(
    "Do large patches first and small ones then save operations (beside control of `frontier`)?",
    {
        "8": "--patch-size 8 --epochs 56",
        "8-whole-view": "--patch-size 8 --epochs 56 --masking.whole-view",
        "8-rate": "--patch-size 8 --epochs 56 --optim.base-lr 1.2e-3",
        "8-then-4": f"{THEN} 1",
        "8-then-4-half-rate": f"{THEN} 0.5",
        "8-then-4-fifth-rate": f"{THEN} 0.2",
    },
    f"{OURS} --objective.local-views 2 --batch-size 512 --probe.every 7",
    HELD_OUT,
)
OPTIMIZERS = Study(
    "Does Muon pay, at which rate, and on which sets (--epochs for others than CIFAR-10)?",
    {
        "adamw": ADAMW,
        "adamw-rate": f"{ADAMW} --optim.base-lr 1.2e-3",
        "muon-half-rate": "--optim.name muon --optim.base-lr 6e-4",
        "muon": "--optim.name muon",
        "muon-rate": "--optim.name muon --optim.base-lr 2.4e-3",
        "muon-rate-4": "--optim.name muon --optim.base-lr 4.8e-3",
    },
    "--recipe ours --decoder small --patch-size 8 --epochs 56 --batch-size 512 --probe.every 7",
    HELD_OUT,
)
THEN_20 = "--encoder.weights {out}/control --patch-size 4 --epochs 20 --optim.layer-decay 1 --optim.encoder-rate"
INGREDIENTS = Study(
    "What raises `ours` with Muon on CIFAR-10, and at which share of the rate does it go on with small patches?",
    {
        "control": "",
        "temperature-0.3": "--objective.temperature 0.3",
        "temperature-0.5": "--objective.temperature 0.5",
        "no-masks": "--masking.no-enabled --objective.reconstruction-weight 0",
        "half-hidden": "--masked-variance 0.1",
        "batch-1024": "--batch-size 1024 --optim.base-lr 1.7e-3",
        "then-4": f"{THEN_20} 1",
        "then-4-third-rate": f"{THEN_20} 0.33",
    },
    "--recipe ours --decoder small --patch-size 8 --epochs 80 --batch-size 512 --optim.name muon "
    "--optim.base-lr 2.4e-3 --probe.every 10",
    HELD_OUT,
)
STAGES = Study(
    "On which sets, and with which masks, do large patches first (8 of 32x32, 16 of 64x64) pay for the same work?",
    {
        "plain": "--epochs 28",
        "staged-8": "--encoder.first-patch-size 8 --epochs 14",
        "staged-16": "--encoder.first-patch-size 16 --epochs 14",
        "simclr-8": "--recipe simclr --objective.local-views 2 --encoder.first-patch-size 8 --epochs 14",
        "patch-masks-8": "--recipe mae_ours --encoder.first-patch-size 8 --epochs 14",
    },
    f"--recipe ours --decoder small --batch-size 512 {ADAMW}",
    HELD_OUT,
)
MEDICAL = Study(
    "Do colors and local views help where colors are the diagnosis?",
    {
        "plain": "--augment.extra",
        "colors": "--augment.extra color_jitter grayscale",
        "colors-local": "--augment.extra color_jitter grayscale --objective.local-views 2",
        "local": "--augment.extra --objective.local-views 2",
        "simclr": "--recipe simclr",
    },
    "--recipe ours --decoder small --patch-size 8 --epochs 150 --batch-size 512",
    HELD_OUT,
)
STUDIES = {
    "photographs": PHOTOGRAPHS,
    "spaces": SPACES,
    "steps": STEPS,
    "longer": LONGER,
    "decoders": DECODERS,
    "paper": PAPER,
    "released": RELEASED,
    "contrast": CONTRAST,
    "frontier": FRONTIER,
    "patches": PATCHES,
    "optimizers": OPTIMIZERS,
    "ingredients": INGREDIENTS,
    "stages": STAGES,
    "medical": MEDICAL,
}


def pretraining(study: Study, name: str, options: argparse.Namespace) -> list[str]:
    """The command that pretrains one run of a study, or goes on with it."""
    out = Path(options.out) / name
    if (out / "config.json").exists():
        return ["pmae", "pretrain", "--out", str(out), "--resume"]
    given = ["--data", options.data, "--root", options.root, "--seed", str(options.seed), "--out", str(out)]
    shorter = ["--epochs", str(options.epochs)] if options.epochs else []
    own = f"{study.shared} {study.runs[name]}".replace("{out}", shlex.quote(str(options.out)))
    return ["pmae", "pretrain", *shlex.split(own), *given, *shorter]


def commands(study: Study, name: str, options: argparse.Namespace) -> Iterator[list[str]]:
    """What is still to be done for one run; the baselines of a study are measured with its first run."""
    out = Path(options.out) / name
    if not (out.exists() and finished(Run(out))):
        yield pretraining(study, name, options)
    if study.evaluate and not (out.exists() and Run(out).evaluations):
        alone = [] if name == next(iter(study.runs)) else ["--no-baselines"]
        yield ["pmae", "evaluate", str(out), *shlex.split(study.evaluate), *alone]


def main() -> None:
    """List the studies, print the commands of one, or run them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", nargs="?")
    parser.add_argument("names", nargs="*", help="runs of the study; all if not given")
    parser.add_argument("--data", default="cifar10", help="a named set, or a folder")
    parser.add_argument("--root", default="data", help="folder of named sets")
    parser.add_argument("--out", default="runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, help="instead of the study's own")
    parser.add_argument("--run", action="store_true", help="run the commands instead of printing them")
    options = parser.parse_args()
    if options.study is None:
        for name, study in STUDIES.items():
            print(f"{name}: {study.question}\n  {' '.join(study.runs)}")
        return
    require_known("study", [options.study], STUDIES)
    study = STUDIES[options.study]
    require_known("names", options.names, study.runs)
    for name in options.names or study.runs:
        for command in commands(study, name, options):
            print(shlex.join(command), flush=True)
            if options.run:
                subprocess.run([sys.executable, "-m", *command], check=True)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
