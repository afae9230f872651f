"""Hugging Face: a folder that `AutoModel` and `AutoImageProcessor` load.

A plain ViT becomes transformers' own ViTModel; any other timm network stays one, inside transformers' timm wrapper.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from pmae.data.images import as_tensor
from pmae.export import to_timm
from pmae.export.source import Source, needed, write_weights
from pmae.models.encoder import pool, split_tokens
from pmae.models.weights import to_huggingface

USAGE = """
from transformers import AutoImageProcessor, AutoModel

model = AutoModel.from_pretrained("FOLDER").eval()
processor = AutoImageProcessor.from_pretrained("FOLDER")
output = model(**processor(image, return_tensors="pt"))   # last_hidden_state; pooler_output is the summary
"""
BICUBIC = 3


def write(source: Source, folder: Path) -> None:
    """Weights, configuration and preprocessing in the layout of transformers."""
    needed("huggingface", "transformers")
    tensors = _vit_tensors(source.encoder.net)
    if tensors is None:
        to_timm.write(source, folder)
        return
    width = source.encoder.width
    # The pooler hands on the [CLS] token as it is; left out, transformers would make one of random weights.
    tensors |= {"pooler.dense.weight": torch.eye(width), "pooler.dense.bias": torch.zeros(width)}
    _save_config(source, folder)
    write_weights(tensors, folder)


def _vit_tensors(net: nn.Module) -> dict[str, Tensor] | None:
    """The weights in Hugging Face's names, if the network computes what transformers' ViT computes."""
    if type(net) is not VisionTransformer or net.num_prefix_tokens != 1 or net.pos_embed is None:
        return None
    blocks: Any = net.blocks
    plain = isinstance(blocks[0].mlp.act, nn.GELU) and blocks[0].attn.qkv.bias is not None and not net.no_embed_class
    tensors, unknown = to_huggingface(net.state_dict())
    return tensors if plain and not unknown and isinstance(net.norm, nn.LayerNorm) else None


def _save_config(source: Source, folder: Path) -> None:
    """config.json and preprocessor_config.json."""
    transformers = needed("huggingface", "transformers")
    net: Any = source.encoder.net
    mean, std = source.statistics("format huggingface")
    channels, height, width = source.shape
    rows, columns = net.patch_embed.patch_size
    transformers.ViTConfig(
        hidden_size=source.encoder.width,
        num_hidden_layers=len(net.blocks),
        num_attention_heads=net.blocks[0].attn.num_heads,
        intermediate_size=net.blocks[0].mlp.fc1.out_features,
        layer_norm_eps=net.norm.eps,
        image_size=(height, width),
        patch_size=rows if rows == columns else (rows, columns),
        num_channels=channels,
        pooler_act="linear",
        architectures=["ViTModel"],
    ).save_pretrained(folder)
    transformers.ViTImageProcessor(
        size={"height": height, "width": width},
        resample=BICUBIC,
        do_rescale=source.scale != 1,
        rescale_factor=source.scale,
        image_mean=mean,
        image_std=std,
    ).save_pretrained(folder)


def features(source: Source, folder: Path, images: np.ndarray) -> dict[str, Tensor]:
    """What transformers makes of the images, from the folder alone."""
    transformers = needed("huggingface", "transformers")
    with _quietly(transformers), torch.inference_mode():
        model = transformers.AutoModel.from_pretrained(folder, local_files_only=True).eval()
        processor = transformers.AutoImageProcessor.from_pretrained(folder, local_files_only=True)
        if hasattr(model, "timm_model"):
            scaled = as_tensor(images).float() * source.scale
            tokens = model(**processor(scaled), do_pooling=False).last_hidden_state
            return pool(*split_tokens(model.timm_model, tokens))
        inputs = processor(list(images), input_data_format="channels_first", return_tensors="pt")
        output = model(**inputs)
    return {"cls": output.pooler_output, "mean": output.last_hidden_state[:, 1:].mean(1)}


@contextmanager
def _quietly(transformers: Any) -> Iterator[None]:
    """Without transformers' bars and advice, which are about downloads and training."""
    logging = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
