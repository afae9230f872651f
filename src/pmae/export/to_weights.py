"""timm and Hugging Face: a folder with the weights and the settings of a network that the library builds itself.

For transformers a plain ViT becomes its own ViTModel; any other timm network stays one, inside its timm wrapper.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from safetensors.torch import save
from timm.data.config import resolve_model_data_config
from timm.data.transforms_factory import create_transform
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from pmae.data.images import as_tensor
from pmae.export.source import Source, needed
from pmae.files import write_json
from pmae.models.encoder import pool, split_tokens, timm_recipe
from pmae.models.weights import to_huggingface

TIMM_USAGE = """
import timm

model = timm.create_model("local-dir:FOLDER", pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))   # for PIL images
tokens = model.forward_features(transform(image)[None])
"""
HUGGINGFACE_USAGE = """
from transformers import AutoImageProcessor, AutoModel

model = AutoModel.from_pretrained("FOLDER").eval()
processor = AutoImageProcessor.from_pretrained("FOLDER")
output = model(**processor(image, return_tensors="pt"))   # last_hidden_state; pooler_output is the summary
"""
TIMM_CLASSIFIER_USAGE = """
import timm

model = timm.create_model("local-dir:FOLDER", pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))   # for PIL images
logits = model(transform(image)[None])   # of the classes in model.pretrained_cfg["label_names"]
"""
HUGGINGFACE_CLASSIFIER_USAGE = """
from transformers import AutoImageProcessor, AutoModelForImageClassification

model = AutoModelForImageClassification.from_pretrained("FOLDER").eval()
processor = AutoImageProcessor.from_pretrained("FOLDER")
logits = model(**processor(image, return_tensors="pt")).logits   # of the classes in model.config.id2label
"""
BICUBIC = 3


def write_timm(source: Source, folder: Path) -> None:
    """config.json in timm's layout and model.safetensors, the encoder's own state dict."""
    mean, std = source.statistics("format timm")
    name, options = timm_recipe(source.network, source.shape)
    known: Any = timm.get_pretrained_cfg(name)
    tensors, classes = source.encoder.net.state_dict(), list(source.head.classes) if source.head else []
    labels = {"label_names": classes} if source.head else {}
    if source.head:
        options |= _pooling(source.encoder.net, source.head.pooling)
        tensors |= {f"{known.classifier}.weight": source.head.weight, f"{known.classifier}.bias": source.head.bias}
    config = {
        "architecture": name,
        "num_classes": len(classes),
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
            "num_classes": len(classes),
            **labels,
            # With the classifier's name, timm can add one; with that of the first layer it would replace the weights
            # of any other number of channels than three by random ones.
            "classifier": known.classifier,
            "first_conv": known.first_conv if source.shape[0] == 3 else None,
        },
    }
    write_json(folder / "config.json", config | labels)
    _write_weights(tensors, folder)


def _pooling(net: Any, pooling: str) -> dict[str, Any]:
    """The arguments with which timm's own head sees what ours does: of a ViT, tokens behind the last norm."""
    if not isinstance(net, VisionTransformer):
        return {}
    return {"global_pool": "token" if pooling == "cls" else "avg", "fc_norm": False}


def _write_weights(tensors: dict[str, Tensor], folder: Path) -> None:
    """model.safetensors as both libraries read it."""
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    (folder / "model.safetensors").write_bytes(save(whole, metadata={"format": "pt"}))


def timm_features(source: Source, folder: Path, images: np.ndarray) -> dict[str, Tensor]:
    """What timm makes of the images, from the folder alone."""
    net: Any = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    transform: Any = create_transform(**resolve_model_data_config(net))
    with torch.inference_mode():
        x = transform(as_tensor(images).float() * source.scale)
        if source.head:
            return source.head.outputs(net(x))
        return pool(*split_tokens(net, net.forward_features(x)))


def write_huggingface(source: Source, folder: Path) -> None:
    """Weights, configuration and preprocessing in the layout of transformers."""
    transformers = needed("huggingface", "transformers")
    net: Any = source.encoder.net
    tensors = _vit_tensors(net)
    if tensors is None or (source.head and source.head.pooling != "cls"):  # where transformers' ViT has its head
        write_timm(source, folder)
        return
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
        **_labels(source),
    ).save_pretrained(folder)
    transformers.ViTImageProcessor(
        size={"height": height, "width": width},
        resample=BICUBIC,
        do_rescale=source.scale != 1,
        rescale_factor=source.scale,
        image_mean=mean,
        image_std=std,
    ).save_pretrained(folder)
    if source.head:
        tensors = {f"vit.{name}": tensor for name, tensor in tensors.items()}
        _write_weights(tensors | {"classifier.weight": source.head.weight, "classifier.bias": source.head.bias}, folder)
        return
    # The pooler hands on the [CLS] token as it is; left out, transformers would make one of random weights.
    pooler = {"pooler.dense.weight": torch.eye(net.num_features), "pooler.dense.bias": torch.zeros(net.num_features)}
    _write_weights(tensors | pooler, folder)


def _labels(source: Source) -> dict[str, Any]:
    """What a configuration of transformers says of its outputs."""
    if source.head is None:
        return {"architectures": ["ViTModel"]}
    names = dict(enumerate(source.head.classes))
    kind = "multi_label_classification" if source.head.multi_label else "single_label_classification"
    numbers = {name: number for number, name in names.items()}
    told = {"id2label": names, "label2id": numbers, "problem_type": kind}
    return {"architectures": ["ViTForImageClassification"], **told}


def _vit_tensors(net: Any) -> dict[str, Tensor] | None:
    """The weights in Hugging Face's names, if the network computes what transformers' ViT computes."""
    if type(net) is not VisionTransformer or net.num_prefix_tokens != 1 or net.pos_embed is None:
        return None
    first: Any = net.blocks[0]
    plain = isinstance(first.mlp.act, nn.GELU) and first.attn.qkv.bias is not None and not net.no_embed_class
    tensors, unknown = to_huggingface(net.state_dict())
    return tensors if plain and not unknown and isinstance(net.norm, nn.LayerNorm) else None


def huggingface_features(source: Source, folder: Path, images: np.ndarray) -> dict[str, Tensor]:
    """What transformers makes of the images, from the folder alone."""
    transformers = needed("huggingface", "transformers")
    with _quietly(transformers.utils.logging), torch.inference_mode():
        kind = transformers.AutoModelForImageClassification if source.head else transformers.AutoModel
        model = kind.from_pretrained(folder, local_files_only=True).eval()
        processor = transformers.AutoImageProcessor.from_pretrained(folder, local_files_only=True)
        if hasattr(model, "timm_model"):
            scaled = as_tensor(images).float() * source.scale
            if source.head:
                return source.head.outputs(model(**processor(scaled)).logits)
            tokens = model(**processor(scaled), do_pooling=False).last_hidden_state
            return pool(*split_tokens(model.timm_model, tokens))
        output = model(**processor(list(images), input_data_format="channels_first", return_tensors="pt"))
    if source.head:
        return source.head.outputs(output.logits)
    return {"cls": output.pooler_output, "mean": output.last_hidden_state[:, 1:].mean(1)}


@contextmanager
def _quietly(logging: Any) -> Iterator[None]:
    """Without transformers' bars and advice, which are about downloads and training."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
