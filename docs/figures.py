"""Draw the figures of the pages on the method and on photographs: python docs/figures.py"""

from itertools import pairwise
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from PIL import Image

from pmae import ComponentMask, masking
from pmae.config import DataConfig
from pmae.data.images import as_tensor
from pmae.data.named import load_photos, photo_paths
from pmae.data.resize import as_square
from pmae.report.style import NEUTRAL, PALETTE
from pmae.spaces import Space

IMAGES = Path(__file__).parent / "images"
CROPS = (33, 1011, 1580, 2920)
HIDDEN, VISIBLE = PALETTE[0], NEUTRAL  # as on the pages of reports and in the explorer


def pictures(batch: torch.Tensor) -> np.ndarray:
    """(N, H, W, 3) in 0 to 1."""
    return batch.clamp(0, 1).permute(0, 2, 3, 1).numpy()


def hide_patches(crops: torch.Tensor, share: float) -> torch.Tensor:
    """What an MAE sees: 8x8 patches painted grey."""
    count, side = len(crops), crops.shape[-1] // 8
    order = torch.rand(count, side * side).argsort(1)
    hidden = (order < share * side * side).view(count, 1, side, side).float()
    return torch.where(torch.nn.functional.interpolate(hidden, scale_factor=8) > 0, 0.62, crops)


def designs(images: np.ndarray, mask: ComponentMask) -> None:
    """Rows: image, patches hidden, components hidden, the hidden part."""
    crops = as_tensor(images[list(CROPS)]).float() / 255
    torch.manual_seed(4)
    visible, hidden = mask.hide(crops)
    rows = {
        "image": crops,
        "MAE sees\n(75% of patches hidden)": hide_patches(crops, 0.75),
        "PMAE sees\n(20% of variance hidden)": visible,
        "hidden from PMAE\n(what it has to predict)": hidden,
    }
    figure, axes = plt.subplots(len(CROPS), len(rows), figsize=(7.2, 7.0), layout="constrained")
    for column, (title, batch) in zip(axes.T, rows.items(), strict=True):
        column[0].set_title(title, fontsize=9)
        for axis, picture in zip(column, pictures(batch), strict=True):
            axis.imshow(picture, interpolation="nearest")
            axis.set_axis_off()
    save(figure, "designs")


def spectrum(pca: Space) -> None:
    """The spectrum of the photographs, with one random set of hidden components marked."""
    share = pca.variance_share
    noise = torch.rand(1, len(share), generator=torch.Generator().manual_seed(5))
    hidden = masking.hide_components(noise, share, torch.tensor([[0.2]]))[0]
    number, percent = np.arange(1, len(share) + 1), 100 * share.numpy()
    figure, (bars, curve) = plt.subplots(1, 2, figsize=(7.2, 2.7), layout="constrained")
    first = slice(0, 40)
    colours = np.where(hidden.numpy(), HIDDEN, VISIBLE)[first]
    for bar, is_hidden in zip(bars.bar(number[first], percent[first], color=colours, width=0.8), hidden, strict=False):
        bar.set_hatch("////" if is_hidden else "")
        bar.set_edgecolor("white")
    bars.set(yscale="log", xlabel="component, largest first", ylabel="share of the variance, %")
    found = 100 * float(share[hidden].sum())
    bars.set_title(f"hidden (hatched): {int(hidden.sum())} of {len(share):,}, {found:.1f}% of the variance", fontsize=9)
    curve.plot(number, percent.cumsum(), color=HIDDEN)
    for level in (50, 90):
        count = int((percent.cumsum() < level).sum()) + 1
        curve.axvline(count, color=VISIBLE, linewidth=0.8)
        curve.text(count * 1.15, 5, f"{count}: {level}%", color="#444444", fontsize=9)
    curve.set(xscale="log", xlabel="components", ylabel="variance held, %", ylim=(0, 102))
    curve.set_title("a few components hold most of it", fontsize=9)
    save(figure, "spectrum")


def bands(images: np.ndarray, mask: ComponentMask) -> None:
    """What the large, the middle and the small components show."""
    crops = mask.standardize(as_tensor(images[list(CROPS[:3])]).float() / 255)
    z = mask.space.project(crops)
    ends = [0, 10, 100, 400, z.shape[1]]
    columns = {"image": crops}
    for low, high in pairwise(ends):
        kept = torch.zeros_like(z)
        kept[:, low:high] = z[:, low:high]
        columns[f"components\n{low + 1:,} to {high:,}"] = mask.space.reconstruct(kept)
    figure, axes = plt.subplots(3, len(columns), figsize=(7.2, 4.7), layout="constrained")
    for column, (title, batch) in zip(axes.T, columns.items(), strict=True):
        column[0].set_title(title, fontsize=9)
        for axis, part in zip(column, batch, strict=True):
            # Small bands would be black: each picture is stretched to its own range.
            low, high = part.quantile(0.01), part.quantile(0.99)
            axis.imshow(pictures(((part - low) / (high - low))[None])[0], interpolation="nearest")
            axis.set_axis_off()
    save(figure, "bands")


def crops(side: int = 224, share: float = 0.2) -> None:
    """A file, the square of it that evaluation sees, and the same crop cut from the square and from the file."""
    paths = {path.stem: path for path in photo_paths()}
    figure, axes = plt.subplots(2, 4, figsize=(7.2, 3.7), layout="constrained", width_ratios=[1.5, 1, 1, 1])
    for row, (name, at) in zip(axes, {"coffee": (0.45, 0.3), "china": (0.3, 0.25)}.items(), strict=True):
        file = Image.open(paths[name]).convert("RGB")
        square = as_square(file, DataConfig(resize=side))
        corner, length = np.array(at) * side, side * share**0.5
        beside = np.maximum(np.array(file.size) - min(file.size), 0) / 2
        scale = min(file.size) / side
        boxes = [(square, corner, length), (file, beside + corner * scale, length * scale)]
        cut = [
            image.resize((side, side), Image.Resampling.BICUBIC, (*start, *(start + size)))
            for image, start, size in boxes
        ]
        titles = [f"file, {file.width}x{file.height}", f"evaluation sees {side}x{side}", "cut from the square"]
        for axis, picture, title in zip(row, [file, square, *cut], [*titles, "cut from the file"], strict=True):
            axis.imshow(picture)
            axis.set_title(title, fontsize=9)
            axis.set_axis_off()
        for axis, (_, start, size) in zip(row, boxes[::-1], strict=False):
            axis.add_patch(plt.Rectangle(start, size, size, fill=False, color=HIDDEN, linewidth=1.5))
    save(figure, "crops", dpi=100)


def save(figure: plt.Figure, name: str, dpi: int = 130) -> None:
    """As a PNG that is the same every time."""
    IMAGES.mkdir(exist_ok=True)
    figure.savefig(IMAGES / f"{name}.png", dpi=dpi, metadata={"Software": None})
    plt.close(figure)


if __name__ == "__main__":
    photos = load_photos().train.images
    fitted = ComponentMask.fit(photos, 0.2)
    with torch.no_grad():
        designs(photos, fitted)
        spectrum(fitted.space)
        bands(photos, fitted)
    crops()
