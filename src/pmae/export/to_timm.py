"""timm: a folder that `timm.create_model("local-dir:...", pretrained=True)` loads, with its own preprocessing."""

from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from timm.data.config import resolve_model_data_config
from timm.data.transforms_factory import create_transform
from torch import Tensor

from pmae.data.images import as_tensor
from pmae.export.source import Source, write_weights
from pmae.files import write_json
from pmae.models.encoder import pool, split_tokens, timm_recipe

USAGE = """
import timm

model = timm.create_model("local-dir:FOLDER", pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))   # for PIL images
tokens = model.forward_features(transform(image)[None])
"""


def write(source: Source, folder: Path) -> None:
    """config.json in timm's layout and model.safetensors, the encoder's own state dict."""
    write_json(folder / "config.json", _config(source))
    write_weights(source.encoder.net.state_dict(), folder)


def _config(source: Source) -> dict[str, Any]:
    mean, std = source.statistics("format timm")
    name, options = timm_recipe(source.config.encoder, source.shape)
    known: Any = timm.get_pretrained_cfg(name)
    return {
        "architecture": name,
        "num_classes": 0,
        "num_features": source.encoder.width,
        "model_args": options,
        "pretrained_cfg": {
            "input_size": list(source.shape),
            "mean": mean,
            "std": std,
            "interpolation": "bicubic",
            # The whole image, resized to the size that was trained on.
            "crop_pct": 1.0,
            "crop_mode": "squash",
            "num_classes": 0,
            # With the classifier's name, timm can add one; with that of the first layer it would replace the weights
            # of any other number of channels than three by random ones.
            "classifier": known.classifier,
            "first_conv": known.first_conv if source.shape[0] == 3 else None,
        },
    }


def features(source: Source, folder: Path, images: np.ndarray) -> dict[str, Tensor]:
    """What timm makes of the images, from the folder alone."""
    net: Any = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    transform: Any = create_transform(**resolve_model_data_config(net))
    with torch.inference_mode():
        x = transform(as_tensor(images).float() * source.scale)
        return pool(*split_tokens(net, net.forward_features(x)))
