"""Low-rank adapters (LoRA, Hu et al. 2021) of an encoder, by peft (extra `lora`): put in, and merged at the end."""

import copy
from typing import Any

import torch
from torch import nn

from pmae.errors import optional
from pmae.models import Encoder


def require_peft() -> Any:
    """The library of low-rank adapters (LoRA, Hu et al. 2021), or an error that names the extra."""
    return optional("finetune.method 'lora'", "lora", "peft")


def with_adapters(encoder: Encoder, rank: int, seed: int) -> Encoder:
    """A copy with an adapter at every linear layer, or at every convolution where there is none; the rest is frozen."""
    peft, own = require_peft(), copy.deepcopy(encoder)
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
    """The adapters added to the weights: a plain network again, so that nothing that loads it needs peft."""
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
