"""The studies behind the pages in results/: questions, and the runs that answer them."""

import re
from dataclasses import dataclass

ADAMW = "--optim.name adamw"
ONE_STAGE = "--encoder.first-patch-size 0"
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

    def base(self, name: str) -> str | None:
        """The run from whose encoder one starts, if there is one."""
        found = re.search(r"\{out\}/([^\s/]+)", self.runs[name])
        return found[1] if found else None


PHOTOGRAPHS = Study(
    "What do photographs of 224 pixels gain (results/photographs.md)?",
    {
        "ours": PLAIN,
        "mae": "--recipe mae_masking --decoder released",
        "mae-published": "--recipe mae_masking --decoder small --decoder.width 384 --optim.base-lr 1e-3 "
        "--optim.warmup-epochs 2 --batch-size 128",
        "simclr": f"--recipe simclr {ADAMW}",
        "simclr-local-4": f"--recipe simclr --objective.local-views 4 {ADAMW}",
        "ours-local": f"{PLAIN} --objective.local-views 2",
        "ours-local-4": f"{OURS} --objective.local-views 4 --space cosine",
        "ours-local-4-muon": f"{OURS} --objective.local-views 4 --space cosine --optim.name muon "
        "--encoder.first-patch-size 32 --epochs 48 --probe.every 12",
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
        "local-muon": "--objective.local-views 2 --optim.name muon",
        "local-muon-staged": "--objective.local-views 2 --optim.name muon --encoder.first-patch-size 32 --epochs 15 "
        "--probe.every 5",
        "batch-128": "--batch-size 128",
        "temperature-0.1": "--objective.temperature 0.1",
        "smaller-crops": "--augment.crop-scale 0.08 1.0",
    },
    SPACES.shared,
    HELD_OUT,
)
UNSEEN = Study(
    "What is learned of images that the encoder has not seen (a folder with a val part), rather than by heart?",
    {
        "muon": "",
        "muon-half-rate": "--optim.base-lr 1.2e-3",
        "adamw": ADAMW,
        "weight-decay": "--optim.weight-decay 0.3",
        "smaller-crops": "--augment.crop-scale 0.08 1.0",
        "blur-solarize": "--augment.extra color_jitter grayscale blur solarize",
    },
    f"{OURS} --optim.name muon --encoder.first-patch-size 32 --objective.local-views 2 --space cosine {VIT_S} "
    "--epochs 24 --batch-size 256 --probe.every 6",
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
        "patch-2": "--patch-size 2",
        "prediction": "--objective.contrastive-weight 0 --objective.local-views 0",
        "data2vec": "--objective.contrastive data2vec --objective.local-views 0",
    },
    f"{OURS} --objective.local-views 2 --patch-size 4 --epochs 30 --batch-size 512 --probe.every 10",
    HELD_OUT,
)
THEN = "--encoder.weights {out}/8 --patch-size 4 --epochs 14 --optim.layer-decay 1 --optim.encoder-rate"
PATCHES = Study(
    "Do large patches first and small ones then save operations (beside control of `frontier`)?",
    {
        "8": "--patch-size 8 --epochs 56",
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
    f"--recipe ours --decoder small --patch-size 8 {ONE_STAGE} --epochs 56 --batch-size 512 --probe.every 7",
    HELD_OUT,
)
THEN_20 = "--patch-size 4 --epochs 20 --optim.layer-decay 1"
INGREDIENTS = Study(
    "What raises `ours` with Muon on CIFAR-10, and how does it best go on with small patches?",
    {
        "control": "",
        "constant": "--optim.schedule constant",
        "then-4": f"{THEN_20} --encoder.weights {{out}}/control --optim.encoder-rate 1",
        "then-4-third-rate": f"{THEN_20} --encoder.weights {{out}}/control --optim.encoder-rate 0.33",
        "then-4-new-decoder": f"{THEN_20} --optim.encoder-rate 1 "
        "--encoder.weights {out}/control/checkpoints/epoch_0080/encoder.safetensors",
        "constant-then-4": f"{THEN_20} --encoder.weights {{out}}/constant --optim.encoder-rate 1 "
        "--optim.warmup-epochs 1",
        "temperature-0.3": "--objective.temperature 0.3",
        "temperature-0.5": "--objective.temperature 0.5",
        "no-masks": "--masking.no-enabled --objective.reconstruction-weight 0",
        "half-hidden": "--masked-variance 0.1",
        "batch-1024": "--batch-size 1024 --optim.base-lr 1.7e-3",
    },
    f"--recipe ours --decoder small --patch-size 8 {ONE_STAGE} --epochs 80 --batch-size 512 --optim.name muon "
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
    f"--recipe ours --decoder small --patch-size 8 {ONE_STAGE} --epochs 150 --batch-size 512",
    HELD_OUT,
)
STUDIES = {
    "photographs": PHOTOGRAPHS,
    "spaces": SPACES,
    "steps": STEPS,
    "unseen": UNSEEN,
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
