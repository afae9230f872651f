"""The state of fine-tuning on disk after each epoch: tensors in safetensors, the rest in JSON, never half-written."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pmae.errors import UserError

STATE = "finetune.json"


def save(
    folder: Path,
    identity: dict[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    losses: list[float],
    average: nn.Module | None = None,
) -> None:
    """Write the state after `len(losses)` epochs; the JSON file names the tensors and is replaced last."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = f"finetune-{len(losses):05d}.safetensors"
    half = folder / f"{tensors}.part"
    save_file(_tensors(model, optimizer, average), half)
    os.replace(half, folder / tensors)
    half = folder / f"{STATE}.part"
    half.write_text(json.dumps({"tensors": tensors, "losses": losses, "identity": identity}, indent=1))
    os.replace(half, folder / STATE)
    for old in folder.glob("finetune-*.safetensors"):
        if old.name != tensors:
            old.unlink()


def restore(
    folder: Path,
    identity: dict[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    average: nn.Module | None = None,
) -> list[float]:
    """Load what the folder holds into all three and return the losses so far; none if it holds nothing."""
    path = folder / STATE
    if not path.exists():
        return []
    try:
        state = json.loads(path.read_text())
        tensors = load_file(folder / state["tensors"])
    except (json.JSONDecodeError, KeyError, OSError, SafetensorError) as error:
        raise UserError(f"folder must hold a readable fine-tuning state, got {folder}: {error}") from error
    if state["identity"] != json.loads(json.dumps(identity)):
        raise UserError(f"folder must hold fine-tuning with the same settings, data and seed, got another in {folder}")
    model.load_state_dict(_below("model.", tensors))
    if average:
        average.load_state_dict(_below("average.", tensors))
    _restore_moments(model, optimizer, tensors)
    return list(state["losses"])


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer, average: nn.Module | None) -> dict[str, Tensor]:
    found = {f"model.{name}": tensor.contiguous() for name, tensor in model.state_dict().items()}
    if average:
        found |= {f"average.{name}": tensor.contiguous() for name, tensor in average.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"optimizer.{key}.{name}"] = value.contiguous()
    return found


def _restore_moments(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    parameters = dict(model.named_parameters())
    for key, tensor in tensors.items():
        if key.startswith("optimizer."):
            _, slot, name = key.split(".", 2)
            parameter = parameters[name]
            # Step counters stay where AdamW put them; moments live beside their parameter.
            optimizer.state[parameter][slot] = (
                tensor.to(parameter.device) if tensor.ndim or _fused(optimizer) else tensor
            )


def _fused(optimizer: torch.optim.Optimizer) -> bool:
    return bool(optimizer.defaults.get("fused"))
