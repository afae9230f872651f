"""What an encoder's patch tokens look like: their principal components as colours, and the attention of [CLS]."""

import numpy as np

from pmae.report.contents import Contents
from pmae.report.pictures import view_for
from pmae.report.samples import ROWS
from pmae.report.style import Array, Drawing, gallery, styled

SHADE = 0.15
"""How bright the patch stays that [CLS] looks at least."""
LIT = 0.95
"""The quantile of attention from which a patch is fully bright: one outlier would leave all others dark."""


@styled
def token_figure(run: Contents) -> Drawing:
    """Sample images beside their tokens as colours and, of a ViT, what [CLS] attends to."""
    pictures = view_for(run).pictures(run.samples["original"][:ROWS])
    size = pictures.shape[1:3]
    columns = {"image": pictures, "patch tokens": enlarged(run.samples["token_colours"][:ROWS], size)}
    said = (
        "Red, green and blue are the three leading principal components of the patch tokens of these images: patches "
        "of one colour are alike to the encoder."
    )
    if "attention" in run.samples:
        columns["[CLS] looks at"] = lit(pictures, run.samples["attention"][:ROWS])
        said += (
            " On the right, the brighter a patch, the more [CLS] attends to it in the last block (mean of all heads, "
            "each image on a scale of its own, its top twentieth fully bright)."
        )
    figure, _ = gallery(columns)
    return Drawing("tokens", "What patches look like to the encoder", said, figure)


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
