"""From images to features with a run's encoder: in memory, or streamed from a reader to a file in bounded memory."""

import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pmae.config import DataConfig
from pmae.data.augment import Standardize
from pmae.data.images import ImageSet, as_tensor
from pmae.data.sets import converts, read_chunks
from pmae.errors import UserError, require, unknown_name
from pmae.evaluate.features import evaluating
from pmae.feature_files import Rows, Write, read_rows, write_rows, writer_for
from pmae.files import disk_errors, write_whole
from pmae.models import Encoder
from pmae.runs import Run
from pmae.train.checkpoint import load_encoder
from pmae.train.distributed import World, local_device, process_group
from pmae.train.environment import pick_device

POOLINGS = ("mean", "cls", "both", "patches")
BATCH, CPU_BATCH, NUMBERS = 256, 16, 2**24
"""Images in a batch, and in one that a CPU computes at once; fewer where it would have more numbers than this."""
QUIET_SECONDS = 10.0


class Embedder:
    """Unmasked images (n, C, H, W) in the data's units to float32 features: (n, D), or (n, tokens, D) for "patches".

    Always float32 arithmetic. Kernels, and so the last bits, are chosen by the size of a batch, so every batch has one
    size: what an image becomes does not depend on how many others are asked for.
    """

    def __init__(
        self,
        encoder: Encoder,
        standardize: Standardize,
        pooling: str = "mean",
        device: torch.device | None = None,
        batch_size: int | None = None,
    ) -> None:
        require(batch_size is None or batch_size >= 1, "batch_size", "at least 1", batch_size)
        self.pooling, self.device = pooling, device or torch.device("cpu")
        self.encoder, self.standardize = encoder.to(self.device), standardize.to(self.device)
        self.batch_size = batch_size or max(1, min(BATCH, NUMBERS // math.prod(encoder.shape)))
        self.at_once = min(CPU_BATCH, self.batch_size) if self.device.type == "cpu" else self.batch_size
        self.names = feature_names(encoder, pooling)

    def __call__(self, images: np.ndarray) -> np.ndarray:
        """The features of all images, in order."""
        with evaluating(self.encoder), exact_products():
            starts = range(0, len(images), self.at_once)
            parts = [self._batch(images[start : start + self.at_once]) for start in starts]
        return np.concatenate(parts)

    def _batch(self, images: np.ndarray) -> np.ndarray:
        x, count = as_tensor(images).to(self.device), len(images)
        if count < self.at_once:
            x = x[torch.arange(self.at_once, device=self.device) % count]
        features: np.ndarray = self._pooled(self.standardize(x))[:count].cpu().numpy()
        return features

    def _pooled(self, x: Tensor) -> Tensor:
        if self.pooling == "patches":
            return self.encoder(x)[1]
        found = self.encoder.features(x)
        return torch.cat([found["cls"], found["mean"]], 1) if self.pooling == "both" else found[self.pooling]


def feature_names(encoder: Encoder, pooling: str) -> list[str]:
    """`mean0`, `mean1`, ...: the name of each feature; those of "patches" are the same for every token."""
    if pooling not in POOLINGS:
        raise unknown_name("pooling", pooling, POOLINGS)
    if pooling in ("cls", "both") and not getattr(encoder.net, "num_prefix_tokens", 0):
        raise UserError(f"pooling must be mean or patches for an encoder without a [CLS] token, got {pooling!r}")
    kinds = ("cls", "mean") if pooling == "both" else (pooling,)
    return [f"{kind}{i}" for kind in kinds for i in range(encoder.width)]


@contextmanager
def exact_products() -> Iterator[None]:
    """Products and convolutions of float32 numbers as such, the same every time, even if training allowed TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def embed(
    run: Run | Path | str,
    data: DataConfig | Path | str,
    out: Path | str,
    pooling: str = "mean",
    split: str = "all",
    epoch: int | None = None,
    device: str = "auto",
    batch_size: int | None = None,
    say: Callable[[str], None] = lambda message: None,
) -> int:
    """Write the features of all images of a source to a .npz, .csv or .parquet file; returns how many there are.

    Beside the features stand `name`, `split`, `label` (a number) and `class`, each where the source has it. Processes
    that `torchrun` started divide the images, and the first one writes; the others return how many were theirs.
    """
    run, out, where = Run(run), Path(out).expanduser(), local_device(pick_device(device))
    data = data if isinstance(data, DataConfig) else DataConfig(str(data))
    write = writer_for(out, flat=pooling != "patches")
    _, encoder, standardize = load_encoder(run, epoch)
    embedder = Embedder(encoder, standardize, pooling, where, batch_size)
    trained = run.environment["data"]

    def rows(world: World) -> Iterator[Rows]:
        source = read_chunks(data, embedder.batch_size, split, world.part)
        chunks = fitting(source.chunks, trained["shape"], trained["dtype"], data)
        return (_rows(embedder, *chunk, len(source.splits) > 1) for chunk in chunks)

    return write_streamed(out, rows, embedder.names, write, where, say)


def write_streamed(
    out: Path,
    make: Callable[[World], Iterator[Rows]],
    names: list[str],
    write: Write,
    device: torch.device,
    say: Callable[[str], None],
) -> int:
    """Write the rows that each process makes of its images to one file; returns how many they are."""
    count, began = 0, time.monotonic()

    def counted(rows: Iterable[Rows]) -> Iterator[Rows]:
        nonlocal count
        told = began
        for part in rows:
            count += len(part.features)
            now = time.monotonic()
            if now - told >= QUIET_SECONDS:
                say(f"{count:,} images, {count / (now - began):,.0f} a second")
                told = now
            yield part

    with process_group(device) as world:
        rows = _in_step(make(world), world)
        # The first rows before the first file: whatever does not fit leaves nothing behind.
        first = list(islice(rows, 1))
        with disk_errors(out):
            out.parent.mkdir(parents=True, exist_ok=True)
        if world.main:
            every = counted(chain(first, rows, _of_others(out, world)))
            write_whole(out, lambda temporary: write(temporary, every, names))
        else:
            own = counted(chain(first, rows))
            write_whole(part_of(out, world.rank), lambda temporary: write_rows(temporary, own))
            world.barrier()
    return count


def _in_step(rows: Iterator[Rows], world: World) -> Iterator[Rows]:
    """Rows until no process has more: they go on together, so that the end of one is noticed by all."""
    more = True
    while any(world.all_gather(more)):
        with world.all_agree():
            part = next(rows, None) if more else None
        more = part is not None
        if part is not None:
            yield part


def _of_others(out: Path, world: World) -> Iterator[Rows]:
    """The rows of the other processes, in order, as soon as all are there."""
    world.barrier()
    for rank in range(1, world.size):
        try:
            yield from read_rows(part_of(out, rank))
        finally:
            part_of(out, rank).unlink()


def fitting(
    chunks: Iterator[tuple[str, ImageSet]], shape: Sequence[int], dtype: str, data: DataConfig
) -> Iterator[tuple[str, ImageSet]]:
    """The chunks, if their images are like those that were trained on."""
    for number, (split, part) in enumerate(chunks):
        hint = "; --resize and --channels convert image files" if converts(data) else ""
        rule = f"data must have images of the shape that the run was trained on, {_size(shape)}"
        if list(part.shape) != list(shape):
            raise UserError(f"{rule}, got {_size(part.shape)}{hint}")
        if number == 0 and str(part.images.dtype) != dtype:
            warnings.warn(
                f"the images are {part.images.dtype} and the run was trained on {dtype}: "
                "features mean something only if the values are in the same units",
                stacklevel=2,
            )
        yield split, part


def _size(shape: Sequence[int]) -> str:
    channels, height, width = shape
    return f"{channels} channel{'s' * (channels > 1)} of {height}x{width}"


def _rows(embedder: Embedder, split: str, part: ImageSet, several: bool) -> Rows:
    columns: dict[str, np.ndarray] = {}
    if part.names:
        columns["name"] = np.array(part.names)
    if several:
        columns["split"] = np.full(len(part), split)
    if part.labels is not None:
        classes = np.array([*part.classes, ""])
        columns |= {"label": part.labels, "class": classes[part.labels]}
    return Rows(embedder(np.asarray(part.images)), columns)


def part_of(out: Path, rank: int) -> Path:
    """Where a process leaves its rows for the first one."""
    return out.with_name(f".{out.name}.of-process-{rank}")
