"""What `pmae predict` costs beside the bare encoder: python -m benchmarks.predict CLASSIFIER DATA [--repeats 3]

Both read the same images, in batches of one size and in float32, in turn. The bare encoder's features stay where they
are; `predict` also works out probabilities and distances and writes a table.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from pmae.classify.model import ImageClassifier, load_classifier
from pmae.classify.predict import predict
from pmae.config import DataConfig
from pmae.data.images import as_tensor
from pmae.data.sets import load
from pmae.embed import exact_products
from pmae.train.environment import pick_device


def bare(classifier: ImageClassifier, images: np.ndarray) -> None:
    """The encoder alone, over all images."""
    embedder = classifier.embedder
    encoder, device, size = embedder.encoder.eval(), embedder.device, embedder.at_once
    with torch.inference_mode(), exact_products():
        for start in range(0, len(images), size):
            encoder.features(embedder.standardize(as_tensor(images[start : start + size]).to(device)))
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds(work: Callable[[], object]) -> float:
    """How long it takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main() -> None:
    """Time both in turn and print images a second and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("classifier", help="folder that pmae finetune wrote")
    parser.add_argument("data", help="an .npy file of images")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    classifier = load_classifier(options.classifier, str(pick_device(options.device)))
    images = np.asarray(load(DataConfig(options.data)).train.images)
    with tempfile.TemporaryDirectory() as folder:
        taken: dict[str, list[float]] = {"bare encoder": [], "pmae predict": []}
        for round in range(options.repeats + 1):  # the first warms up
            out = Path(folder) / f"{round}.csv"
            taken["bare encoder"].append(seconds(lambda: bare(classifier, images)))
            taken["pmae predict"].append(seconds(lambda out=out: predict(classifier, options.data, out)))
    pace = {name: len(images) / statistics.median(own[1:]) for name, own in taken.items()}
    for name, speed in pace.items():
        print(f"{name}: {speed:,.0f} images/s")
    print(f"ratio: {pace['pmae predict'] / pace['bare encoder']:.2f}")


if __name__ == "__main__":
    main()
