"""The explorer's view of patch tokens: their principal components as colours, and what each head of [CLS] looks at."""

import numpy as np
import torch

from pmae.app.material import Material
from pmae.app.panels import pictures, words
from pmae.models.maps import attention_maps, colours, token_maps
from pmae.report.maps import enlarged, lit


@torch.no_grad()
def patches(material: Material, image: np.ndarray) -> str:
    """The image, its tokens as colours, and the attention of [CLS] over all heads and head by head."""
    if material.model is None:
        return words("Patch tokens are those of a trained encoder, and none was given.", "pmae explore runs/a has one.")
    encoder, x = material.model.encoder, material.standardized(image)
    picture = material.view.pictures(image[None].astype(np.float64))
    size, maps = picture.shape[1:3], token_maps(encoder, x)
    shown = {"image": picture[0], "patch tokens": enlarged(colours(maps).numpy(), size)[0]}
    said = "Patches of one colour are alike to the encoder: red, green and blue are their principal components."
    attention = attention_maps(encoder, x)
    if attention is None:
        return pictures(shown.items()) + words(said)
    shown["[CLS] looks at"] = lit(picture, attention.mean(1).numpy())[0]
    heads = {f"head {i + 1}": lit(picture, one[None].numpy())[0] for i, one in enumerate(attention[0])}
    told = words(said, "Where [CLS] attends to a patch in the last block, the image is bright.")
    return pictures(shown.items()) + told + pictures(heads.items(), "small")
