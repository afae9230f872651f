"""From images to features with the encoder of a run or weights: in memory, or streamed to a file in bounded memory."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain, islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pmae.config import DataConfig
from pmae.data.augment import Standardize
from pmae.data.batches import read_ahead, to_device
from pmae.data.images import ImageSet, as_tensor, require_finite, require_like
from pmae.data.ondemand import OnDemand
from pmae.data.sets import converts, read_chunks
from pmae.errors import UserError, require, require_known
from pmae.evaluate.features import LastBlocks, evaluating
from pmae.feature_files import Rows, Write, writer_for
from pmae.files import disk_errors, write_whole
from pmae.models import Encoder
from pmae.results import LAST
from pmae.runs import Run
from pmae.train.checkpoint import load_encoder, run_or_weights
from pmae.train.distributed import World, local_device, lost_process_errors, process_group
from pmae.train.environment import kept_precision, pick_device
from pmae.train.given import load_given
from pmae.train.start import reading_for, trained_on

BLOCKS = 4
LAST_BLOCKS = f"{LAST}{BLOCKS}"
POOLINGS = ("mean", "cls", "both", "patches", LAST_BLOCKS)
BATCH, CPU_BATCH, NUMBERS = 256, 16, 2**24
"""Images in a batch, and in one that a CPU computes at once; fewer where it would have more numbers than this."""
QUIET_SECONDS = 10.0
Chunk = tuple[str, ImageSet]  # the name of a split, and some of its images


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
        self.batch_size -= self.batch_size % self.at_once  # nothing is left over to be padded where chunks meet
        self.names = feature_names(encoder, pooling)
        self.last = LastBlocks(self.encoder, BLOCKS) if pooling == LAST_BLOCKS else None

    def __call__(self, images: np.ndarray | OnDemand, seen: Callable[[int], None] = lambda count: None) -> np.ndarray:
        """The features of all images, in order; of those on the disk a batch is read at a time, and `seen` is told."""
        parts = (images[start : start + self.batch_size] for start in range(0, len(images), self.batch_size))
        if self.device.type == "cuda":
            made = (features() for features in read_ahead(self._begin, parts, 1))
        else:
            made = (found.cpu().numpy() for part in parts for found in self._parts(part))
        found = []
        for features in made:
            found.append(features)
            seen(len(features))
        return np.concatenate(found)

    def ahead(self, chunks: Iterable[Chunk]) -> Iterator[tuple[Chunk, np.ndarray]]:
        """Chunks of images with their features: the next ones are computed while these are written."""
        begun = read_ahead(lambda chunk: (chunk, self._begin(np.asarray(chunk[1].images))), chunks, 1)
        return ((chunk, features()) for chunk, features in begun)

    def _begin(self, images: np.ndarray) -> Callable[[], np.ndarray]:
        """Have a GPU compute features and send them; what is returned waits for them."""
        if not len(images):  # a chunk of which nothing could be read keeps its turn among those of other processes
            return lambda: np.empty(0)
        cuda = self.device.type == "cuda"
        # A thread begins on the first GPU, whose stream says nothing of another's.
        with torch.cuda.device(self.device) if cuda else nullcontext():
            parts = [part.to("cpu", non_blocking=True) for part in self._parts(images)]
            sent = torch.cuda.current_stream().record_event() if cuda else None

        def wait() -> np.ndarray:
            if sent:
                sent.synchronize()
            return np.concatenate([part.numpy() for part in parts])

        return wait

    def _parts(self, images: np.ndarray) -> Iterator[Tensor]:
        """Features on the device, of batches of one size each."""
        require_finite("data", images)
        with evaluating(self.encoder), exact_products():
            for start in range(0, len(images), self.at_once):
                x = to_device(as_tensor(images[start : start + self.at_once]), self.device)
                count = len(x)
                if count < self.at_once:
                    x = x[torch.arange(self.at_once, device=self.device) % count]
                yield self._pooled(self.standardize(x))[:count]

    def _pooled(self, x: Tensor) -> Tensor:
        if self.pooling == "patches":
            return self.encoder(x)[1]
        if self.last:
            return self.last.features(x)[self.pooling]
        found = self.encoder.features(x)
        return torch.cat([found["cls"], found["mean"]], 1) if self.pooling == "both" else found[self.pooling]


def feature_names(encoder: Encoder, pooling: str) -> list[str]:
    """`mean0`, `mean1`, ...: the name of each feature; those of "patches" are the same for every token."""
    require_pooling(pooling, encoder)
    several = {"both": ["cls", "mean"], LAST_BLOCKS: [f"block{n}_" for n in range(-BLOCKS, 0)]}
    kinds = several.get(pooling, [pooling])
    return [f"{kind}{i}" for kind in kinds for i in range(encoder.width)]


def require_pooling(pooling: str, encoder: Encoder) -> None:
    """Refuse a pooling that is unknown, or of a [CLS] token that an encoder does not have."""
    require_known("pooling", [pooling], POOLINGS)
    if pooling in ("cls", "both") and not getattr(encoder.net, "num_prefix_tokens", 0):
        raise UserError(f"pooling must be mean or patches for an encoder without a [CLS] token, got {pooling!r}")
    if pooling == LAST_BLOCKS and encoder.depth < BLOCKS:
        raise UserError(f"pooling must be another one for what is no ViT of {BLOCKS} blocks or more, got {pooling!r}")


@contextmanager
def exact_products() -> Iterator[None]:
    """Matrix multiplications and convolutions in full float32, the same every time, even if training allowed TF32."""
    with kept_precision(), torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        torch.set_float32_matmul_precision("highest")
        yield


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
    encoder: str | None = None,
) -> int:
    """Write the features of all images of a source to a .npz, .csv or .parquet file; returns how many there are.

    `run` may also be weights that timm or Hugging Face wrote; `encoder` names their timm network where they do not.

    Beside the features stand `name`, `split`, `label` (a number) and `class`, each where the source has it. Processes
    that `torchrun` started take the batches in turn, and the first one writes.
    """
    run, out, where = run_or_weights(run), Path(out).expanduser(), local_device(pick_device(device))
    write = writer_for(out, flat=pooling != "patches")
    reading = data if isinstance(data, DataConfig) else reading_for(run, str(data), encoder)
    own = trained_on(run, encoder)
    if isinstance(run, Run):
        _, net, standardize = load_encoder(run, epoch)
    else:
        require(epoch is None, "epoch", "left out for weights, which have one state", epoch)
        own = own._replace(shape=_shape_for(own.shape, reading))
        net, _, standardize, _ = load_given(run, encoder, own.shape)
    embedder = Embedder(net, standardize, pooling, where, batch_size)

    def rows(world: World) -> Iterator[Rows]:
        source = read_chunks(reading, embedder.batch_size, split, world.part)
        for chunk, features in embedder.ahead(fitting(source.chunks, own.shape, own.dtype)):
            yield Rows(features, _columns(*chunk, len(source.splits) > 1))
        if source.unreadable is not None:
            source.unreadable.warn()

    return write_streamed(out, rows, embedder.names, write, where, say)


def _shape_for(own: tuple[int, int, int], reading: DataConfig) -> tuple[int, int, int]:
    """The shape in which images come to given weights: files as they are resized, arrays as they are."""
    if converts(reading) and reading.resize:
        return (reading.channels or own[0], reading.resize, reading.resize)
    found = next(read_chunks(reading, 1).chunks)[1].shape
    require(found[0] == own[0], "data", f"of images with {own[0]} channels, as the weights", found[0])
    return found


def write_streamed(
    out: Path,
    make: Callable[[World], Iterator[Rows]],
    names: list[str],
    write: Write,
    device: torch.device,
    say: Callable[[str], None],
    look: Callable[[Rows], None] = lambda rows: None,
) -> int:
    """Write the rows that each process makes of its images to one file, where they are looked at; returns how many."""
    count, began = 0, time.monotonic()

    def counted(rows: Iterable[Rows]) -> Iterator[Rows]:
        nonlocal count
        told = began
        for part in rows:
            count += len(part.features)
            look(part)
            now = time.monotonic()
            if now - told >= QUIET_SECONDS:
                say(f"{count:,} images, {count / (now - began):,.0f} a second")
                told = now
            yield part

    with process_group(device) as world:
        rows = counted(_of_all_processes(make(world), world))
        # The first rows before the first file: whatever does not fit leaves nothing behind.
        first = list(islice(rows, 1))
        if world.main:
            with disk_errors(out):
                out.parent.mkdir(parents=True, exist_ok=True)
            write_whole(out, lambda temporary: write(temporary, chain(first, rows), names))
        else:
            list(rows)
    return count


def _of_all_processes(rows: Iterator[Rows], world: World) -> Iterator[Rows]:
    """The rows of all processes in order, at the first one; they go on together until none has more."""
    more = True
    while any(world.all_gather(more)):
        with world.all_agree():
            mine = next(rows, None) if more else None
        more = mine is not None
        every: list[Rows | None] | None = [mine] * world.size if world.main else None
        if world.size > 1:
            with lost_process_errors(world):
                torch.distributed.gather_object(mine, every)
        yield from (part for part in every or () if part is not None and len(part.features))


def fitting(chunks: Iterable[Chunk], shape: Sequence[int], dtype: str) -> Iterator[Chunk]:
    """The chunks, if their images are like those that were trained on."""
    for split, part in chunks:
        require_like("data", part, shape, dtype)
        yield split, part


def _columns(split: str, part: ImageSet, several: bool) -> dict[str, np.ndarray]:
    columns: dict[str, np.ndarray] = {}
    if part.names:
        columns["name"] = np.array(part.names)
    if several:
        columns["split"] = np.full(len(part), split)
    if part.labels is not None:
        columns |= {"label": part.labels, "class": np.array([*part.classes, ""])[part.labels]}
    return columns
