"""Random resized crops from images of many sizes: ours against torchvision's RandomResizedCrop, in one run.

    python -m benchmarks.crops [--device cuda] [--threads 2] [--side 224] [--batch 512] [--batches 4]

Images wait where crops are cut, in memory or on the GPU, and are 300 to 668 pixels wide. On a CPU torchvision's
transform runs in as many threads as ours; on a GPU image by image, as its documentation has it. Both take turns and the
better of three rounds is kept.
"""

import argparse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms.v2 import RandomResizedCrop

from benchmarks.machine import seconds
from pmae.config import AugmentConfig
from pmae.data.augment import boxes_of, draw_crops
from pmae.data.crops import crop_ragged
from pmae.data.ragged import Ragged, ragged

IMAGES, ROUNDS = 256, 3
CROPS = AugmentConfig(flip=False)


def photographs(device: torch.device, side: int) -> Ragged:
    """Smooth colours, their short side up to what crops can use."""
    draw = np.random.default_rng(0)
    short = draw.integers(round(1.3 * side), round(side / CROPS.crop_scale[0] ** 0.5) + 1, IMAGES)
    sizes = np.column_stack([short, (short * draw.uniform(1, 4 / 3, IMAGES)).astype(int), np.full(IMAGES, 3)])
    pixels = torch.from_numpy(draw.integers(0, 256, int(sizes.prod(1).sum()), dtype=np.uint8))
    return ragged(pixels, sizes).to(device)


def ours(images: Ragged, side: int, batch: int, threads: int) -> Callable[[int], None]:
    """Batches as training gets them, boxes included."""
    generator = torch.Generator().manual_seed(0)

    def cut(batches: int) -> None:
        for _ in range(batches):
            places = torch.randint(IMAGES, (batch,), generator=generator).numpy()
            heights, widths = torch.from_numpy(images.sizes[places]).float().T
            boxes = boxes_of(draw_crops(batch, generator, torch.device("cpu")), heights, widths, CROPS)
            crop_ragged(images, places.tolist(), boxes, (side, side), CROPS.interpolation, threads)

    return cut


def torchvisions(images: Ragged, side: int, batch: int, threads: int) -> Callable[[int], None]:
    """The transform on one image after the other, channels last in memory, which it is fastest with."""
    transform = RandomResizedCrop(side, CROPS.crop_scale, interpolation=3, antialias=True)
    whole = [images.window(i, 0, 0, *map(int, size)) for i, size in enumerate(images.sizes)]

    def one(place: int) -> Tensor:
        return transform(whole[place])

    def cut(batches: int) -> None:
        for _ in range(batches):
            places = torch.randint(IMAGES, (batch,)).tolist()
            if images.pixels.is_cuda:
                torch.stack([one(place) for place in places])
            else:
                with ThreadPoolExecutor(threads) as pool:
                    torch.stack(list(pool.map(one, places)))

    return cut


def main() -> None:
    """Print crops a second of both, and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--batches", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(options.device)
    images = photographs(device, options.side)
    both = [make(images, options.side, options.batch, options.threads) for make in (ours, torchvisions)]
    for cut in both:
        cut(1)
    taken = [[seconds(cut, options.batches, device) for cut in both] for _ in range(ROUNDS)]
    mine, theirs = (options.batch * options.batches / min(times) for times in zip(*taken, strict=True))
    print(f"{options.side} px on {device}, {options.threads} threads: ours {mine:,.0f} crops/s, ", end="")
    print(f"torchvision {theirs:,.0f} crops/s, ratio {mine / theirs:.2f}")


if __name__ == "__main__":
    main()
