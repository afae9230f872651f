"""Everything that is only there for speed, behind one switch: kernels, bf16 weight copies, captured steps.

A model calls plain functions for its blocks, its patch embedding and its masks; `accelerate` puts faster ones in their
place. They read the weights of timm's own modules and change none, and each decides by its own input, so that whatever
they cannot do runs as timm wrote it. Importing this needs neither a GPU nor Triton.
"""

import os
from collections.abc import Callable
from typing import Any, get_args

import torch
from torch import nn

from pmae import masking
from pmae.config_training import Kernels
from pmae.errors import require
from pmae.fast import attention, blocks
from pmae.models import encoder as plain

try:
    from pmae.fast import mask_kernels
except ImportError:  # no Triton: a machine without a GPU, or not Linux
    mask_kernels = None  # type: ignore[assignment]

VARIABLE = "PMAE_KERNELS"  # environment variable that overrides the setting `train.kernels`

Hooks = dict[str, Callable[..., Any]]
PLAIN: Hooks = {
    "run_blocks": plain.run_blocks,
    "embed_patches": plain.embed_patches,
    "hide_components": masking.hide_components,
}
FAST: dict[str, Hooks] = {
    "all": {
        "run_blocks": blocks.run_blocks,
        "embed_patches": blocks.embed_patches,
        "hide_components": mask_kernels.hide_components if mask_kernels else masking.hide_components,
    },
    "attention": {"run_blocks": attention.run_blocks},
    "none": {},
}


def level(setting: str = "all") -> str:
    """The kernels to use: what the environment variable says, or else the setting."""
    chosen = os.environ.get(VARIABLE) or setting
    require(chosen in FAST, VARIABLE, f"one of {', '.join(get_args(Kernels))}", chosen)
    return chosen


def accelerate(model: nn.Module, setting: str | None = None) -> None:
    """Run a model's blocks, patch embedding and masks by the functions of a level.

    Without a setting, what an earlier call chose stays; where none did, it is "all".
    """
    chosen = level(setting or "all")
    for part in model.modules():
        hooks = {name: call for name, call in (PLAIN | FAST[chosen]).items() if name in vars(part)}
        if hooks and (setting or "kernels" not in vars(part)):
            vars(part).update(hooks, kernels=chosen)


def can_capture(device: torch.device, setting: str = "all") -> bool:
    """Whether steps may be compiled and captured in a CUDA graph: all kernels are on, on a GPU that has them."""
    return level(setting) == "all" and device.type == "cuda" and mask_kernels is not None
