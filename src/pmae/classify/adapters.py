"""Low-rank adapters (LoRA, Hu et al. 2021) by the library peft: in before training, merged into the weights after.

What is kept is a plain network again, so nothing that loads it needs peft.
"""

import copy
from typing import Any

import torch
from torch import nn

from pmae.errors import optional
from pmae.models import Encoder


def with_adapters(encoder: Encoder, rank: int, seed: int) -> Encoder:
    """A copy with an adapter at every linear layer, or at every convolution where there is none; the rest is frozen."""
    peft = require_peft()
    own = copy.deepcopy(encoder)
    # Fast kernels read the weights of timm's layers, past the adapters: this runs timm's own forward.
    own.is_vit = False
    kinds = [kind for kind in (nn.Linear, nn.Conv2d) if any(isinstance(m, kind) for m in own.net.modules())]
    names = [name for name, module in own.net.named_modules() if kinds and isinstance(module, kinds[0])]
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(config, own.net)
    return own


def merged(encoder: Encoder, is_vit: bool) -> Encoder:
    """The same encoder with its adapters added to the weights, and gone."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    own = copy.deepcopy(encoder)
    for parent in list(own.net.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, BaseTunerLayer):
                child.merge(safe_merge=True)
                setattr(parent, name, child.get_base_layer())
    own.net.requires_grad_(True)
    own.is_vit = is_vit
    return own


def require_peft() -> Any:
    """The library, or an error that names the extra."""
    return optional("finetune.method 'lora'", "lora", "peft")
