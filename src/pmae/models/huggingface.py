"""Networks that Hugging Face's transformers wrote: which of timm's each is, and its tensors in the other's names."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pmae.config import EncoderConfig
from pmae.errors import require

VITS = ("vit", "vit_mae")
"""Hugging Face's `model_type`s that are timm's plain ViT."""
DINOV2 = {384: "small", 768: "base", 1024: "large"}
"""timm's names of DINOv2's networks, by their width."""
RESNETS = {
    ("basic", (2, 2, 2, 2)): "resnet18",
    ("basic", (3, 4, 6, 3)): "resnet34",
    ("bottleneck", (2, 2, 2, 2)): "resnet26",
    ("bottleneck", (3, 4, 6, 3)): "resnet50",
    ("bottleneck", (3, 4, 23, 3)): "resnet101",
    ("bottleneck", (3, 8, 36, 3)): "resnet152",
}
CONVNEXTS = {
    ("convnext", (3, 3, 9, 3), 96): "convnext_tiny",
    ("convnext", (3, 3, 27, 3), 96): "convnext_small",
    ("convnext", (3, 3, 27, 3), 128): "convnext_base",
    ("convnext", (3, 3, 27, 3), 192): "convnext_large",
    ("convnext", (3, 3, 27, 3), 256): "convnext_xlarge",
    ("convnextv2", (2, 2, 6, 2), 40): "convnextv2_atto",
    ("convnextv2", (2, 2, 6, 2), 48): "convnextv2_femto",
    ("convnextv2", (2, 2, 6, 2), 64): "convnextv2_pico",
    ("convnextv2", (2, 2, 8, 2), 80): "convnextv2_nano",
    ("convnextv2", (3, 3, 9, 3), 96): "convnextv2_tiny",
    ("convnextv2", (3, 3, 27, 3), 128): "convnextv2_base",
    ("convnextv2", (3, 3, 27, 3), 192): "convnextv2_large",
    ("convnextv2", (3, 3, 27, 3), 352): "convnextv2_huge",
}
QKV = ("query", "key", "value")
HF_NAMES = {
    "cls_token": "embeddings.cls_token",
    "pos_embed": "embeddings.position_embeddings",
    "patch_embed.proj": "embeddings.patch_embeddings.projection",
    "norm": "layernorm",
    "blocks.{}.norm1": "encoder.layer.{}.layernorm_before",
    "blocks.{}.norm2": "encoder.layer.{}.layernorm_after",
    **{f"blocks.{{}}.attn.{part}": f"encoder.layer.{{}}.attention.attention.{part}" for part in QKV},
    "blocks.{}.attn.proj": "encoder.layer.{}.attention.output.dense",
    "blocks.{}.mlp.fc1": "encoder.layer.{}.intermediate.dense",
    "blocks.{}.mlp.fc2": "encoder.layer.{}.output.dense",
}
"""A plain ViT's modules in timm and in Hugging Face's files, which keep three matrices for timm's `attn.qkv`.

Recent transformers name the modules in memory otherwise, but write and read files in these names."""
DINOV2_NAMES = {
    "reg_token": "embeddings.register_tokens",
    "blocks.{}.norm1": "encoder.layer.{}.norm1",
    "blocks.{}.norm2": "encoder.layer.{}.norm2",
    "blocks.{}.ls1.gamma": "encoder.layer.{}.layer_scale1.lambda1",
    "blocks.{}.ls2.gamma": "encoder.layer.{}.layer_scale2.lambda1",
    "blocks.{}.mlp.fc1": "encoder.layer.{}.mlp.fc1",
    "blocks.{}.mlp.fc2": "encoder.layer.{}.mlp.fc2",
}
"""What Hugging Face's DINOv2 calls otherwise, or has beside."""
OFFICIAL = {"register_tokens": "reg_token"}
"""What DINOv2's own files call otherwise than timm."""
STEMS = {
    "embedder.embedder.convolution.": "conv1.",
    "embedder.embedder.normalization.": "bn1.",
    "embeddings.patch_embeddings.": "stem.0.",
    "embeddings.layernorm.": "stem.1.",
    "layernorm.": "head.norm.",
}
"""What comes before the stages, and ConvNeXt's norm after them."""
CONVNEXT_BLOCK = {
    "dwconv": "conv_dw",
    "layernorm": "norm",
    "pwconv1": "mlp.fc1",
    "grn": "mlp.grn",
    "pwconv2": "mlp.fc2",
    "layer_scale_parameter": "gamma",
}


def require_usual_activation(config: Mapping[str, Any], where: str) -> None:
    """Refuse another activation than timm's networks have: it leaves no trace in the tensors, so it would go unseen."""
    usual = "relu" if config.get("model_type") == "resnet" else "gelu"
    require(config.get("hidden_act", usual) == usual, f"hidden_act in {where}", repr(usual), config.get("hidden_act"))


def encoder_in(config: Mapping[str, Any]) -> EncoderConfig | None:
    """The settings that build the network of a config.json; None for one that timm has not, or that is not known."""
    kind, width, patch = config.get("model_type"), config.get("hidden_size"), config.get("patch_size")
    patch = patch[-1] if isinstance(patch, list) else patch  # of signals, (1, patch)
    if kind in VITS:
        depth, heads = (config.get(name) for name in ("num_hidden_layers", "num_attention_heads"))
        return EncoderConfig("vit_tiny", patch, width, depth, heads)
    if str(kind).startswith("dinov2") and width in DINOV2:
        registers = "_reg4" if config.get("num_register_tokens") else ""
        return EncoderConfig(f"vit_{DINOV2[width]}_patch14{registers}_dinov2", patch_size=patch)
    name = convnet_name(config)
    return EncoderConfig(name) if name else None


def convnet_name(config: Mapping[str, Any]) -> str | None:
    """timm's name of the network that a Hugging Face config.json describes; None for any other."""
    depths, widths = (tuple(config.get(key) or ()) for key in ("depths", "hidden_sizes"))
    if config.get("model_type") == "resnet":
        # Strides elsewhere leave no trace in the shapes and would load in silence.
        moved = config.get("downsample_in_bottleneck") or config.get("downsample_in_first_stage")
        return None if moved else RESNETS.get((str(config.get("layer_type")), depths))
    return CONVNEXTS.get((str(config.get("model_type")), depths, widths[0])) if widths else None


def to_timm(tensors: dict[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors in timm's names, those of timm's own files as they are.

    Where timm has a linear layer as a 1x1 convolution, they are in its shape as well, which is as `expected`.
    """
    tensors = {OFFICIAL.get(name, name): tensor for name, tensor in tensors.items()}
    if not any(name.startswith("encoder.stages.") for name in tensors):
        return _vit_to_timm(tensors) if any(name.startswith("embeddings.") for name in tensors) else tensors
    named = {_convnet_to_timm(name): tensor for name, tensor in tensors.items()}
    return {name: _shaped(tensor, expected[name]) if name in expected else tensor for name, tensor in named.items()}


def _vit_to_timm(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Hugging Face's ViT or DINOv2 tensors in timm's names; what has no counterpart keeps its name."""
    names = {theirs: ours for known in (HF_NAMES, DINOV2_NAMES) for ours, theirs in known.items()}
    made = {_renamed(name, names) or name: tensor for name, tensor in tensors.items()}
    for name in [name for name in made if ".attn.query." in name]:
        parts = [name.replace("query", part) for part in QKV]
        if all(part in made for part in parts):
            made[name.replace("query", "qkv")] = torch.cat([made.pop(part) for part in parts])
    return made


def to_huggingface(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """A timm ViT's tensors in Hugging Face's names, and the timm names that have no counterpart there."""
    split: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        parts = zip(QKV, tensor.chunk(3), strict=True) if ".attn.qkv." in name else [("qkv", tensor)]
        split |= {name.replace("qkv", part): piece for part, piece in parts}
    renamed = {name: _renamed(name, HF_NAMES) for name in split}
    made = {theirs: split[ours] for ours, theirs in renamed.items() if theirs}
    return made, [ours for ours, theirs in renamed.items() if not theirs]


def _renamed(name: str, names: dict[str, str]) -> str | None:
    """The other layout's name, or None: `blocks.3.norm1.weight` is `encoder.layer.3.layernorm_before.weight`."""
    number = re.search(r"(?<=\.)\d+(?=\.)", name)
    module = re.sub(r"\.(weight|bias)$", "", name)
    other = names.get(re.sub(r"(?<=\.)\d+(?=\.)", "{}", module, count=1))
    return other and other.format(number and number[0]) + name[len(module) :]


def _convnet_to_timm(name: str) -> str:
    """`layer2.0.conv1.weight` of `encoder.stages.1.layers.0.layer.0.convolution.weight`."""
    stage = re.fullmatch(r"encoder\.stages\.(\d+)\.(layers|downsampling_layer)\.(\d+)\.(.+)", name)
    if stage is None:
        start = next((start for start in STEMS if name.startswith(start)), "")
        return STEMS.get(start, "") + name.removeprefix(start)
    number, kind, block, rest = stage.groups()
    if kind == "downsampling_layer":
        return f"stages.{number}.downsample.{block}.{rest}"
    layer = re.fullmatch(r"(shortcut|layer\.(\d+))\.(convolution|normalization)\.(.+)", rest)
    if layer is None:
        first, dot, last = rest.partition(".")
        return f"stages.{number}.blocks.{block}.{CONVNEXT_BLOCK.get(first, first)}{dot}{last}"
    _, position, what, last = layer.groups()
    convolves = what == "convolution"
    own = f"{'conv' if convolves else 'bn'}{int(position) + 1}" if position else f"downsample.{0 if convolves else 1}"
    return f"layer{int(number) + 1}.{block}.{own}.{last}"


def _shaped(tensor: Tensor, like: Tensor) -> Tensor:
    """The same numbers with axes of length 1 where timm has them."""
    alike = [side for side in tensor.shape if side > 1] == [side for side in like.shape if side > 1]
    return tensor.reshape(like.shape) if alike else tensor
