"""Decoding from shards: our threads against the `webdataset` loader's processes, in one run: images a second, ratio.

    python benchmarks/streaming.py [--workers 2] [--sides 64 224] [--images 4000]

Both shuffle, decode JPEG and hand over uint8 batches of 256; ours shuffles the whole set, webdataset a buffer of 1,000.
Each is timed from its first batch on, so that the start of processes does not count, and the better of three passes is
kept, taken in turns.
"""

import argparse
import io
import itertools
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import webdataset
from PIL import Image

from pmae.config import DataConfig
from pmae.data.batches import Batches
from pmae.data.sets import load

BATCH, PASSES, SHARDS = 256, 3, 4


def write_shards(folder: Path, count: int, side: int) -> str:
    """Smooth random photographs, each file used several times; the pattern that names the shards."""
    rng, files = np.random.default_rng(0), []
    for _ in range(64):
        coarse = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
        files.append(file.getvalue())
    for shard in range(SHARDS):
        with webdataset.TarWriter(str(folder / f"{shard:03d}.tar")) as writer:
            for i in range(shard, count, SHARDS):
                writer.write({"__key__": f"{i:06d}", "jpg": files[i % 64], "cls": i % 10})
    return f"{folder}/{{000..{SHARDS - 1:03d}}}.tar"


def ours(pattern: str, workers: int) -> Iterator[torch.Tensor]:
    """Batches as training asks for them."""
    images = load(DataConfig(source=pattern, threads=workers)).train.images
    batches = Batches(images, torch.device("cpu"))
    return batches.each(batches.order(torch.Generator().manual_seed(0)).split(BATCH))


def theirs(pattern: str, workers: int) -> Iterator[torch.Tensor]:
    """The loader as its documentation builds it."""
    samples = webdataset.WebDataset(pattern, shardshuffle=SHARDS, empty_check=False).shuffle(1000).decode("rgb8")
    return iter(webdataset.WebLoader(samples.to_tuple("jpg").map(as_tensor), batch_size=BATCH, num_workers=workers))


def as_tensor(sample: tuple[np.ndarray]) -> torch.Tensor:
    """Channels first, as ours."""
    return torch.from_numpy(sample[0]).permute(2, 0, 1)


def speed(batches: Iterator[torch.Tensor]) -> float:
    """Images a second after the first batch."""
    next(batches)
    began = time.perf_counter()
    count = sum(len(batch) for batch in batches)
    return count / (time.perf_counter() - began)


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--sides", type=int, nargs="+", default=[64, 224])
    parser.add_argument("--images", type=int, default=4000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'side':>5} {'workers':>8} {'pmae img/s':>11} {'webdataset img/s':>17} {'ratio':>6} {'indexed in s':>13}")
    for side in options.sides:
        with tempfile.TemporaryDirectory() as folder:
            pattern = write_shards(Path(folder), options.images, side)
            began = time.perf_counter()
            load(DataConfig(source=pattern))
            index, best = time.perf_counter() - began, {ours: 0.0, theirs: 0.0}
            for _, loader in itertools.product(range(PASSES), best):
                best[loader] = max(best[loader], speed(loader(pattern, options.workers)))
        mine, other = best[ours], best[theirs]
        print(f"{side:>5} {options.workers:>8} {mine:>11,.0f} {other:>17,.0f} {mine / other:>6.2f} {index:>13.2f}")


if __name__ == "__main__":
    main()
