"""Run folders of any shape and type, made without training: exporting reads nothing but the folder."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pmae.config import Config, DataConfig, EncoderConfig
from pmae.files import write_json
from pmae.models import build_encoder
from pmae.runs import Run, create_run

MakeRun = Callable[..., Run]
VIT = EncoderConfig(patch_size=4, width=16, depth=1, heads=2)
LEVELS = {"uint8": (120.0, 40.0), "uint16": (30000.0, 5000.0), "int16": (-100.0, 400.0), "float32": (0.3, 2.0)}


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Makes a run folder with weights drawn at random, positions and norms included."""

    def make(
        shape: tuple[int, int, int] = (3, 16, 16),
        dtype: str = "uint8",
        encoder: EncoderConfig = VIT,
        standardize: str = "channel",
        name: str = "run",
        resize: int | None = None,
        layout: str = "auto",
    ) -> Run:
        generator = torch.Generator().manual_seed(len(name) + sum(shape))
        data = {"name": "toy", "shape": list(shape), "dtype": dtype, "counts": {"train": 64}, "notes": ["a note"]}
        read = DataConfig("/home/somebody/images", layout=layout, standardize=standardize, resize=resize)  # type: ignore[arg-type]
        config = Config(data=read, encoder=encoder)
        run = create_run(tmp_path / name, config, {"data": data})
        mean, std = LEVELS[dtype]
        size = shape if standardize == "pixel" else (shape[0], 1, 1)
        noise = torch.rand(2, *size, generator=generator)
        fitted = {"standardize.mean": mean * (1 + 0.1 * noise[0]), "standardize.std": std * (1 + noise[1])}
        save_file(fitted, run.path / "fitted.safetensors")
        for epoch in (1, 2):
            folder = run.path / "checkpoints" / f"epoch_{epoch:04d}"
            folder.mkdir(parents=True)
            save_file(_weights(encoder, shape, generator), folder / "encoder.safetensors")
            write_json(folder / "state.json", {"epoch": epoch, "step": 4 * epoch, "files": {}})
        return run

    return make


def _weights(
    encoder: EncoderConfig, shape: tuple[int, int, int], generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """A fresh network's weights, moved a little so that no bias is 0 and no gain 1."""
    tensors = build_encoder(encoder, shape).net.state_dict()
    noise = {k: 0.02 * torch.randn(v.shape, generator=generator) for k, v in tensors.items() if v.is_floating_point()}
    return {name: (tensor + noise[name] if name in noise else tensor).contiguous() for name, tensor in tensors.items()}
