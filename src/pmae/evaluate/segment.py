"""A linear segmentation probe: logistic regression from patch tokens to the classes of a folder of masks, with mIoU.

The head is fitted to the share of each class in a patch; its logits are upsampled bilinearly to the pixels (as for
DINOv2, Oquab et al. 2023), and the intersection over union of each class is taken over the pixels of all test images.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn import functional as F

from pmae.config import DataConfig
from pmae.data.augment import Standardize
from pmae.data.decode import ORIENTATION, Header, read_header
from pmae.data.images import ImageSet, Splits, as_tensor
from pmae.data.resize import as_square
from pmae.errors import UserError, require
from pmae.evaluate.features import ORDER, hold_out, mixed
from pmae.evaluate.metrics import confusion
from pmae.evaluate.probes import logistic_regression, statistics
from pmae.intervals import Interval
from pmae.models import Encoder
from pmae.models.maps import token_maps
from pmae.results import SegmentationScore

VOID = 255
"""The number of pixels that belong to no class, in masks of Pascal VOC and Cityscapes and in most others."""
HELD_OUT, TOKENS, CHUNK, RESAMPLES = 0.2, 200_000, 64, 1000
"""Share of the images that are scored where there is no test part; tokens to fit on, at most; images at once."""
Tokens = Callable[[Tensor], Tensor]
"""Standardized images (B, C, H, W) to maps of features (B, width, rows, columns)."""


class Masked(NamedTuple):
    """Images and the class of each of their pixels (N, H, W) by its position in `values`; -1 is no class."""

    images: ImageSet
    targets: np.ndarray


class MaskedData(NamedTuple):
    """Images with masks to fit on and to score, and the numbers that stand for the classes in the masks."""

    train: Masked
    test: Masked
    values: tuple[int, ...]
    notes: tuple[str, ...] = ()


def read_masked(splits: Splits, folder: Path | str, seed: int = 0, read: DataConfig | None = None) -> MaskedData:
    """The images that have a mask: a PNG of class numbers below `folder`, named like the image and `read` like it."""
    place = Path(folder).expanduser()
    require(place.is_dir(), "masks", "a folder of PNG files", str(folder))
    files = {path.relative_to(place).with_suffix("").as_posix(): path for path in sorted(place.rglob("*.png"))}
    require(bool(files), "masks", "a folder of PNG files", str(folder))
    found, taken, without = dict[str, tuple[ImageSet, list[Path]]](), set[str](), 0
    for split, part in splits.parts.items():
        keys = [Path(name).with_suffix("").as_posix() for name in part.names]
        index = [i for i, key in enumerate(keys) if key in files]
        without += len(part) - len(index)
        if index:
            found[split] = part.take(np.array(index)), [files[keys[i]] for i in index]
            taken |= {keys[i] for i in index}
    if other := sorted(files.keys() - taken):
        first = files[other[0]].relative_to(place)
        raise UserError(f"masks must be named like the images of data, got {len(other)} that are not, such as {first}")
    parts = _two_parts(found, seed)
    headers = [[_header(name, read) for name in part.names] for part, _ in parts]
    masked = []
    for (part, paths), own in zip(parts, headers, strict=True):
        masks = [read_mask(path, part.shape[1:], read, header) for path, header in zip(paths, own, strict=True)]
        masked.append((part, np.stack(masks)))
    known = [own for some in headers for own in some if own]
    turned = sum(own.orientation > 1 and (own.orientation < 5 or own.size[0] == own.size[1]) for own in known)
    notes = [f"{without:,} images without a mask are left out"] if without else []
    if turned:
        notes.append(f"{turned:,} images are turned by their EXIF data; their masks are taken to be upright already")
    return _numbered(masked, tuple(notes))


def _header(name: str, read: DataConfig | None) -> Header | None:
    """What the file of an image says of its size, where it lies below the source that was read."""
    source = Path(read.source if read else "").expanduser()
    path = (source.parent if source.is_file() else source) / name
    with suppress(Exception):  # not every file that is read has a header for Pillow
        return read_header(path)
    return None


def _two_parts(found: dict[str, tuple[ImageSet, list[Path]]], seed: int) -> list[tuple[ImageSet, list[Path]]]:
    """Images and their masks to fit on and to score: of train, and of test, val or a fifth of train."""
    require("train" in found, "masks", "of training images", sorted(found))
    held = found.get("test") or found.get("val")
    images, paths = found["train"]
    if held is None:
        require(len(images) >= 2, "masks", "two or more", len(images))
        sides = _held_out(images, seed)
        return [(images.take(side), [paths[i] for i in side]) for side in sides]
    return [(images, paths), held]


def _held_out(images: ImageSet, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Sorted positions to fit on and to score: of whole groups, where there are any."""
    if images.groups is not None:
        return hold_out(np.zeros(len(images)), HELD_OUT, seed, images.groups)
    order = np.random.default_rng(mixed(seed, ORDER)).permutation(len(images))
    count = max(1, round(HELD_OUT * len(images)))
    return np.sort(order[count:]), np.sort(order[:count])


def read_mask(
    path: Path, size: tuple[int, int], read: DataConfig | None = None, image: Header | None = None
) -> np.ndarray:
    """Class numbers (H, W), turned and resized like the image, each pixel to its nearest."""
    try:
        with Image.open(path) as mask:
            if mask.mode not in ("1", "L", "P", "I;16", "I"):
                raise UserError(f"mask {path} must have one channel, of class numbers, got mode {mask.mode}")
            upright = ImageOps.exif_transpose(mask)
            upright = upright if image is None else _as_shown(upright, image, path)
            # A bit is a class number too: 0 or 1, not 0 or 255.
            plain = upright.convert("L").point(lambda value: value // VOID) if upright.mode == "1" else upright
            square = as_square(plain, read or DataConfig(), Image.Resampling.NEAREST)
            return np.asarray(square.resize(size[::-1], Image.Resampling.NEAREST)).astype(np.int32)
    except OSError as error:
        raise UserError(f"mask {path} must be a PNG file, but {error}") from error


def _as_shown(mask: Image.Image, image: Header, path: Path) -> Image.Image:
    """A mask as its image is shown: where its sides are those of the stored pixels, it is turned as they are."""
    if _alike(mask.size, image.size):
        return mask
    turned = image.orientation >= 5 and _alike(mask.size, image.size[::-1])
    require(turned, f"mask {path}", f"of the proportions of its image, {image.size} pixels", mask.size)
    mask.getexif()[ORIENTATION] = image.orientation
    return ImageOps.exif_transpose(mask)


def _alike(size: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether one is the other made smaller or larger, its sides rounded."""
    return abs(size[0] * other[1] - size[1] * other[0]) <= sum(other)


def _numbered(parts: Sequence[tuple[ImageSet, np.ndarray]], notes: tuple[str, ...]) -> MaskedData:
    """Numbers of the classes of train as positions; a class that only test has cannot be learned."""
    seen: list[int] = np.unique(parts[0][1]).tolist()
    # Masks of 0 and 255 alone are black and white, and 255 is what is looked for.
    void = VOID if len(seen) > 2 else None
    values = tuple(value for value in seen if value != void)
    require(len(values) >= 2, "masks", "of two classes or more in the training images", seen)
    other = set(np.unique(parts[1][1]).tolist()) - {*values, void}
    require(not other, "masks of test images", f"of the classes of train ({list(values)[:20]})", sorted(other)[:5])
    require(bool(np.isin(parts[1][1], values).any()), "masks of test images", "of pixels of a class", "none")

    def position(mask: np.ndarray) -> np.ndarray:
        return np.where(np.isin(mask, values), np.searchsorted(values, mask), -1)

    train, test = (Masked(images, position(masks)) for images, masks in parts)
    return MaskedData(train, test, values, notes)


@torch.no_grad()
def segmentation_probe(tokens: Tokens, standardize: Standardize, data: MaskedData) -> SegmentationScore:
    """Fit the head on the training images and score it on the test images."""
    classes = len(data.values)
    x, shares = _training_tokens(tokens, standardize, data.train, classes)
    mean, std = statistics(x)
    weights = logistic_regression((x - mean) / std, shares, classes)
    counts = []
    for images, targets in _chunks(data.test, standardize):
        features = (tokens(images).float().movedim(1, -1) - mean) / std
        logits = (features @ weights[:-1] + weights[-1]).movedim(-1, 1)
        answer = F.interpolate(logits, targets.shape[1:], mode="bilinear").argmax(1).cpu().numpy()
        known = targets >= 0
        parts = zip(answer, targets, known, strict=True)
        counts += [confusion(own[where], target[where], classes) for own, target, where in parts]
    return scored(np.stack(counts), [str(value) for value in data.values], data.test.images.groups)


def _chunks(data: Masked, standardize: Standardize) -> Any:
    device = standardize.mean.device
    for start in range(0, len(data.images), CHUNK):
        images = np.asarray(data.images.images[start : start + CHUNK])
        yield standardize(as_tensor(images).to(device)), data.targets[start : start + CHUNK]


def _training_tokens(tokens: Tokens, standardize: Standardize, data: Masked, classes: int) -> tuple[Tensor, Tensor]:
    """Some tokens (T, width) of every image and the shares (T, C) of the classes in their patches."""
    most = max(1, TOKENS // len(data.images))
    draw, kept = torch.Generator().manual_seed(0), list[tuple[Tensor, Tensor]]()
    for images, targets in _chunks(data, standardize):
        maps = tokens(images).float()
        onehot = F.one_hot(torch.from_numpy(targets).long() + 1, classes + 1)[..., 1:].movedim(-1, 1).float()
        shares = F.adaptive_avg_pool2d(onehot.to(maps.device), (maps.shape[2], maps.shape[3]))
        for own, share in zip(maps.flatten(2).mT, shares.flatten(2).mT, strict=True):
            places = torch.randperm(len(own), generator=draw)[:most].to(maps.device)
            known = share[places].sum(1) > 0
            kept.append((own[places][known], share[places][known]))
    x, found = (torch.cat(parts) for parts in zip(*kept, strict=True))
    return x, found / found.sum(1, keepdim=True)


def scored(counts: np.ndarray, names: Sequence[str], groups: np.ndarray | None = None) -> SegmentationScore:
    """Scores of confusion matrices (N, C, C), one an image; the interval is of resampled images, or whole `groups`."""
    units = counts if groups is None else np.stack([counts[groups == own].sum(0) for own in np.unique(groups)])
    draws = np.random.default_rng(0).integers(len(units), size=(RESAMPLES, len(units)))
    resampled = [np.nanmean(_iou(units[own].sum(0))) for own in draws]
    # Resamples of a single image, or of a single patient, have no spread.
    low, high = np.nanpercentile(resampled, (2.5, 97.5)).tolist() if len(units) > 1 else (None, None)
    total = counts.sum(0)
    each = {name: None if np.isnan(value) else float(value) for name, value in zip(names, _iou(total), strict=True)}
    right = float(np.trace(total) / max(total.sum(), 1))
    miou = Interval(float(np.nanmean(_iou(total))), low, high)
    return SegmentationScore(miou, right, each, len(counts))


def _iou(table: np.ndarray) -> np.ndarray:
    """(C,) true positives of all that are or were called of a class; NaN where there is neither."""
    hits = np.diag(table).astype(np.float64)
    union = table.sum(0) + table.sum(1) - hits
    return np.divide(hits, union, out=np.full(len(hits), np.nan), where=union > 0)


def tokens_of(encoder: Encoder) -> Tokens:
    """The patch tokens of an encoder, in bfloat16 on CUDA as wherever features are taken."""

    def tokens(x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.device.type == "cuda"):
            return token_maps(encoder, x)

    return tokens


def pixels_like(encoder: Encoder) -> Tokens:
    """The standardized pixels of each patch as its features, on the encoder's grid: what needs no encoder."""

    def tokens(x: Tensor) -> Tensor:
        rows, columns = grid = tuple(token_maps(encoder, x[:1]).shape[2:])
        size = (max(1, x.shape[2] // rows), max(1, x.shape[3] // columns))
        whole = (rows * size[0], columns * size[1])
        fitted = x if tuple(x.shape[2:]) == whole else F.interpolate(x, whole, mode="bilinear", antialias=True)
        return F.unfold(fitted, size, stride=size).unflatten(2, grid)

    return tokens
