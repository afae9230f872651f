"""The paper's figures made of pictures: mask designs side by side, and example images of data sets."""

from collections.abc import Mapping

import numpy as np

from pmae.report.contents import Contents
from pmae.report.galleries import gallery, hidden_pixels, visible_part
from pmae.report.pictures import Array, view_of
from pmae.report.style import Drawing, styled

PICTURES = 4


@styled
def mask_designs(runs: Mapping[str, Contents]) -> Drawing:
    """The same images under several masks: for each name a row of what the encoder sees and one of what it predicts."""
    first = next(iter(runs.values()))
    view = view_of(first.samples["original"], str(first.data.get("dtype", "")))
    image = view.pictures(first.samples["original"][:PICTURES])
    rows: dict[str, Array] = {"image": image}
    for name, run in runs.items():
        target = run.samples["target"][:PICTURES]
        rows[name] = visible_part(run, view.pictures(run.samples["visible"][:PICTURES]), target)
        if run.method == "MAE":
            rows[f"{name} target"] = np.where(hidden_pixels(target), image, 0.5)
        else:
            rows[f"{name} target"] = view.differences(target, view.scale(target))
    columns = {f"image {j + 1}": np.stack([row[j] for row in rows.values()]) for j in range(len(image))}
    figure, _ = gallery(columns, ["target" if label.endswith("target") else label for label in rows])
    caption = (
        "What the encoder sees under each mask, and below it the target. Hidden patches are grey; targets made of "
        f"components are differences around mid-grey. A random ratio is shown at its middle. {view.note}"
    )
    return Drawing("mask-designs", "Mask designs", caption.strip(), figure)


@styled
def examples(runs: Mapping[str, Contents]) -> Drawing:
    """Some images of each data set, one column a set, smaller images enlarged."""
    shown = {
        name: view_of(run.samples["original"], str(run.data.get("dtype", ""))).pictures(run.samples["original"])
        for name, run in runs.items()
    }
    height, width = (max(pictures.shape[axis] for pictures in shown.values()) for axis in (1, 2))
    columns = {name: _enlarged(pictures[: PICTURES - 1], height, width) for name, pictures in shown.items()}
    figure, _ = gallery(columns, None)
    return Drawing("examples", "Examples of the data", "Held-out images of each data set.", figure)


def _enlarged(pictures: Array, height: int, width: int) -> Array:
    """Pictures repeated pixel by pixel to a larger size."""
    rows, columns = np.arange(height) * pictures.shape[1] // height, np.arange(width) * pictures.shape[2] // width
    return pictures[:, rows][:, :, columns]
