"""What an image of a batch takes while a step is computed on the CPU: foretold by the doctor, and measured."""

import ctypes
import os
import re
from pathlib import Path

import numpy as np
import torch

from pmae import api
from pmae.config import Config, replace
from pmae.derive import resolve
from pmae.doctor import view_bytes
from pmae.method import build_method
from pmae.train.environment import pick_precision
from pmae.train.step import Plain


def first_step(side: int, batch: int, precision: str, out: Path) -> None:
    """Prints both numbers of bytes, and ends its process after the first step of a run."""
    torch.set_num_threads(1)
    shape = (3, side, side)
    given = replace(Config(), train__batch_size=batch, train__epochs=1, objective__contrastive_weight=1.0)
    given = replace(given, encoder__first_patch_size=0, space__name="patch_pca", train__device="cpu")
    given = replace(given, train__precision=precision)
    model = build_method(resolve(given, 2 * batch, shape, gpu=False)[0], shape).train()
    model.precision = pick_precision(precision, torch.device("cpu"))
    print(view_bytes(model, shape, False))
    step = Plain.__call__

    def measured(self: Plain, inputs: object) -> None:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = kilobytes("VmRSS")
        step(self, inputs)  # type: ignore[arg-type]
        print((kilobytes("VmHWM") - before) * 1024 // (2 * batch), flush=True)
        os._exit(0)  # the rest of the run is not what is measured

    Plain.__call__ = measured  # type: ignore[method-assign, assignment]
    images = np.random.default_rng(0).integers(0, 255, (2 * batch, side, side, 3), dtype=np.uint8)
    api.pretrain(given, images=images, out=out, quiet=True, figures=False)


def kilobytes(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])
