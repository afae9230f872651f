"""The streamed PCA fit against scikit-learn's exact solvers, in one run: seconds, peak memory, largest difference.

    python benchmarks/pca.py [--images 20000] [--side 32]

Every fit runs in a process of its own, so that its peak memory is its own. Ours reads uint8 images in batches from a
file; scikit-learn gets the float32 array it wants.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

BATCH = 2048


def write_images(path: Path, count: int, side: int) -> None:
    """Smooth random images, written piece by piece."""
    out = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=(count, 3, side, side))
    rng = np.random.default_rng(0)
    for start in range(0, count, BATCH):
        size = min(BATCH, count - start)
        coarse = np.kron(rng.normal(size=(size, 3, side // 4, side // 4)), np.ones((1, 1, 4, 4)))
        fine = coarse + 0.3 * rng.normal(size=(size, 3, side, side))
        out[start : start + size] = (40 * fine + 128).clip(0, 255).astype(np.uint8)


def fit_ours(path: Path) -> np.ndarray:
    """One pass over the file; the spectrum."""
    import torch

    from pmae.spaces import PCA

    count, *shape = np.load(path, mmap_mode="r").shape

    def batches() -> Iterator[torch.Tensor]:
        # Read, not mapped: the pages of a mapped file would count as memory.
        with path.open("rb") as file:
            np.lib.format.read_magic(file)
            np.lib.format.read_array_header_1_0(file)
            for start in range(0, count, BATCH):
                rows = np.fromfile(file, np.uint8, min(BATCH, count - start) * int(np.prod(shape)))
                yield torch.from_numpy(rows.reshape(-1, *shape)).float().div_(64).sub_(2)

    space = PCA(tuple(shape))
    space.fit(batches())
    return space.variance.numpy()


def fit_sklearn(path: Path, solver: str) -> np.ndarray:
    """The whole array at once; the spectrum."""
    from sklearn.decomposition import PCA

    images = np.load(path, mmap_mode="r").reshape(len(np.load(path, mmap_mode="r")), -1)
    return PCA(svd_solver=solver).fit(images.astype(np.float32) / 64 - 2).explained_variance_


def child(path: Path, method: str) -> None:
    """Fit, and print seconds, peak memory and the spectrum as one line."""
    import sklearn.decomposition  # noqa: F401 (imports are not part of the time)
    import torch  # noqa: F401

    import pmae.spaces  # noqa: F401

    began = time.perf_counter()
    spectrum = fit_ours(path) if method == "ours" else fit_sklearn(path, method)
    seconds, peak = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"seconds": seconds, "peak": peak, "spectrum": spectrum.tolist()}))


def measure(path: Path, method: str) -> dict[str, object]:
    """Run one fit in a process of its own."""
    command = [sys.executable, __file__, "--child", method, "--path", str(path)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=20_000)
    parser.add_argument("--side", type=int, default=32)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--path", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.path, options.child)
        return
    with tempfile.TemporaryDirectory() as folder:
        rows = []
        for count in (options.images // 2, 2 * options.images, options.images):
            path = Path(folder) / f"{count}.npy"
            write_images(path, count, options.side)
            methods = ("ours",) if count != options.images else ("ours", "covariance_eigh", "full")
            rows += [(count, method, measure(path, method)) for method in methods]
    reference = np.array(rows[-1][2]["spectrum"])
    best = min(row["seconds"] for _, method, row in rows if method != "ours")
    print(f"{'images':>8} {'fit':<18} {'seconds':>8} {'of best peer':>13} {'peak MiB':>9} {'spectrum error':>15}")
    for count, method, row in rows:
        same = count == options.images
        error = f"{np.abs(np.array(row['spectrum']) - reference).max() / reference.max():.1e}" if same else ""
        ratio = f"{row['seconds'] / best:.2f}" if same else ""
        print(f"{count:>8} {method:<18} {row['seconds']:>8.1f} {ratio:>13} {row['peak']:>9.0f} {error:>15}")


if __name__ == "__main__":
    main()
