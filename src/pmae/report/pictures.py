"""Arrays of any channel count and range as colours that a screen can show, and galleries of such pictures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pmae.report.style import WIDTH

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = np.ndarray
DARK = 64
"""Bytes that all lie below this (digits of 0 to 16) are shown in their own range: within 0 to 255 they are black."""


@dataclass(frozen=True)
class View:
    """How images (N, C, H, W) become colours: standardize and mix channels, then stretch from low..high to 0..1."""

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
        mixed = ((np.moveaxis(images, 1, -1) - self.mean) / self.std) @ self.mix
        return _colours((mixed - self.low) / np.maximum(self.high - self.low, 1e-12))

    def differences(self, images: Array, scale: float) -> Array:
        """(N, H, W, 3) colours of standardized differences: mid-grey is 0, black and white are -scale and +scale."""
        return _colours(0.5 + np.moveaxis(images, 1, -1) @ self.mix / (2 * scale))

    def scale(self, images: Array) -> float:
        """A scale that leaves all but the largest half percent of these differences inside black and white."""
        return max(float(np.percentile(np.abs(np.moveaxis(images, 1, -1) @ self.mix), 99.5)), 1e-6)


def view_of(originals: Array, dtype: str) -> View:
    """Grey for one channel, colour for three; of two the first, and of more the three principal directions."""
    channels = originals.shape[1]
    if channels > 3:
        return _principal_view(originals)
    mix = np.eye(3) if channels == 3 else np.eye(channels)[:, :1]
    low, high, note = _range(originals, dtype)
    first = "Of 2 channels the first is shown." if channels == 2 else ""
    return View(np.zeros(channels), np.ones(channels), mix, np.array(low), np.array(high), f"{first} {note}".strip())


def _principal_view(originals: Array) -> View:
    """Every channel at standard deviation 1, then the three directions along which the channels vary most."""
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


def _range(originals: Array, dtype: str) -> tuple[float, float, str]:
    """Black and white of pictures: the range of the dtype where it is customary, else that of the images."""
    if dtype == "uint8" and originals.max() >= DARK:
        return 0.0, 255.0, ""
    low, high = np.percentile(originals, (0.5, 99.5))
    if dtype.startswith("float") and originals.min() >= 0 and 0.5 < originals.max() <= 1:
        low, high = 0.0, 1.0
    return low, high, f"Black is {low:.4g} and white {high:.4g} in the data's units."


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
    arrays = list(columns.values())
    count, height, width, _ = arrays[0].shape
    gap = max(1, round(0.06 * max(height, width)))
    tops, lefts = [i * (height + gap) for i in range(count)], [j * (width + gap) for j in range(len(arrays))]
    image = np.zeros((tops[-1] + height, lefts[-1] + width, 4))
    for left, array in zip(lefts, arrays, strict=True):
        for top, picture in zip(tops, array, strict=True):
            image[top : top + height, left : left + width, :3] = picture
            image[top : top + height, left : left + width, 3] = 1
    return Sheet(image, [top + (height - 1) / 2 for top in tops], [left + (width - 1) / 2 for left in lefts])


def gallery(
    columns: Mapping[str, Array], labels: Sequence[str] | None, strip: bool = False, margin: float = 0.55
) -> "tuple[Figure, Axes | None]":
    """A sheet of pictures with titles over its columns, labels in a margin (inches) beside its rows, and axes on the
    right if asked."""
    from matplotlib.figure import Figure

    made = sheet(columns)
    height, width = made.image.shape[:2]
    lines = 1 + max(title.count("\n") for title in columns)
    left, right = margin if labels else 0.04, 1.3 if strip else 0.04
    bottom, across = 0.42 if strip else 0.04, WIDTH - left - right
    down = across * height / width
    total = down + 0.1 + 0.15 * lines + bottom
    figure = Figure(figsize=(WIDTH, total))
    axes = figure.add_axes((left / WIDTH, bottom / total, across / WIDTH, down / total))
    axes.imshow(made.image, interpolation="none", aspect="auto")
    axes.set_axis_off()
    above = -0.5 - 0.09 * height / down
    for centre, title in zip(made.columns, columns, strict=True):
        axes.text(centre, above, title, ha="center", va="baseline", fontsize=8.5, linespacing=1.15)
    for centre, label in zip(made.rows, labels or [], strict=False):
        axes.text(-0.5 - 0.05 * width / across, centre, label.replace(" ", "\n"), ha="right", va="center", fontsize=8.5)
    if not strip:
        return figure, None
    beside = figure.add_axes(((left + across + 0.12) / WIDTH, bottom / total, (right - 0.3) / WIDTH, down / total))
    beside.set_ylim(axes.get_ylim())
    beside.set_yticks(made.rows, labels=[""] * len(made.rows))
    return figure, beside
