"""Draw the figures of the method page from the embedded photographs: python docs/figures.py"""

from itertools import pairwise
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch

from pmae import ComponentMask, masking
from pmae.data.images import as_tensor
from pmae.data.named import load_photos
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


def save(figure: plt.Figure, name: str) -> None:
    """As a PNG that is the same every time."""
    IMAGES.mkdir(exist_ok=True)
    figure.savefig(IMAGES / f"{name}.png", dpi=130, metadata={"Software": None})
    plt.close(figure)


if __name__ == "__main__":
    photos = load_photos().train.images
    fitted = ComponentMask.fit(photos, 0.2)
    with torch.no_grad():
        designs(photos, fitted)
        spectrum(fitted.space)
        bands(photos, fitted)
