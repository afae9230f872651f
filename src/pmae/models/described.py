"""What the files beside weights say of their network and of the pixels it saw, in timm's or Hugging Face's words."""

import functools
import math
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, NotRequired, TypedDict, get_args

import timm
from timm.data.constants import DEFAULT_CROP_PCT

from pmae.config import CropMode, EncoderConfig, Interpolation, Layout
from pmae.errors import UserError, require
from pmae.files import read_object
from pmae.models.encoder import is_vit_name
from pmae.models.huggingface import encoder_in
from pmae.models.weights import config_beside
from pmae.remote import local
from pmae.runs import Run
from pmae.validation import Count, Positive, Proportion, coerced

OURS = "preprocessing.json"
"""What `pmae export` says of the images, in full."""
SIDE = 224  # of images, where nothing tells it
KEPT_WHOLE = 384  # the side from which on Hugging Face's ConvNeXt squashes images instead of cropping them
BILINEAR = 2  # Pillow's number of it, which Hugging Face writes
SIZES = {"width": "embed_dim", "depth": "depth", "heads": "num_heads"}
BYTES = 1 / 255
"""What pixels are multiplied with before their statistics are taken, where nothing says otherwise."""


class Reading(NamedTuple):
    """How files and arrays became images, as in `DataConfig`."""

    crop_mode: CropMode = "center"
    crop_pct: float = 1.0
    interpolation: Interpolation = "bicubic"
    layout: Layout = "auto"


class Described(NamedTuple):
    """The encoder's settings, and mean and standard deviation per channel of pixels times `scale`, where recorded."""

    encoder: EncoderConfig | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    scale: float = BYTES
    shape: tuple[int, int, int] = (3, SIDE, SIDE)
    """Channels, height and width of the images that the network saw last."""
    reading: Reading = Reading()
    dtype: str = "uint8"
    told: str = "recorded"
    """Where mean and standard deviation are from."""


class Preprocessing(TypedDict):
    """What preprocessing.json says of the images, as far as an encoder needs it; statistics are of scaled pixels."""

    channels: Count
    height: Count
    width: Count
    dtype: NotRequired[str]
    scale: Positive
    crop_mode: NotRequired[CropMode]
    crop_pct: NotRequired[Proportion]
    interpolation: NotRequired[Interpolation]
    layout: NotRequired[Layout]
    mean: NotRequired[list[float]]
    std: NotRequired[list[Positive]]


def described_weights(path: str, name: str | None = None) -> Described:
    """What is recorded beside the weights at `path`; `name` is the timm network where nothing is, or if it is wrong."""
    place = local(path)
    if (place / "checkpoints").is_dir():
        return Described(Run(place).config.encoder)
    folder = place if place.is_dir() else place.parent
    config = config_beside(folder)
    found = _of_timm(config) if "architecture" in config else _of_huggingface(config, folder)
    if name is not None and found.encoder is None:
        known = _of_timm({"architecture": name})
        # What is recorded of the pixels counts before what timm knows by the name.
        found = known if found.mean is None else found._replace(encoder=known.encoder)
    elif name is not None and found.encoder is not None:
        found = found._replace(encoder=EncoderConfig(name, patch_size=found.encoder.patch_size))
    return _as_exported(found, folder / OURS) if (folder / OURS).is_file() else found


def require_encoder(described: Described, path: str) -> EncoderConfig:
    """The settings that build the network, which must be known."""
    if described.encoder is None:
        kinds = "timm's, or Hugging Face's of a ViT, DINOv2, ResNet or ConvNeXt"
        known = f"a config.json beside them that tells their network ({kinds})"
        raise UserError(f"weights {path!r} must have {known}, or encoder must name the timm network")
    return described.encoder


def adopted(encoder: EncoderConfig, shape: tuple[int, int, int]) -> EncoderConfig:
    """The settings of the network that `encoder.weights` belongs to, where no other was named: at most its patches.

    A patch that does not divide the images is left open: weights are resampled to the one that is given or derived.
    """
    weights, asked = encoder.weights, encoder.patch_size
    if weights is None or encoder != EncoderConfig(weights=weights, patch_size=asked):
        return encoder
    found = described_weights(weights).encoder or encoder
    patch = asked or found.patch_size
    fits = patch is None or (shape[2] % patch == 0 and (shape[1] == 1 or shape[1] % patch == 0))
    return replace(found, weights=weights, patch_size=patch if fits or asked else None)


def pixels_note(path: str) -> list[str]:
    """How the pixels that the weights learned from were standardized, where that is recorded."""
    known = described_weights(path)
    if known.mean is None or known.std is None or known.told != "recorded":
        return []
    mean, std = (", ".join(f"{value / known.scale:.4g}" for value in values) for values in (known.mean, known.std))
    return [f"its pixels had mean {mean} and standard deviation {std}"]


def _of_timm(config: dict[str, Any]) -> Described:
    name, given = str(config["architecture"]), config.get("model_args") or {}
    pixels = config.get("pretrained_cfg") or {}
    require(isinstance(given, dict) and isinstance(pixels, dict), "config.json", "objects of settings", config)
    usual_sizes = dict(_vit_sizes(name))
    patch = given.get("patch_size", usual_sizes.pop("patch_size", None))
    patch = patch[-1] if isinstance(patch, list) else patch
    sizes = {ours: given[theirs] for ours, theirs in SIZES.items() if theirs in given}
    sizes = {**usual_sizes, **sizes} if sizes else {}
    encoder = EncoderConfig("vit_tiny" if sizes else name, patch_size=patch, **sizes)
    # What a file leaves out, timm knows by the name.
    usual = timm.get_pretrained_cfg(name)
    asked = {"input_size": (given.get("in_chans", 3), *_sides(given["img_size"]))} if "img_size" in given else {}
    known = {**(usual.to_dict() if usual else {}), **asked, **pixels}
    mean, std, shape = _numbers(known.get("mean")), _numbers(known.get("std")), _shape(known.get("input_size"))
    told = "recorded" if "mean" in pixels else "timm's by name"
    return Described(encoder, mean, std, BYTES, shape, _timm_reading(known), told=told)


def _timm_reading(known: dict[str, Any]) -> Reading:
    """How timm's own transform reads files; what neither file nor name tells is timm's default."""
    mode: CropMode = "squash" if known.get("crop_mode") == "squash" else "center"
    share = coerced(known.get("crop_pct") or DEFAULT_CROP_PCT, Proportion, "crop_pct in config.json")
    reading = Reading(mode, share, "bilinear" if known.get("interpolation") == "bilinear" else "bicubic")
    for name, choices in (("crop_mode", CropMode), ("interpolation", Interpolation)):
        # "border" pads files to squares with the mean colour; of timm's networks those of one name were trained so.
        if (theirs := known.get(name)) and theirs not in get_args(choices):
            instead = f"files read as for these weights are read with {getattr(reading, name)!r}"
            warnings.warn(f"{name} {theirs!r} of the weights is not known here: {instead}", stacklevel=2)
    return reading


@functools.cache  # one command asks a dozen times, and timm builds the network each time
def _vit_sizes(name: str) -> Mapping[str, int]:
    """Patch, width, depth and heads that a timm ViT has by its name; nothing of other networks."""
    if not is_vit_name(name):
        return {}
    import torch

    with torch.device("meta"):
        net: Any = timm.create_model(name, pretrained=False)
    sizes = {"width": net.embed_dim, "depth": len(net.blocks), "heads": net.blocks[0].attn.num_heads}
    return {"patch_size": net.patch_embed.patch_size[-1], **sizes}


def _of_huggingface(config: dict[str, Any], folder: Path) -> Described:
    beside = folder / "preprocessor_config.json"
    pixels = read_object(beside) if beside.is_file() else {}
    scale = pixels.get("rescale_factor", BYTES) if pixels.get("do_rescale", True) else 1.0
    scale = coerced(scale, Positive, f"rescale_factor in {beside}")
    mean, std = _numbers(pixels.get("image_mean")), _numbers(pixels.get("image_std"))
    crops = pixels.get("do_center_crop", "crop_size" in pixels)
    size = pixels.get("crop_size" if crops else "size")
    shape = _shape((config.get("num_channels", 3), *_sides(size or config.get("image_size"))))
    if not pixels.get("do_normalize", True):  # the two are written all the same
        mean, std = (0.0,) * shape[0], (1.0,) * shape[0]
    return Described(encoder_in(config), mean, std, scale, shape, _huggingface_reading(pixels, bool(crops), shape[1]))


def _huggingface_reading(pixels: dict[str, Any], crops: bool, side: int) -> Reading:
    """How an image processor reads files that become squares of this side."""
    size, share = pixels.get("size"), pixels.get("crop_pct")
    how: Interpolation = "bilinear" if pixels.get("resample") == BILINEAR else "bicubic"
    if share is not None:  # ConvNeXt's: from this side on it keeps all of an image
        share = coerced(share, Proportion, "crop_pct in preprocessor_config.json")
        return Reading("center", share, how) if side < KEPT_WHOLE else Reading("squash", 1.0, how)
    # A size that is not of the short side is one that both sides are resized to.
    by_edge = "shortest_edge" in size if isinstance(size, dict) else crops or size is None
    whole = _sides(size)[0] if crops else side
    fits = type(whole) is int and whole >= side
    return Reading("center" if by_edge else "squash", _share(side, whole) if fits else 1.0, how)


def _share(side: int, whole: int) -> float:
    """`crop_pct` of a crop of `side` from `whole`: the largest by which floor(side / crop_pct) is `whole` again."""
    share = side / whole
    return share if math.floor(side / share) == whole else math.nextafter(share, 0)


def _as_exported(found: Described, file: Path) -> Described:
    """The same with what `pmae export` wrote beside it."""
    told = read_object(file)
    own = {name: told[name] for name in Preprocessing.__annotations__ if name in told}
    known: dict[str, Any] = coerced(own, Preprocessing, str(file))
    require("mean" in known, "run", "an encoder that was exported for timm or Hugging Face", str(file.parent))
    shape = known["channels"], known["height"], known["width"]
    mean, std, dtype = tuple(known["mean"]), tuple(known["std"]), known.get("dtype", "uint8")
    # Files were squashed before there was another way.
    told_of = {"crop_mode": "squash"} | {name: known[name] for name in Reading._fields if name in known}
    return Described(found.encoder, mean, std, known["scale"], shape, Reading(**told_of), dtype)


def _sides(size: Any) -> tuple[Any, Any]:
    """Height and width of Hugging Face's ways to write a size."""
    if isinstance(size, dict):
        edge = size.get("shortest_edge")
        return size.get("height", edge), size.get("width", edge)
    return (size[0], size[1]) if isinstance(size, list | tuple) and len(size) == 2 else (size, size)


def _shape(values: Any) -> tuple[int, int, int]:
    """Channels, height and width that a file states; those of most networks where it does not."""
    whole = isinstance(values, list | tuple) and len(values) == 3 and all(type(n) is int and n > 0 for n in values)
    return (values[0], values[1], values[2]) if whole else Described().shape


def _numbers(values: Any) -> tuple[float, ...] | None:
    fine = isinstance(values, list | tuple) and all(isinstance(value, int | float) for value in values)
    return tuple(map(float, values)) if fine else None
