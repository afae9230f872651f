"""The weights of a plain ViT in timm's names and in those of Hugging Face's ViT files, both ways."""

import re

import torch
from torch import Tensor

OUTSIDE = {
    "cls_token": "embeddings.cls_token",
    "pos_embed": "embeddings.position_embeddings",
    "patch_embed.proj": "embeddings.patch_embeddings.projection",
    "norm": "layernorm",
}
INSIDE = {
    "norm1": "layernorm_before",
    "norm2": "layernorm_after",
    "attn.proj": "attention.output.dense",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
}
"""Names inside a block; timm's `attn.qkv` is apart, because Hugging Face keeps three matrices.

Recent transformers name the modules in memory otherwise, but write and read files in these names."""
QKV = ("query", "key", "value")


def to_huggingface(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """A timm ViT's tensors in Hugging Face's names, and the timm names that have no counterpart there."""
    made: dict[str, Tensor] = {}
    unknown = []
    for name, tensor in tensors.items():
        block = re.fullmatch(r"blocks\.(\d+)\.attn\.qkv\.(weight|bias)", name)
        renamed = _renamed(name, "blocks", "encoder.layer", OUTSIDE, INSIDE)
        if block:
            parts = zip(QKV, tensor.chunk(3), strict=True)
            made |= {f"encoder.layer.{block[1]}.attention.attention.{part}.{block[2]}": t for part, t in parts}
        elif renamed:
            made[renamed] = tensor
        else:
            unknown.append(name)
    return made, unknown


def from_huggingface(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Hugging Face's ViT tensors in timm's names; what has no counterpart keeps its name."""
    outside, inside = ({theirs: ours for ours, theirs in names.items()} for names in (OUTSIDE, INSIDE))
    made: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        part = re.fullmatch(r"encoder\.layer\.(\d+)\.attention\.attention\.(query|key|value)\.(weight|bias)", name)
        if part is None:
            made[_renamed(name, "encoder.layer", "blocks", outside, inside) or name] = tensor
        elif part[2] == "query":
            names = [name.replace(".query.", f".{other}.") for other in QKV]
            if all(other in tensors for other in names):
                made[f"blocks.{part[1]}.attn.qkv.{part[3]}"] = torch.cat([tensors[other] for other in names])
    return made


def is_huggingface(tensors: dict[str, Tensor]) -> bool:
    """Whether the names are Hugging Face's."""
    return any(name.startswith("embeddings.") for name in tensors)


def _renamed(name: str, old: str, new: str, outside: dict[str, str], inside: dict[str, str]) -> str | None:
    """The other layout's name, or None: `blocks.3.norm1.weight` is `encoder.layer.3.layernorm_before.weight`."""
    block = re.fullmatch(rf"{re.escape(old)}\.(\d+)\.(.+)", name)
    stem, names = (block[2], inside) if block else (name, outside)
    module, _, kind = stem.rpartition(".")
    renamed = names.get(stem) or (f"{names[module]}.{kind}" if module in names else None)
    return renamed and (f"{new}.{block[1]}.{renamed}" if block else renamed)
