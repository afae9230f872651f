"""Decoding JPEG files: ours, Pillow, torchvision, simplejpeg where installed, and nvJPEG on a GPU, in one run.

    python -m benchmarks.decoding [--folder photographs/] [--threads 2] [--images 256] [--short 501]

Without a folder, photographs of scikit-image and scikit-learn are cut to 224x224, 500x375 and 1600x1200 and saved with
quality 90. Ours keeps no more pixels than crops can use (`--short`), the others decode in full. Images a second of all
threads, each of which has all files to decode, and of one core: per second of CPU time, which other work on the machine
does not change. Best of three.
"""

import argparse
import io
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torchvision.io import ImageReadMode, decode_jpeg

from pmae.config import DataConfig
from pmae.data import jpeg
from pmae.data.decode import decode
from pmae.data.files import walk_images
from pmae.data.named import photo_paths

SIZES, ROUNDS, TOGETHER = [(224, 224), (500, 375), (1600, 1200)], 3, 128


def photographs(width: int, height: int, count: int) -> list[bytes]:
    """Pieces of the embedded photographs, enlarged where they are too small."""
    draw, files = np.random.default_rng(0), []
    pictures = [Image.open(path).convert("RGB") for path in photo_paths()]
    for number in range(count):
        picture = pictures[number % len(pictures)]
        scale = max(width / picture.width, height / picture.height, 1) * draw.uniform(1, 1.3)
        picture = picture.resize((round(scale * picture.width), round(scale * picture.height)))
        left, top = draw.integers(picture.width - width + 1), draw.integers(picture.height - height + 1)
        file = io.BytesIO()
        picture.crop((left, top, left + width, top + height)).save(file, "JPEG", quality=90)
        files.append(file.getvalue())
    return files


def decoders(short: int) -> dict[str, Callable[[bytes], object]]:
    """From the content of a file to its pixels."""
    config, name = DataConfig(resize=224, channels=3), Path("image.jpg")

    def ours(content: bytes) -> object:
        pixels = jpeg.decode_plain(content, config, short)
        return decode(name, config, content, short) if pixels is None else pixels

    found: dict[str, Callable[[bytes], object]] = {
        "Pillow": lambda content: np.asarray(Image.open(io.BytesIO(content)).convert("RGB")),
        "ours": ours,
        "torchvision": lambda content: decode_jpeg(
            torch.frombuffer(bytearray(content), dtype=torch.uint8), ImageReadMode.RGB
        ),
    }
    if find_spec("simplejpeg"):
        import simplejpeg

        found["simplejpeg"] = simplejpeg.decode_jpeg
    return found


def speeds(read: Callable[[bytes], object], files: list[bytes], threads: int) -> tuple[float, float]:
    """Images a second of all threads, and of a core."""
    best, least = float("inf"), float("inf")
    contents = files * threads  # one round of 16 threads through 256 small files would end after 30 ms
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(ROUNDS):
            began, worked = time.perf_counter(), time.process_time()
            list(pool.map(read, contents))
            best, least = min(best, time.perf_counter() - began), min(least, time.process_time() - worked)
    return len(contents) / best, len(contents) / least


def on_gpu(files: list[bytes]) -> float:
    """Images a second by nvJPEG."""
    device, best = torch.device("cuda"), float("inf")
    for _ in range(ROUNDS + 1):  # the first one warms up
        began = time.perf_counter()
        for start in range(0, len(files), TOGETHER):
            jpeg._decoded(files[start : start + TOGETHER], device)
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return len(files) / best


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--short", type=int, default=501)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sets = {f"{width}x{height}": photographs(width, height, options.images) for width, height in SIZES}
    if options.folder:
        found = [path for path in walk_images(options.folder) if path.suffix.lower() in (".jpg", ".jpeg")]
        sets = {options.folder.name: [path.read_bytes() for path in found[: options.images]]}
    print(f"{'files':>12} {'decoder':>12} {'images/s':>9} {'a core':>7} {'ratio':>6}")
    for name, files in sets.items():
        rows = {kind: speeds(read, files, options.threads) for kind, read in decoders(options.short).items()}
        if torch.cuda.is_available() and jpeg.has_nvjpeg(torch.device("cuda")):
            rows["nvJPEG"] = on_gpu(files), float("nan")
        for kind, (whole, core) in rows.items():
            print(f"{name:>12} {kind:>12} {whole:>9,.0f} {core:>7,.0f} {whole / rows['Pillow'][0]:>6.2f}")


if __name__ == "__main__":
    main()
