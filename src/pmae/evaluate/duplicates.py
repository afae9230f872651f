"""Duplicates between splits: held-out images that the training set holds byte for byte, or nearly.

Near-duplicates (the same picture brighter, blurred or compressed again) are found by the correlation of small
grey thumbnails. Broad light and shade is taken off them first: without that, all portraits of one kind (a mole in the
middle of a dermatoscopic image) look alike. On CIFAR-10, DermaMNIST and BloodMNIST the pairs above
`ALIKE` that were looked at all show one scene, and so do some below it: the count is a lower bound.
"""

import hashlib
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pmae.data.images import ImageSet
from pmae.errors import UserError
from pmae.results import DuplicatePair, Duplicates

MOST = 0.01
"""The largest share of a held-out split that train may hold byte for byte. A few such images are in published sets
(BloodMNIST has 6 of 3,421), which nobody can change; of files that were copied into both splits there are more."""
ALIKE = 0.95  # correlation of thumbnails from which two images count as nearly the same
SIDE, SMALLEST = 16, 8  # side of a thumbnail, and of the smallest image that has one
BLUR = 5  # side of the box whose mean is taken off a thumbnail
COMPARED = 2_000_000_000
"""Comparisons at most; a larger number of pairs is thinned evenly on the side of the held-out images."""
CHUNK, LISTED = 256, 20  # images that are looked at together, and duplicates that are named


def duplicates(train: ImageSet, held_out: Mapping[str, ImageSet], device: torch.device) -> dict[str, Duplicates]:
    """For each held-out split, how many of its images `train` holds too, exactly and nearly, with the first by name."""
    digests, thumbnails = _look(train, device)
    known = {digest: position for position, digest in reversed(list(enumerate(digests)))}
    return {split: _found(train, known, thumbnails, images, device) for split, images in held_out.items()}


def require_apart(found: Mapping[str, Duplicates], held_out: Mapping[str, ImageSet]) -> None:
    """Refuse held-out splits of images that train holds byte for byte: their scores would be of a memory."""
    for split, images in held_out.items():
        if found[split].count > MOST * len(images):
            pair, rule = found[split].pairs[0], f"{split} must be of images that are not trained on"
            copies = f"{found[split].count} of {len(images)} that are, such as {pair.held_out!r} and {pair.train!r}"
            raise UserError(f"{rule}, got {copies}; keep each in one split")


def _look(images: ImageSet, device: torch.device) -> tuple[list[bytes], Tensor | None]:
    digests: list[bytes] = []
    thumbnails: list[Tensor] = []
    fits = min(images.shape[1:]) >= SMALLEST and not images.vectors
    for start in range(0, len(images), CHUNK):
        part = np.ascontiguousarray(images.images[start : start + CHUNK])
        digests += [hashlib.blake2b(image.tobytes(), digest_size=16).digest() for image in part]
        if fits:
            thumbnails.append(thumbnail(torch.from_numpy(part.astype(np.float32)).to(device)))
    return digests, torch.cat(thumbnails) if thumbnails else None


def thumbnail(x: Tensor) -> Tensor:
    """Grey thumbnails (B, K) of images (B, C, H, W), without broad light and shade, of norm 1; a blank one is 0."""
    sides = min(SIDE, x.shape[2]), min(SIDE, x.shape[3])
    x = functional.adaptive_avg_pool2d(x.mean(1, keepdim=True), sides).nan_to_num(0, 0, 0)
    padded = functional.pad(x, [BLUR // 2] * 4, mode="replicate")
    x = (x - functional.avg_pool2d(padded, BLUR, stride=1)).flatten(1)
    return functional.normalize(x - x.mean(1, keepdim=True), dim=1)


def _found(
    train: ImageSet, known: dict[bytes, int], thumbnails: Tensor | None, held_out: ImageSet, device: torch.device
) -> Duplicates:
    digests, seen = _look(held_out, device)
    exact = {position: known[digest] for position, digest in enumerate(digests) if digest in known}
    pairs = _named(train, held_out, exact)
    if thumbnails is None or seen is None:
        return Duplicates(len(exact), pairs)
    every = -(-len(train) * len(held_out) // COMPARED)
    compared = range(0, len(held_out), every)
    near: dict[int, int] = {}
    for start in range(0, len(compared), CHUNK):
        positions = compared[start : start + CHUNK]
        likeness, nearest = (seen[list(positions)] @ thumbnails.T).max(1)
        rows = zip(positions, likeness.tolist(), nearest.tolist(), strict=True)
        # What is equal byte for byte has been counted.
        near |= {position: other for position, like, other in rows if like >= ALIKE and position not in exact}
    return Duplicates(len(exact), pairs, len(near), len(compared), _named(train, held_out, near))


def _named(train: ImageSet, held_out: ImageSet, pairs: Mapping[int, int]) -> tuple[DuplicatePair, ...]:
    return tuple(DuplicatePair(_name(train, a), _name(held_out, b)) for b, a in list(pairs.items())[:LISTED])


def _name(images: ImageSet, position: int) -> str:
    return images.names[position] if images.names else f"#{position}"
