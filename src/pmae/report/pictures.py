"""Images as pictures, whatever their channels and range: whole, visible, hidden and restored."""

from dataclasses import dataclass

import numpy as np

from pmae.report.contents import Contents
from pmae.report.style import Array

DARK = 64
"""Bytes that all lie below this (digits of 0 to 16) are shown in their own range: within 0 to 255 they are black."""
SHADE = 0.15
"""How bright the patch stays that [CLS] looks at least."""
LIT = 0.95
"""The quantile of attention from which a patch is fully bright: one outlier would leave all others dark."""


@dataclass(frozen=True)
class View:
    """How images (N, C, H, W) become colours: standardize and mix channels, then stretch from low..high to 0..1."""

    mean: Array
    std: Array
    mix: Array  # (C, 1) for grey or (C, 3) for colour
    low: Array
    high: Array
    note: str  # what a caption must say about it; empty if nothing

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
    mean, std, mix = np.zeros(channels), np.ones(channels), np.eye(channels)[:, : 3 if channels == 3 else 1]
    if channels > 3:
        pixels = np.moveaxis(originals, 1, -1).reshape(-1, channels)
        mean, std = pixels.mean(0), np.maximum(pixels.std(0), 1e-12)
        pixels = (pixels - mean) / std
        mix = np.linalg.eigh(pixels.T @ pixels).eigenvectors[:, ::-1][:, :3]
        # The sign of a direction is arbitrary: let brighter mean more.
        mix = mix * np.where(mix.sum(0) < 0, -1.0, 1.0)
        low, high = np.percentile(pixels @ mix, (0.5, 99.5), axis=0)
        note = f"The {channels} channels are shown as their three principal directions, as red, green and blue."
        return View(mean, std, mix, low, high, note)
    # The range of the dtype where it is customary, else that of the images.
    low, high = np.percentile(originals, (0.5, 99.5))
    if dtype.startswith("float") and originals.min() >= 0 and 0.5 < originals.max() <= 1:
        low, high = np.array((0.0, 1.0))
    note = f"Black is {low:.4g} and white {high:.4g} in the data's units."
    if dtype == "uint8" and originals.max() >= DARK:
        low, high, note = np.array(0.0), np.array(255.0), ""
    first = "Of 2 channels the first is shown." if channels == 2 else ""
    return View(mean, std, mix, low, high, f"{first} {note}".strip())


def _colours(values: Array) -> Array:
    values = np.nan_to_num(values).clip(0, 1)
    return np.repeat(values, 3, axis=-1) if values.shape[-1] == 1 else values


def view_for(run: Contents) -> View:
    """How the images of a run become colours."""
    return view_of(run.samples["original"], str(run.data.get("dtype", "")))


def hidden_pixels(target: Array) -> Array:
    """(N, H, W, 1) of an MAE's target, which is exactly 0 where a patch is visible."""
    return np.asarray((target != 0).any(1)[..., None])


def masked_pictures(run: Contents, count: int, view: View | None = None) -> dict[str, Array]:
    """The first images of a run, their visible and their hidden part as pictures; hidden patches are grey."""
    view = view or view_for(run)
    original, visible, target = (run.samples[name][:count] for name in ("original", "visible", "target"))
    image, seen, gaps = view.pictures(original), view.pictures(visible), hidden_pixels(target)
    if run.method == "MAE":
        return {"image": image, "visible": np.where(gaps, 0.5, seen), "hidden": np.where(gaps, image, 0.5)}
    return {"image": image, "visible": seen, "hidden": view.differences(target, view.scale(target))}


def reconstructed_pictures(run: Contents, count: int) -> dict[str, Array]:
    """The first images: whole, visible, hidden, predicted, and restored where the units of the data are known."""
    visible, target, prediction = (run.samples[name][:count] for name in ("visible", "target", "prediction"))
    view, columns, std = view_for(run), masked_pictures(run, count), run.fitted.get("standardize.std")
    restored = {} if std is None else {"restored": view.pictures(visible + prediction * std)}
    columns["predicted"] = view.differences(prediction, view.scale(target))
    if run.method == "MAE" and restored:
        columns["predicted"] = np.where(hidden_pixels(target), restored["restored"], 0.5)
    return columns | restored


def enlarged(maps: Array, size: tuple[int, int]) -> Array:
    """Maps (N, rows, columns, ...) with every cell blown up to a block of pixels."""
    rows, columns = (np.arange(side) * cells // side for side, cells in zip(size, maps.shape[1:3], strict=True))
    return maps[:, rows][:, :, columns]


def lit(pictures: Array, attention: Array) -> Array:
    """Pictures (N, H, W, 3) as bright as the attention (N, rows, columns) on them, from its least to near its most."""
    least, most = (np.quantile(attention, at, (1, 2), keepdims=True) for at in (0, LIT))
    share = np.minimum((attention - least) / np.maximum(most - least, 1e-12), 1)
    light = SHADE + (1 - SHADE) * enlarged(share, (pictures.shape[1], pictures.shape[2]))
    return np.asarray(pictures * light[..., None])
