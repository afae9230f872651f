"""`pmae demo`: the main job on photographs that ship with scikit-image, in a few minutes on two cores."""

import shutil
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from pmae import api
from pmae.config import Config, DecoderConfig, EncoderConfig, OptimConfig, ProbeConfig, TrainConfig
from pmae.data.augment import Standardize
from pmae.data.batches import Batches
from pmae.data.images import Splits
from pmae.data.photos import load_photos
from pmae.errors import UserError
from pmae.evaluate.baselines import RawPixels, fit_pca, random_weights
from pmae.evaluate.features import Representation, extract
from pmae.evaluate.quick import quick_scores
from pmae.models import Encoder, build_encoder
from pmae.report.page import write_report
from pmae.runs import Run
from pmae.train.checkpoint import load_encoder

CPU = torch.device("cpu")
EPOCHS = 10


def demo_config(epochs: int | None = None) -> Config:
    """A ViT of 4 blocks, 96 wide, on 4x4 patches: small enough for two cores, large enough to learn."""
    return Config(
        encoder=EncoderConfig(patch_size=4, width=96, depth=4, heads=6),
        decoder=DecoderConfig("small", width=96, depth=1, heads=6),
        optim=OptimConfig(base_lr=2e-3, warmup_epochs=min(2.0, (epochs or EPOCHS) / 2)),
        train=TrainConfig(epochs=epochs or EPOCHS, batch_size=128, device="cpu"),
        probe=ProbeConfig(every=max(1, (epochs or EPOCHS) // 3)),
    )


def demo(out: Path | str, epochs: int | None = None) -> Run:
    """Pretrain, score against what needs no training, and point at the figures."""
    began, out = time.monotonic(), Path(out)
    _clear(out)
    splits = load_photos()
    run = api.pretrain(demo_config(epochs), splits, out)
    scores = compare(run, splits)
    run.add_results(demo=scores)
    write_report([run.path], out / "report.html")
    _print(run, scores, time.monotonic() - began)
    return run


def compare(run: Run, splits: Splits) -> dict[str, dict[str, float]]:
    """Test accuracy of the pretrained encoder and of what it must beat, all through the same probes."""
    config, encoder, standardize = load_encoder(run)
    shape = splits.train.shape
    batches = Batches(splits.train.images, CPU)
    candidates: dict[str, Representation] = {
        "raw pixels": RawPixels(shape, encoder.width),
        "PCA features": fit_pca(batches, standardize, shape, encoder.width),
        "random weights": random_weights(lambda: build_encoder(config.encoder, shape)),
        "PMAE": encoder,
    }
    return {name: _score(candidate, splits, standardize) for name, candidate in candidates.items()}


def _score(candidate: Representation, splits: Splits, standardize: Standardize) -> dict[str, float]:
    pooling = "mean" if isinstance(candidate, Encoder) else None
    features, labels = [], []
    for part in (splits.train, splits.test):
        if part is None or part.labels is None:
            raise UserError("the demo must have a labelled test part")
        found = extract(candidate, Batches(part.images, CPU), standardize)
        features.append(found[pooling] if pooling else next(iter(found.values())))
        labels.append(torch.from_numpy(part.labels))
    return quick_scores(features[0], labels[0], features[1], labels[1])


def _clear(out: Path) -> None:
    """Remove an earlier demo, and nothing that is not one."""
    if (out / "config.json").is_file():
        if "demo" not in Run(out).results and Run(out).environment["data"]["name"] != "photos":
            raise UserError(f"out must be a new folder or an earlier demo, got the run {str(out)!r}")
        shutil.rmtree(out)


def _print(run: Run, scores: dict[str, dict[str, float]], seconds: float) -> None:
    console = Console()
    pretrained, last = run.results["pretrain"], [m for m in run.metrics() if "images_per_second" in m][-1]
    console.print("\nWhich photograph is this 32x32 crop from? Test accuracy, %:")
    table = Table()
    for column in ("representation", "k-NN", "linear"):
        table.add_column(column, justify="left" if column == "representation" else "right")
    for name, score in scores.items():
        style = "bold" if name == "PMAE" else ""
        table.add_row(name, f"{100 * score['knn']:.1f}", f"{100 * score['linear']:.1f}", style=style)
    console.print(table)
    print(
        f"R2 of the hidden variance on test images {pretrained['held_out_r2']:.3f} (0 is predicting the mean); "
        f"{last['images_per_second']:,.0f} images/s; {seconds:.0f} s in all"
    )
    for path in (*sorted((run.path / "figures").glob("*.png")), run.path / "report.html"):
        print(f"  {path}")
