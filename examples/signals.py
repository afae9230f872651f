"""Beyond images: signals (N, C, L) and vectors (N, D) through the same spaces and masks.

    python examples/signals.py                     # scan lines of three surfaces: which one is a line from?
    python examples/signals.py --data table        # cells described by 30 numbers each: is a tumour malignant?

A small encoder is pretrained without labels, then frozen. Its features are scored by 20 nearest neighbours and by a
linear classifier, beside the raw numbers, their principal components and the same encoder before training. The
photographs ship with scikit-image, the table with scikit-learn; nothing is downloaded.
"""

import argparse
import tempfile

import numpy as np
import torch
from skimage import data as photographs
from sklearn.datasets import load_breast_cancer
from torch import Tensor

import pmae
from pmae.config import Config, DecoderConfig, EncoderConfig, OptimConfig, ProbeConfig, TrainConfig
from pmae.data.arrays import from_arrays
from pmae.data.batches import Batches
from pmae.data.images import ImageSet, Splits
from pmae.evaluate.baselines import RawPixels, fit_pca, random_weights
from pmae.evaluate.features import extract
from pmae.evaluate.probes import probe_accuracies
from pmae.models import build_encoder

SURFACES = ("brick", "grass", "gravel")
LENGTH, TEST_FROM = 64, 384
CPU = torch.device("cpu")


def scan_lines() -> Splits:
    """Every other row of three photographed surfaces in windows of 64 samples; the lowest quarter is held out."""

    def lines(rows: slice) -> ImageSet:
        cut = [getattr(photographs, name)()[rows].reshape(-1, 1, LENGTH) for name in SURFACES]
        return from_arrays(np.concatenate(cut), np.repeat(np.arange(len(cut)), len(cut[0])), layout="NCL")

    return Splits("scan lines", lines(slice(0, TEST_FROM, 2)), test=lines(slice(TEST_FROM, TEST_FROM + 128, 2)))


def table() -> Splits:
    """569 cell samples of 30 measurements, every third held out; two axes of floats are taken as vectors."""
    values, labels = load_breast_cancer(return_X_y=True)
    held_out = np.arange(len(values)) % 3 == 0
    train, test = (from_arrays(values[part], labels[part]) for part in (~held_out, held_out))
    return Splits("breast cancer", train, test=test)


SETS = {"lines": (scan_lines, 12), "table": (table, 60)}
"""What to learn from, and for how many epochs."""


def settings(epochs: int) -> Config:
    """A narrow encoder; what is not said here (patch, standardization, ratio) follows from the data."""
    return Config(
        encoder=EncoderConfig(width=64, depth=3, heads=4),
        decoder=DecoderConfig("small", width=64, depth=2, heads=4),
        optim=OptimConfig(base_lr=3e-3),
        probe=ProbeConfig(every=epochs),
        train=TrainConfig(epochs=epochs, batch_size=64, device="cpu", checkpoint_every=epochs),
    )


def scores(represent: torch.nn.Module, standardize: torch.nn.Module, splits: Splits) -> dict[str, float]:
    """Test accuracy on frozen features, of which the mean over tokens is taken where there are several kinds."""
    found: list[Tensor] = []
    for part in (splits.train, splits.test):
        pooled = extract(represent, Batches(part.images, CPU), standardize)
        found += [pooled.get("mean", next(iter(pooled.values()))), torch.as_tensor(part.labels)]
    return probe_accuracies(*found)


def main(arguments: list[str] | None = None) -> dict[str, dict[str, float]]:
    """Pretrain, score and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=SETS, default="lines")
    parser.add_argument("--epochs", type=int)
    options = parser.parse_args(arguments)
    read, usual = SETS[options.data]
    splits = read()
    with tempfile.TemporaryDirectory() as folder:
        run = pmae.pretrain(settings(options.epochs or usual), splits, f"{folder}/run")
        config, encoder, standardize = pmae.load_encoder(run)
        r2 = run.results["pretrain"]["held_out_r2"]
    shape, width = splits.train.shape, encoder.width
    rivals = {
        "raw numbers": RawPixels(shape, width),
        "principal components": fit_pca(Batches(splits.train.images, CPU), standardize, shape, width),
        "random weights": random_weights(lambda: build_encoder(config.encoder, shape)),
        "PMAE": encoder,
    }
    found = {name: scores(represent, standardize, splits) for name, represent in rivals.items()}
    print(f"\nR2 of the hidden variance on held-out data: {r2:.3f} (0 is predicting the mean)")
    for name, score in found.items():
        print(f"  {name:<22} k-NN {100 * score['knn']:5.1f}%   linear {100 * score['linear']:5.1f}%")
    return {"pretrain": {"r2": r2}, **found}


if __name__ == "__main__":
    main()
