"""Training end to end from a folder of JPEG files, beside training on squares that wait on the device, in one run.

    python -m benchmarks.from_files FOLDER [--pixels 500] [--epochs 4] [--recipe mae_masking]

Each arm is `pmae pretrain` of the same length; its speed is the median of what it logs from the second epoch on, so
that compiling and decoding for the first time do not count. `--pixels` enlarges the files first (short side, quality
90) to see what larger ones cost. `squares` are cut and kept on the device once; `device`, `memory` and `cache` keep the
files' own pixels there and cut crops from them.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from PIL import Image

SUFFIXES = (".jpg", ".jpeg")
ARMS = {
    "squares": ["--augment.crop-from", "square", "--data.keep-on", "device"],
    "device": ["--data.keep-on", "device"],
    "memory": ["--data.keep-on", "host"],
    "cache": ["--data.keep-on", "host", "--data.cache", "cache"],
}


def enlarge(out: Path, pixels: int, file: Path) -> None:
    """Write a file with so many pixels on its short side and a third more on the other."""
    image = Image.open(file).convert("RGB")
    scale = pixels / min(image.size)
    width, height = (round(side * scale) for side in image.size)
    image.resize((width * 4 // 3, height), Image.Resampling.BICUBIC).save(out / f"{file.stem}.jpg", quality=90)


def images_per_second(run: Path) -> float:
    """The median of what a run logged from its second epoch on."""
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(row["images_per_second"] for row in logged if "loss" in row and row["epoch"] > 1)


def train(folder: Path, arm: str, options: argparse.Namespace, place: Path) -> float:
    """Train one arm and return its speed."""
    run = place / arm
    shared = ["--data", str(folder), "--data.resize", str(options.side), "--data.channels", "3"]
    shared += ["--recipe", options.recipe, "--encoder", options.encoder, "--patch-size", "16"]
    shared += ["--epochs", str(options.epochs), "--batch-size", str(options.batch)]
    command = [sys.executable, "-m", "pmae", "pretrain", *shared, *ARMS[arm], "--out", str(run)]
    subprocess.run(command, cwd=place, check=True, stdout=sys.stderr)
    return images_per_second(run)


def main() -> None:
    """Print images a second of each arm, and their share of the first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pixels", type=int)
    parser.add_argument("--files", type=int, default=4096)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--recipe", default="mae_masking")
    parser.add_argument("--encoder", default="vit_small_patch16_224")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        place, folder = Path(name), options.folder.resolve()
        if options.pixels:
            found = sorted(file for file in folder.rglob("*") if file.suffix.lower() in SUFFIXES)[: options.files]
            folder = place / "files"
            folder.mkdir()
            with ProcessPoolExecutor() as pool:
                list(pool.map(partial(enlarge, folder, options.pixels), found, chunksize=64))
        first = None
        for arm in options.arms:
            speed = train(folder, arm, options, place)
            first = first or speed
            print(f"{arm:8} {speed:9,.0f} images/s   {speed / first:.2f}", flush=True)


if __name__ == "__main__":
    main()
