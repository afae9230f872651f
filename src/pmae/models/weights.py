"""The weights that training starts from: those of another run, or a ViT saved by timm or Hugging Face.

Names must agree to the last one; sizes are adapted where that has a meaning, and every adaptation is told.
"""

import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from timm.layers.patch_embed import resample_patch_embed
from timm.layers.pos_embed import resample_abs_pos_embed
from torch import Tensor

from pmae.errors import UserError
from pmae.models import Encoder, build_encoder
from pmae.runs import Run, read_object
from pmae.tensor_files import read_tensors

NOT_ENCODER = r"(head|head_dist|fc|classifier|pooler|decoder)\..*|mask_token|embeddings\.mask_token"
"""What a saved network may hold beside the encoder: classifiers, Hugging Face's pooler, MAE's decoder."""


class Pretrained(NamedTuple):
    """Tensors that fit an encoder's network exactly, and what was done to make them fit, in words."""

    tensors: dict[str, Tensor]
    notes: list[str]


class Origin(NamedTuple):
    """What weights do not say of themselves: the grid of their positions and the number of attention heads."""

    grid: tuple[int, int] | None = None
    heads: int | None = None


def load_weights(path: str, encoder: Encoder) -> Pretrained:
    """The tensors at `path` for an encoder, or an error that names what does not fit."""
    file, origin = _locate(Path(path).expanduser())
    notes = [f"from {file.name} of {file.parent}"]
    tensors = _own_names(read_tensors(file), encoder, notes)
    if encoder.is_vit:
        _check_heads(origin, encoder, notes)
        tensors = _fit_vit(tensors, origin, encoder, notes)
    tensors = _fit_channels(tensors, encoder, notes)
    _require_fit(path, tensors, encoder)
    expected = encoder.net.state_dict()
    return Pretrained({name: tensor.to(expected[name].dtype) for name, tensor in tensors.items()}, notes)


def _locate(path: Path) -> tuple[Path, Origin]:
    """The safetensors file of a run, a folder or itself, and what lies beside it about its network."""
    if (path / "checkpoints").is_dir():
        run = Run(path)
        channels, height, width = run.environment["data"]["shape"]
        with torch.device("meta"):
            encoder = build_encoder(run.config.encoder, (channels, height, width))
        return run.checkpoint() / "encoder.safetensors", _origin_of(encoder.net)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path] if path.is_file() else []
    if len(files) != 1 or files[0].suffix != ".safetensors":
        raise UserError(
            "encoder.weights must be a run folder, a .safetensors file or a folder with one such file, "
            f"got {str(path)!r}" + (f" with {len(files)} of them" if path.is_dir() else "")
        )
    beside = files[0].parent / "config.json"
    return files[0], _origin_in(read_object(beside)) if beside.is_file() else Origin()


def _origin_in(config: dict[str, Any]) -> Origin:
    """What a config.json of Hugging Face or of timm tells."""
    if {"num_attention_heads", "image_size", "patch_size"} <= config.keys():
        image, patch = (_pair(config[key]) for key in ("image_size", "patch_size"))
        return Origin((image[0] // patch[0], image[1] // patch[1]), config["num_attention_heads"])
    if timm.is_model(str(config.get("architecture"))):
        with torch.device("meta"):
            return _origin_of(timm.create_model(config["architecture"], **config.get("model_args") or {}))
    return Origin()


def _origin_of(net: Any) -> Origin:
    if not hasattr(net, "patch_embed") or not hasattr(net, "blocks"):
        return Origin()
    return Origin(tuple(net.patch_embed.grid_size), getattr(net.blocks[0].attn, "num_heads", None))


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def _own_names(tensors: dict[str, Tensor], encoder: Encoder, notes: list[str]) -> dict[str, Tensor]:
    """timm's names, without the parts of a saved network that are not the encoder."""
    tensors = {name.removeprefix("vit."): tensor for name, tensor in tensors.items()}
    extra = {n for n in tensors if re.fullmatch(NOT_ENCODER, n) and n not in encoder.net.state_dict()}
    if extra:
        notes.append(f"left out {', '.join(sorted({name.split('.')[0] for name in extra}))}")
    kept = {name: tensor for name, tensor in tensors.items() if name not in extra}
    return from_huggingface(kept) if is_huggingface(kept) else kept


def _check_heads(origin: Origin, encoder: Encoder, notes: list[str]) -> None:
    """Heads leave no trace in the shapes, so a wrong number would load in silence and compute something else."""
    net: Any = encoder.net
    heads = net.blocks[0].attn.num_heads
    if origin.heads is None:
        notes.append(f"the number of heads is not recorded beside the weights; taken to be {heads}")
    elif origin.heads != heads:
        raise UserError(f"encoder.heads must be those of encoder.weights ({origin.heads}), got {heads}")


def _fit_vit(tensors: dict[str, Tensor], origin: Origin, encoder: Encoder, notes: list[str]) -> dict[str, Tensor]:
    """Patch embedding and positions resampled to the encoder's patch size and grid."""
    net: Any = encoder.net
    patch, new = tensors.get("patch_embed.proj.weight"), net.patch_embed.proj.weight.shape[-2:]
    if patch is not None and patch.ndim == 4 and patch.shape[-2:] != new:
        notes.append(f"patches resampled from {_size(patch.shape[-2:])} to {_size(new)}")
        tensors = {**tensors, "patch_embed.proj.weight": resample_patch_embed(patch.float(), list(new))}
    positions, grid = tensors.get("pos_embed"), tuple(net.patch_embed.grid_size)
    if positions is None or net.pos_embed is None:
        return tensors
    prefix = net.pos_embed.shape[1] - grid[0] * grid[1]
    old = origin.grid or _square(positions.shape[1] - prefix, grid)
    if old != grid:
        notes.append(f"positions resampled from a grid of {_size(old)} to {_size(grid)}")
        resampled = resample_abs_pos_embed(positions, list(grid), list(old), num_prefix_tokens=prefix)
        tensors = {**tensors, "pos_embed": resampled}
    return tensors


def _square(count: int, grid: tuple[int, int]) -> tuple[int, int]:
    """The grid of so many positions when nothing records it: the encoder's own, or a square."""
    if count == grid[0] * grid[1]:
        return grid
    side = math.isqrt(max(count, 0))
    if side * side != count:
        raise UserError(f"encoder.weights must have a config.json beside it: {count} positions make no square grid")
    return side, side


def _fit_channels(tensors: dict[str, Tensor], encoder: Encoder, notes: list[str]) -> dict[str, Tensor]:
    """The layer that sees the image, for another number of channels: summed for one, else repeated in turn and scaled.

    An image whose channels are all alike then gets the answer it had before.
    """
    known = getattr(encoder.net, "pretrained_cfg", None) or {}
    name, new = f"{known.get('first_conv') or 'patch_embed.proj'}.weight", encoder.shape[0]
    weight = tensors.get(name)
    if weight is None or weight.ndim != 4 or weight.shape[1] == new:
        return tensors
    old = weight.shape[1]
    notes.append(f"{name} spread from {old} channels to {new}")
    if new == 1:
        return {**tensors, name: weight.sum(1, keepdim=True)}
    return {**tensors, name: weight[:, torch.arange(new) % old] * (old / new)}


def _require_fit(path: str, tensors: dict[str, Tensor], encoder: Encoder) -> None:
    expected = encoder.net.state_dict()
    missing, unexpected = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    if missing or unexpected:
        words = f"missing {_listed(missing)}; unexpected {_listed(unexpected)}"
        raise UserError(f"encoder.weights {path!r} must have the names of the encoder's weights: {words}")
    for name in sorted(tensors):
        want, got = tuple(expected[name].shape), tuple(tensors[name].shape)
        if want != got:
            raise UserError(f"encoder.weights {path!r} does not fit the encoder: {name} must be {want}, got {got}")


def _listed(names: list[str]) -> str:
    return (", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")) or "nothing"


def _size(pair: Any) -> str:
    return f"{pair[0]}x{pair[1]}"


# The weights of a plain ViT in timm's names and in those of Hugging Face's ViT files, both ways.

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
