"""What works without us, extras, Triton and what some systems lack: one process without all of it is asked in turn."""

import json
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch

from pmae import fast
from pmae.config import Config
from pmae.derive import resolve
from pmae.method import build_method

SCRIPT = """
import json, os, pickle, signal, sys, warnings
from pathlib import Path
folder, found = Path(sys.argv[1]), {}
extras = ["transformers", "onnx", "onnxruntime", "gradio", "ray", "tensorboard", "mlflow", "wandb", "datasets"]
extras += ["webdataset", "pyarrow", "tifffile", "pydicom"]
for name in (*extras, "triton", "fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None
for name in ("fork", "forkpty", "killpg", "sched_getaffinity", "getuid", "O_NOFOLLOW"):
    delattr(os, name)
for name in ("SIGHUP", "SIGUSR1", "SIGUSR2", "SIGKILL", "SIGALRM"):
    delattr(signal, name)

sys.modules["pmae"] = None
import torch
net, x, expected = pickle.loads((folder / "net.pickle").read_bytes())
found["features without us"] = torch.equal(net.forward_features(x), expected)
del sys.modules["pmae"]

import importlib, pkgutil
import numpy as np
import pmae
from pmae.config import *
kernels = ("attention_kernels", "crop_kernels", "flash_kernels", "kernels", "mask_kernels", "adamw")
needed = {f"pmae.fast.{name}" for name in kernels}  # by Triton alone
for module in pkgutil.walk_packages(pmae.__path__, "pmae."):
    if module.name not in needed and not module.name.endswith("__main__"):
        importlib.import_module(module.name)
small = dict(width=16, depth=1, heads=2)
config = Config(
    encoder=EncoderConfig(patch_size=4, **small), decoder=DecoderConfig("small", **small),
    train=TrainConfig(epochs=2, batch_size=8, device="cpu"),
)
images = np.random.default_rng(0).integers(0, 255, (24, 8, 8), dtype=np.uint8)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    run = pmae.pretrain(config, images, folder / "run", quiet=True, figures=False, until=1)
    pmae.pretrain(run.config, images, folder / "run", resume=True, quiet=True, figures=False)
found["epoch"] = run.metrics()[-1]["epoch"]
found["told"] = sorted({str(each.message).split(" cannot")[-1] for each in said if each.category is UserWarning})

from timm.models.vision_transformer import Attention
from pmae import fast
from pmae.fast.attention import attend, available
layer, x, cuda = Attention(32, num_heads=2), torch.randn(1, 5, 32), torch.device("cuda")
found["kernels on a GPU"] = [available(cuda, 5, 16), fast.can_capture(cuda)]
found["attention is timm's"] = torch.equal(attend(layer, x), layer(x))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tiny: Config, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The answers of a process that lacks all of it and is given an accelerated encoder."""
    model = build_method(resolve(tiny, 100, (3, 16, 16))[0], (3, 16, 16))
    fast.accelerate(model, "all")
    net, x = model.encoder.net.eval(), torch.randn(2, 3, 16, 16)
    folder = tmp_path_factory.mktemp("without")
    (folder / "net.pickle").write_bytes(pickle.dumps((net, x, net.forward_features(x))))
    command = [sys.executable, "-c", SCRIPT, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answers: dict[str, Any] = json.loads(done.stdout)
    return answers


def test_an_encoder_unpickles_without_us(found: dict[str, Any]) -> None:
    assert found["features without us"]


def test_without_extras_and_what_other_systems_lack_everything_imports_and_trains(found: dict[str, Any]) -> None:
    assert found["epoch"] == 2
    assert found["told"] == [" be locked: start no second process on it"]


def test_without_triton_attention_is_timms(found: dict[str, Any]) -> None:
    assert found["kernels on a GPU"] == [False, False]
    assert found["attention is timm's"]
