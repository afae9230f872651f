"""What the explorer works with: the images of a data set, spaces fitted on some of them, and a trained run if any."""

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.nn import functional as F

from pmae import masking
from pmae.config import KERNEL_SPACES, DataConfig, SpaceConfig
from pmae.data.batches import Batches, Standardized, fit_standardize
from pmae.data.decode import FORMATS, decode
from pmae.data.images import Splits, as_tensor
from pmae.derive import patch_for
from pmae.errors import UserError, require
from pmae.evaluate.features import extract
from pmae.evaluate.probes import nearest
from pmae.report.pictures import view_of
from pmae.runs import Run
from pmae.spaces import Pixels, Space, build_space
from pmae.train.trained import load_trained

CPU = torch.device("cpu")
LABELS = {
    "pca": "principal components (PMAE)",
    "pixels": "patches of pixels (MAE)",
    "patch_pca": "principal components of patches",
    "cosine": "cosine transform",
    "fourier": "Fourier transform",
    "wavelet": "wavelets",
    "kernel_pca": "kernel principal components (KMAE)",
    "diffusion": "diffusion maps",
}
"""The spaces that are fitted while one waits; the others need a run that has theirs."""
PICKED = 36  # images to pick from
FITTED, NUMBERS = 2048, 2**26  # a space is fitted on at most so many images, or numbers in them
BANK = 4096  # neighbours are looked for among at most so many training images
EXACT, LEADING, LANDMARKS = 4096, 64, 256
"""All principal components up to so many pixels, else a few leading ones; and a kernel that is quick to fit."""
LARGEST_FILE, LARGEST_PICTURE = 20 * 2**20, 50_000_000
"""Bytes and pixels of an upload: a larger picture is refused by its header, before it is unpacked."""


class Material:
    """Images (C, H, W) in the data's own units go in; standardized batches of one, and positions, come out."""

    def __init__(self, splits: Splits, run: Run | None = None) -> None:
        self.name, self.train = splits.name, splits.train
        self.shape, self.dtype = self.train.shape, self.train.images.dtype
        trained = None if run is None else load_trained(run)
        if trained:
            known, rule = trained.environment["data"]["dtype"], "that the run was trained on"
            require(self.shape == trained.shape, "data", f"images of the shape {rule}, {trained.shape}", self.shape)
            require(self.dtype.name == known, "data", f"images of the dtype {rule}, {known}", self.dtype.name)
        self.model = trained.model if trained else None
        self.own_space = trained.config.space.name if trained else "pca"
        self.masked_share = masking.nominal_ratio(trained.config.masking) if trained else 0.2
        most = max(2, min(FITTED, NUMBERS // self.train.images[0].size))
        self.sample = Batches(self.train.images[spread(len(self.train), most)], CPU)
        self.standardize = trained.standardize if trained else fit_standardize(self.sample, "channel")
        shown = splits.test or splits.train
        self.picked = shown.take(spread(len(shown), PICKED)).loaded()
        self.view = view_of(np.asarray(self.picked.images, np.float64), self.dtype.name)
        self._spaces = {self.own_space: self._grouped(trained.model.space)} if trained else {}
        self._bank: Tensor | None = None
        self._lock = threading.Lock()

    def offered(self) -> dict[str, str]:
        """The spaces that these images can have, by name, with words for them; the run's own comes first."""
        names = [self.own_space, *(name for name in LABELS if name != self.own_space)]
        return {name: LABELS.get(name, name) for name in names if name in self._spaces or self._can_have(name)}

    def space(self, name: str) -> Space:
        """A fitted space; the first call for a name takes as long as its fit."""
        with self._lock:
            if name not in self._spaces:
                made = self._built(name)
                made.fit(Standardized(self.sample, self.standardize))
                self._spaces[name] = made
            return self._spaces[name]

    def standardized(self, image: np.ndarray) -> Tensor:
        """(1, C, H, W) of one image in the data's units."""
        return self.standardize(as_tensor(image[None]))

    @torch.no_grad()
    def neighbours(self, image: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Positions in the training images and cosine similarities, nearest first; the image itself is left out."""
        if self.model is None:
            raise UserError("run must be given to find neighbours, because it is its encoder that compares images")
        places = spread(len(self.train), BANK)
        with self._lock:
            if self._bank is None:
                batches = Batches(self.train.images[places], CPU)
                self._bank = extract(self.model.encoder, batches, self.standardize)["mean"]
        query = self.model.encoder.features(self.standardized(image))["mean"]
        found = nearest(self._bank, query, min(count + 1, len(self._bank)))[0]
        other = [i for i in found.tolist() if not np.array_equal(self.train.images[places[i]], image)][:count]
        return places[other], torch.cosine_similarity(self._bank[other], query).numpy()

    def _built(self, name: str) -> Space:
        config = SpaceConfig(name)
        if name == "pca" and self.train.images[0].size > EXACT:
            config = replace(config, components=LEADING)
        if name in KERNEL_SPACES:
            config = replace(config, landmarks=min(LANDMARKS, len(self.sample)))
        return self._grouped(build_space(config, self.shape))

    def _grouped(self, space: Space) -> Space:
        """In pixel space whole patches are hidden as one: those of the run, or those that would be derived."""
        if isinstance(space, Pixels):
            groups = patch_of_pixel(self.shape, self.model.patch if self.model else patch_for(*self.shape[1:]))
            space.set_mask_groups(groups, int(groups.max()) + 1)
        return space

    def _can_have(self, name: str) -> bool:
        try:
            return self._built(name).mask_group_count > 1
        except UserError:  # sides that cannot be halved or cut into patches, or a basis beyond the memory
            return False


def spread(total: int, most: int) -> np.ndarray:
    """At most so many positions, evenly from the first to the last."""
    return np.linspace(0, total - 1, min(total, most)).round().astype(np.int64)


def patch_of_pixel(shape: tuple[int, int, int], patch: int) -> Tensor:
    """(C H W) which patch each pixel of each channel is in, row by row."""
    channels, height, width = shape
    row, column = torch.arange(height) // patch, torch.arange(width) // patch
    return (row[:, None] * (width // patch) + column).expand(channels, -1, -1).reshape(-1)


def read_upload(path: Path, shape: tuple[int, int, int], dtype: np.dtype, low: float, high: float) -> np.ndarray:
    """(C, H, W) of a file of any size and depth, resized, in the data's dtype; black and white become low and high."""
    channels, size = shape[0], path.stat().st_size
    if channels not in (1, 3):
        raise UserError(f"upload must have the data's {channels} channels, which no picture file has: pick one of them")
    require(size <= LARGEST_FILE, "upload", f"a file of at most {LARGEST_FILE:,} bytes", f"{size:,} bytes")
    pixels = decoded(path, DataConfig(channels=1 if channels == 1 else 3))
    resized = F.interpolate(as_tensor(pixels)[None].float(), shape[1:], mode="bicubic", antialias=True)[0].numpy()
    # Deep files keep their units where the data has the same; bytes have none, and the data's may end at 16.
    if pixels.dtype != dtype or dtype == np.uint8:
        whole = pixels.dtype.kind != "f"
        black, white = (0, np.iinfo(pixels.dtype).max) if whole else (float(pixels.min()), float(pixels.max()))
        resized = low + (high - low) * (resized - black) / ((white - black) or 1)
    if dtype.kind != "f":
        limits = np.iinfo(dtype)
        resized = np.clip(np.rint(resized), limits.min, limits.max)
    return resized.astype(dtype)


def decoded(path: Path, config: DataConfig) -> np.ndarray:
    """The pixels of an uploaded file, or a sentence that says why there are none."""
    try:
        with Image.open(path, formats=FORMATS) as image:
            if image.width * image.height > LARGEST_PICTURE:
                raise Image.DecompressionBombError
        return decode(path, config)
    except UnidentifiedImageError as error:
        raise UserError(f"upload must be an image ({', '.join(FORMATS)}), got {path.name!r}") from error
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        rule = f"upload must be a picture of at most {LARGEST_PICTURE:,} pixels"
        raise UserError(f"{rule}, got {path.name!r}") from error
    # Pillow's decoders raise whatever a broken file trips over.
    except Exception as error:
        told = " ".join(str(error).replace(str(path), path.name).split())
        raise UserError(f"upload must be an image that can be read, got {path.name!r}: {told}") from error
