"""ResNets and ConvNeXts that Hugging Face wrote: which timm network they are, and their tensors in timm's names."""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

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


def convnet_name(config: Mapping[str, Any]) -> str | None:
    """timm's name of the network that a Hugging Face config.json describes; None for any other."""
    depths, widths = (tuple(config.get(key) or ()) for key in ("depths", "hidden_sizes"))
    if config.get("model_type") == "resnet":
        # Strides elsewhere leave no trace in the shapes and would load in silence.
        moved = config.get("downsample_in_bottleneck") or config.get("downsample_in_first_stage")
        return None if moved else RESNETS.get((str(config.get("layer_type")), depths))
    return CONVNEXTS.get((str(config.get("model_type")), depths, widths[0])) if widths else None


def from_huggingface_convnet(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors in timm's names; where timm has a linear layer as a 1x1 convolution, in its shape as well."""
    named = {timm_name(name): tensor for name, tensor in tensors.items()}
    return {name: _shaped(tensor, expected[name]) if name in expected else tensor for name, tensor in named.items()}


def timm_name(name: str) -> str:
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
