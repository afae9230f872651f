"""Pretrained weights of a run, timm or Hugging Face: names must agree, sizes are adapted, and it is told."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from timm.layers.patch_embed import resample_patch_embed
from timm.layers.pos_embed import resample_abs_pos_embed
from torch import Tensor

from pmae.errors import UserError, require
from pmae.files import read_object, read_tensors, read_torch
from pmae.models.encoder import Encoder, build_encoder
from pmae.models.huggingface import require_usual_activation, to_timm
from pmae.remote import local
from pmae.runs import Run

SUFFIXES = (".safetensors", ".pth", ".pt", ".bin")
NOT_ENCODER = r"(head|head_dist|fc|classifier|pooler)\..*|decoder[._].*|mask_token|embeddings\.mask_token"
"""What a saved network may hold beside the encoder: classifiers, Hugging Face's pooler, MAE's decoder."""
PREFIX = r"^(vit|dinov2|dinov2_with_registers|resnet|convnext|convnextv2)\."
"""What Hugging Face puts before an encoder's names where a head stands beside it."""
MODEL_ARGS = {
    *("img_size", "patch_size", "in_chans", "num_classes", "embed_dim", "depth", "num_heads", "mlp_ratio", "qkv_bias"),
    *("class_token", "reg_tokens", "no_embed_class", "pre_norm", "init_values", "dynamic_img_size"),
    *("drop_rate", "drop_path_rate", "global_pool", "fc_norm"),
}
"""The arguments that a timm folder's config.json may name. Others can make timm fetch and write files
(`pretrained`, `pretrained_cfg`, `cache_dir`), so they are refused by name."""
LARGEST = 1 << 16  # of the numbers in a config.json


class Pretrained(NamedTuple):
    """Tensors that fit an encoder's network exactly, and what was done to make them fit, in words."""

    tensors: dict[str, Tensor]
    notes: list[str]
    decoder: Mapping[str, Tensor] = {}
    """What a run's decoder and heads have for those of this one."""


class Origin(NamedTuple):
    """What weights do not say of themselves: the grid of their positions and the number of attention heads."""

    grid: tuple[int, int] | None = None
    heads: int | None = None


def weights_in(place: Path) -> list[Path]:
    """The file of weights that a path is, or those that a folder has: safetensors before what `torch.save` wrote."""
    if place.is_file():
        return [place] if place.suffix in SUFFIXES else []
    kinds = (sorted(place.glob(name)) for name in ("*.safetensors", "*.pth", "*.pt", "pytorch_model.bin"))
    return next((found for found in kinds if found), [])


def load_weights(path: str, encoder: Encoder) -> Pretrained:
    """The tensors at `path` for an encoder, or an error that names what does not fit."""
    file, origin = _locate(local(path))
    notes = [f"from {file.name} of {file.parent}"]
    tensors = read_tensors(file) if file.suffix == ".safetensors" else read_torch(file)
    try:
        tensors = _own_names(tensors, encoder, notes)
        if encoder.is_vit:
            _check_heads(origin, encoder, notes)
            _check_mlp(tensors, encoder)
            tensors = _fit_vit(tensors, origin, encoder, notes)
        tensors = _fit_channels(tensors, encoder, notes)
    except UserError:
        raise
    # Tensors of odd shapes and kinds trip torch and timm in many ways.
    except (RuntimeError, TypeError, ValueError, IndexError, ArithmeticError) as error:
        raise UserError(f"encoder.weights {path!r} must be weights of such a network, but {error}") from error
    expected = encoder.net.state_dict()
    require_fit(f"encoder.weights {path!r} does not fit the encoder", expected, tensors)
    return Pretrained({name: tensor.to(expected[name].dtype) for name, tensor in tensors.items()}, notes)


def require_fit(said: str, expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors whose names or shapes are not those expected, with the first that are not."""
    wrong = []
    for name in sorted(expected.keys() | tensors.keys()):
        want, got = (tuple(each[name].shape) if name in each else "nothing" for each in (expected, tensors))
        wrong += [f"{name} must be {want}, got {got}"] if want != got else []
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise UserError(f"{said}: {'; '.join(wrong[:3])}{more}")


def require_weights(path: str) -> None:
    """Refuse what are no weights by the names of the files, none of which is read."""
    _locate(local(path))


def _locate(path: Path) -> tuple[Path, Origin]:
    """The file of weights of a run, a folder or itself, and what lies beside it about its network."""
    if (path / "checkpoints").is_dir():
        run = Run(path)
        with torch.device("meta"):
            encoder = build_encoder(run.config.encoder, run.shape)
        return run.checkpoint() / "encoder.safetensors", _origin_of(encoder.net)
    files = weights_in(path)
    if len(files) != 1:
        rule = "a run folder, a .safetensors, .pth, .pt or .bin file or a folder with one such file"
        found = f" with {len(files)} of them" if path.is_dir() else ""
        raise UserError(f"encoder.weights must be {rule}, got {str(path)!r}{found}")
    return files[0], _origin_in(config_beside(files[0].parent), str(files[0].parent / "config.json"))


def config_beside(folder: Path) -> dict[str, Any]:
    """What timm's or Hugging Face's config.json in a folder of weights says; empty where there is none."""
    file = folder / "config.json"
    config = read_object(file) if file.is_file() else {}
    require_usual_activation(config, str(file))
    return config


def _origin_in(config: dict[str, Any], where: str) -> Origin:
    if {"num_attention_heads", "image_size", "patch_size"} <= config.keys():
        return _recorded(config["image_size"], config["patch_size"], config["num_attention_heads"], where)
    if not timm.is_model(str(config.get("architecture"))):
        return Origin()
    given = config.get("model_args") or {}
    require(isinstance(given, dict), f"model_args in {where}", "an object", given)
    for name in given:
        if name not in MODEL_ARGS:
            raise UserError(f"model_args in {where} must be shapes ({', '.join(sorted(MODEL_ARGS))}), got {name!r}")
    # As timm defines it: the file's own arguments are never handed on.
    with torch.device("meta"):
        net: Any = timm.create_model(str(config["architecture"]), pretrained=False)
    known = _origin_of(net)
    if known.grid is None:
        return known
    image, patch = (given.get(name, getattr(net.patch_embed, name)) for name in ("img_size", "patch_size"))
    return _recorded(image, patch, given.get("num_heads", known.heads), where)


def _origin_of(net: Any) -> Origin:
    if not hasattr(net, "patch_embed") or not hasattr(net, "blocks"):
        return Origin()
    return Origin(tuple(net.patch_embed.grid_size), getattr(net.blocks[0].attn, "num_heads", None))


def _recorded(image: Any, patch: Any, heads: Any, where: str) -> Origin:
    """The grid and the heads that a file states, its values checked."""
    pairs = (side if isinstance(side, list | tuple) and len(side) == 2 else (side, side) for side in (image, patch))
    (height, width), (rows, columns) = pairs
    for name, value in {"img_size": (height, width), "patch_size": (rows, columns), "num_heads": (heads,)}.items():
        whole = all(type(number) is int and 0 < number <= LARGEST for number in value)
        require(whole or value == (None,), f"{name} in {where}", f"whole, from 1 to {LARGEST:,}", value)
    require(rows <= height and columns <= width, f"patch_size in {where}", f"at most {height}x{width}", patch)
    require(rows == columns or height == 1, f"patch_size in {where}", "square, as patches of images are here", patch)
    return Origin((height // rows, width // columns), heads)


def _own_names(tensors: dict[str, Tensor], encoder: Encoder, notes: list[str]) -> dict[str, Tensor]:
    tensors = {re.sub(PREFIX, "", name): t for name, t in tensors.items()}
    extra = {n for n in tensors if re.fullmatch(NOT_ENCODER, n) and n not in encoder.net.state_dict()}
    if extra:
        notes.append(f"left out {', '.join(sorted({name.split('.')[0] for name in extra}))}")
    kept = {name: tensor for name, tensor in tensors.items() if name not in extra}
    return to_timm(kept, encoder.net.state_dict())


def _check_heads(origin: Origin, encoder: Encoder, notes: list[str]) -> None:
    """Heads leave no trace in the shapes, so a wrong number would load in silence and compute something else."""
    net: Any = encoder.net
    heads = net.blocks[0].attn.num_heads
    if origin.heads is None:
        notes.append(f"the number of heads is not recorded beside the weights; taken to be {heads}")
    elif origin.heads != heads:
        raise UserError(f"encoder.heads must be those of encoder.weights ({origin.heads}), got {heads}")


def _check_mlp(tensors: dict[str, Tensor], encoder: Encoder) -> None:
    """Where the MLPs alone are of another width, no setting helps: say so, instead of listing shapes."""
    name = "blocks.0.mlp.fc1.weight"
    shapes = [tuple(each[name].shape) for each in (encoder.net.state_dict(), tensors) if name in each]
    if len(shapes) == 2 and shapes[0] != shapes[1] and shapes[0][1:] == shapes[1][1:]:
        ours, given = (rows / width for rows, width in shapes)
        rule = f"MLPs {ours:g} times as wide as the tokens, unless encoder names a timm network that has theirs"
        raise UserError(f"encoder.weights must have {rule}, got {given:g} times as wide")


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
    square = math.isqrt(positions.shape[1] - 1)
    patches = origin.grid[0] * origin.grid[1] if origin.grid else square * square
    if prefix == 0 and "cls_token" in tensors and positions.shape[1] == patches + 1:
        # DINOv2 keeps the position of [CLS] apart, timm adds it to the token where registers have none.
        tensors = {**tensors, "cls_token": tensors["cls_token"] + positions[:, :1]}
        positions = tensors["pos_embed"] = positions[:, 1:]
    count = positions.shape[1] - prefix
    # When nothing records the grid of so many positions: the encoder's own, or a square.
    side = math.isqrt(max(count, 0))
    old = origin.grid or (grid if count == grid[0] * grid[1] else (side, side))
    if old[0] * old[1] != count:
        rule = f"of {_size(old)}, as recorded beside it" if origin.grid else "that is square, or config.json beside it"
        raise UserError(f"encoder.weights must have a grid {rule}, got {count} positions")
    if old != grid:
        notes.append(f"positions resampled from a grid of {_size(old)} to {_size(grid)}")
        resampled = resample_abs_pos_embed(positions, list(grid), list(old), num_prefix_tokens=prefix)
        tensors = {**tensors, "pos_embed": resampled}
    return tensors


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


def _size(pair: Any) -> str:
    return f"{pair[0]}x{pair[1]}"
