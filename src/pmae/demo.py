"""`pmae demo`: the main job on photographs that ship with scikit-image, in a few minutes on two cores."""

import operator
import shutil
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pmae import api
from pmae.config import Config, DecoderConfig, EncoderConfig, ObjectiveConfig, OptimConfig, ProbeConfig, TrainConfig
from pmae.data.named import load_photos
from pmae.errors import UserError, require
from pmae.evaluate import protocols
from pmae.files import folder_path
from pmae.report.compare import verdict
from pmae.report.contents import load
from pmae.report.page import write_report
from pmae.runs import Run
from pmae.standing import primary, scores_of

EPOCHS = 10


def demo_config(epochs: int = EPOCHS) -> Config:
    """A ViT of 4 blocks, 96 wide, on 4x4 patches: small enough for two cores, large enough to learn."""
    require(epochs >= 1, "epochs", "at least 1", epochs)
    return Config(
        encoder=EncoderConfig(patch_size=4, width=96, depth=4, heads=6),
        # Crops of few photographs gain nothing from a second view, and its task would hide what R2 shows.
        objective=ObjectiveConfig(contrastive_weight=0.0),
        decoder=DecoderConfig("small", width=96, depth=1, heads=6),
        optim=OptimConfig(base_lr=2e-3, warmup_epochs=min(2.0, epochs / 2)),
        train=TrainConfig(epochs=epochs, batch_size=128, device="cpu"),
        probe=ProbeConfig(every=max(1, epochs // 3)),
    )


def demo_protocols() -> protocols.Protocols:
    """The strong preset's linear probe at one rate, and k-NN: seconds instead of minutes on two cores."""
    once = {"kinds": ("linear",), "weight_decays": (1e-4,), "clip_norm": 1.0, "augment": None, "standardize": True}
    probe = protocols.ProbeProtocol(epochs=20, warmup_epochs=2, **once)  # type: ignore[arg-type]
    return protocols.Protocols("demo", probe, protocols.KnnProtocol(), None, resamples=500)


def demo(out: Path | str, epochs: int | None = None) -> Run:
    """Pretrain, score against what needs no training, and point at the figures and the report."""
    began, out = time.monotonic(), folder_path(out)
    config = demo_config(EPOCHS if epochs is None else epochs)
    if (out / "config.json").is_file():
        old, sizes = Run(out), operator.attrgetter("patch_size", "width", "depth", "heads")
        if old.environment["data"]["name"] != "photos" or sizes(old.config.encoder) != sizes(config.encoder):
            raise UserError(f"out must be a new folder or an earlier demo, got the run {str(out)!r}")
        shutil.rmtree(out)
    splits = load_photos()
    api.pretrain(config, splits, out, figures=False)  # those of a scored run are drawn below
    print("scoring the encoder beside random weights, raw pixels and PCA features", flush=True)
    run = api.evaluate(out, demo_protocols(), splits, device="cpu")
    write_report([run.path], out / "report.html")
    _print(run, time.monotonic() - began)
    return run


def _print(run: Run, seconds: float) -> None:
    pretrained, last = run.results["pretrain"], [m for m in run.metrics() if "images_per_second" in m][-1]
    print("\nWhich photograph is this 32x32 crop from? Test accuracy in %, with 95% intervals:")
    table = Table()
    for column in ("representation", "k-NN", "linear"):
        table.add_column(column, justify="left" if column == "representation" else "right")
    scores = primary([score for score in scores_of(run.evaluations) if score.split == "test"])
    for label in reversed(dict.fromkeys(score.label for score in scores)):
        found = {score.protocol: score for score in scores if score.label == label}
        both, ours = [found[protocol].accuracy for protocol in ("knn", "linear")], not found["linear"].is_baseline
        cells = [f"{each.value:.1f} ({each.low:.1f} to {each.high:.1f})" for each in both]
        table.add_row("PMAE" if ours else label, *cells, style="bold" if ours else "")
    Console().print(table)
    print(verdict(load(run.path)).headline)
    told = f"R2 of the hidden variance on test images {pretrained['held_out_r2']:.3f} (0 is predicting the mean)"
    print(f"{told}; {last['images_per_second']:,.0f} images/s; {seconds:.0f} s in all")
    for path in (*sorted((run.path / "figures").glob("*.png")), run.path / "report.html"):
        print(f"  {path}")
