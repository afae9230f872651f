"""Arrays of any channel count and range turned into colours a screen can show, and laid out in one sheet."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Array = np.ndarray


@dataclass(frozen=True)
class View:
    """How images (N, C, H, W) become colours: subtract, divide, mix channels, and stretch from low..high to 0..1."""

    mean: Array
    std: Array
    mix: Array
    """(C, 1) for grey or (C, 3) for colour."""
    low: Array
    high: Array
    note: str
    """What a caption must say about it; empty if nothing."""

    def pictures(self, images: Array) -> Array:
        """(N, H, W, 3) colours of images in the units of the data."""
        shown = self._mixed((np.moveaxis(images, 1, -1) - self.mean) / self.std)
        return _colours((shown - self.low) / np.maximum(self.high - self.low, 1e-12))

    def differences(self, images: Array, scale: float) -> Array:
        """(N, H, W, 3) colours of standardized differences: mid-grey is 0, black and white are -scale and +scale."""
        return _colours(0.5 + self._mixed(np.moveaxis(images, 1, -1)) / (2 * scale))

    def scale(self, images: Array) -> float:
        """A scale that leaves all but the largest half percent of these differences inside black and white."""
        return max(float(np.percentile(np.abs(self._mixed(np.moveaxis(images, 1, -1))), 99.5)), 1e-6)

    def _mixed(self, images: Array) -> Array:
        return images @ self.mix


def view_of(originals: Array, dtype: str) -> View:
    """Grey for one channel, colour for three; of two the first, and of more the three principal directions."""
    channels = originals.shape[1]
    zero, one = np.zeros(channels), np.ones(channels)
    if channels > 3:
        return _principal_view(originals)
    mix = np.eye(3) if channels == 3 else np.eye(channels)[:, :1]
    low, high, note = _range(originals, dtype)
    notes = [f"Of {channels} channels the first is shown."] if channels == 2 else []
    return View(zero, one, mix, low, high, " ".join([*notes, *([note] if note else [])]))


def _principal_view(originals: Array) -> View:
    """Every channel at deviation 1, then the three directions along which the channels vary most."""
    channels = originals.shape[1]
    pixels = np.moveaxis(originals, 1, -1).reshape(-1, channels)
    mean, std = pixels.mean(0), np.maximum(pixels.std(0), 1e-12)
    pixels = (pixels - mean) / std
    _, vectors = np.linalg.eigh(pixels.T @ pixels)
    mix = vectors[:, ::-1][:, :3]
    # The sign of a direction is arbitrary: let brighter mean more.
    mix = mix * np.where(mix.sum(0) < 0, -1.0, 1.0)
    low, high = np.percentile(pixels @ mix, (0.5, 99.5), axis=0)
    note = f"The {channels} channels are shown as their three principal directions, as red, green and blue."
    return View(mean, std, mix, low, high, note)


def _range(originals: Array, dtype: str) -> tuple[Array, Array, str]:
    """Black and white of pictures: the range of the dtype where it is customary, else that of the images."""
    if dtype == "uint8":
        return np.array(0.0), np.array(255.0), ""
    low, high = np.percentile(originals, (0.5, 99.5))
    if dtype.startswith("float") and originals.min() >= 0 and 0.5 < originals.max() <= 1:
        low, high = 0.0, 1.0
    return np.array(low), np.array(high), f"Black is {low:.4g} and white {high:.4g} in the data's units."


def _colours(values: Array) -> Array:
    values = np.nan_to_num(values).clip(0, 1)
    return np.repeat(values, 3, axis=-1) if values.shape[-1] == 1 else values


@dataclass(frozen=True)
class Sheet:
    """Pictures in one RGBA array, with the centres of its rows and columns in pixels."""

    image: Array
    rows: list[float]
    columns: list[float]


def sheet(columns: Mapping[str, Array]) -> Sheet:
    """One row an image and one column a kind, with clear gutters between them."""
    arrays: Sequence[Array] = list(columns.values())
    count, height, width, _ = arrays[0].shape
    gap = max(1, round(0.06 * max(height, width)))
    image = np.zeros((count * (height + gap) - gap, len(arrays) * (width + gap) - gap, 4))
    for j, array in enumerate(arrays):
        for i, picture in enumerate(array):
            top, left = i * (height + gap), j * (width + gap)
            image[top : top + height, left : left + width, :3] = picture
            image[top : top + height, left : left + width, 3] = 1
    row_centres = [i * (height + gap) + (height - 1) / 2 for i in range(count)]
    return Sheet(image, row_centres, [j * (width + gap) + (width - 1) / 2 for j in range(len(arrays))])
