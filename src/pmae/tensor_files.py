"""Files of tensors (safetensors): read whole, checked against the checksum they carry, written whole or not at all."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load, save_file
from torch import Tensor

from pmae.errors import UserError
from pmae.files import write_whole


def read_tensors(path: Path, prefix: str = "") -> dict[str, Tensor]:
    """Tensors of a safetensors file whose names start with `prefix`, without it; checked if it carries a checksum."""
    try:
        # Read, not memory-mapped: a mapped file that is cut short later kills the process without a message.
        data = path.read_bytes()
        tensors, stated = load(data), _stated_digest(data)
    # Beside its own error, the format's library lets out whatever an odd header trips over (KeyError, AssertionError).
    except Exception as error:
        raise UserError(f"file must be a readable safetensors file, got {str(path)!r}: {error}") from error
    if stated is not None and stated != tensors_digest(tensors):
        raise UserError(f"file must be as it was written, got {str(path)!r}, whose checksum differs: it is damaged")
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file, whole or not at all, that carries a checksum of its own content."""
    whole = {key: value.contiguous() for key, value in tensors.items()}
    seal = {"blake2b": tensors_digest(whole)}
    write_whole(path, lambda temporary: save_file(whole, temporary, seal))


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """A checksum of names, kinds, shapes and values."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _stated_digest(data: bytes) -> str | None:
    """The checksum in the header of a safetensors file, if it carries one."""
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    stated: str | None = header.get("__metadata__", {}).get("blake2b")
    return stated
