"""Weights of other libraries as they are: their features are those that timm and transformers compute."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from pmae.cli import main

SIDE, CLASSES = 32, ("flat", "steep")
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def draw(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Noisy stripes (N, 32, 32, 3), flat and steep in turn, that no network tells apart without mistakes."""
    rng, labels = np.random.default_rng(seed), np.arange(count) % 2
    rows, columns = np.mgrid[:SIDE, :SIDE]
    waves = np.stack([rows, columns])[labels] * 0.8 + rng.uniform(0, 7, (count, 1, 1))
    pixels = 120 + 20 * np.sin(waves)[..., None] + rng.normal(0, 45, (count, SIDE, SIDE, 3))
    return pixels.clip(0, 255).astype(np.uint8), labels


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights") / "labelled"
    for split, count in (("train", 60), ("test", 30)):
        for number, (image, label) in enumerate(zip(*draw(count, count), strict=True)):
            path = folder / split / CLASSES[label] / f"{number:03d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(path)
    return folder


def timm_vit(folder: Path) -> tuple[list[str], Any, Any]:
    """A ViT as timm keeps it, with a head; its features by timm itself."""
    sizes = {"img_size": SIDE, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
    net = timm.create_model("vit_tiny_patch16_224", num_classes=5, **sizes).eval()
    torch.nn.init.normal_(net.pos_embed)
    save_file(net.state_dict(), folder / "model.safetensors")
    pixels = {"input_size": [3, SIDE, SIDE], "mean": [0.3, 0.4, 0.5], "std": [0.2, 0.25, 0.3]}
    config = {"architecture": "vit_tiny_patch16_224", "model_args": sizes, "pretrained_cfg": pixels}
    (folder / "config.json").write_text(json.dumps(config))
    return [str(folder)], (pixels["mean"], pixels["std"]), lambda x: net.forward_features(x)[:, 1:].mean(1)


def timm_resnet(folder: Path) -> tuple[list[str], Any, Any]:
    """The file of a ResNet alone: timm knows the statistics by the name."""
    net = timm.create_model("resnet10t", num_classes=5).eval()
    save_file(net.state_dict(), folder / "resnet.safetensors")
    words = [str(folder / "resnet.safetensors"), "--encoder", "resnet10t", "--resize", str(SIDE)]
    return words, IMAGENET, lambda x: net.forward_features(x).mean((2, 3))


def hugging_face_vit(folder: Path) -> tuple[list[str], Any, Any]:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    config = transformers.ViTConfig(image_size=SIDE, patch_size=8, layer_norm_eps=1e-6, **sizes)
    net = transformers.ViTForImageClassification(config).eval()
    net.save_pretrained(folder)
    size = {"height": SIDE, "width": SIDE}
    transformers.ViTImageProcessor(size=size, image_mean=[0.5] * 3, image_std=[0.25] * 3).save_pretrained(folder)
    return [str(folder)], ([0.5] * 3, [0.25] * 3), lambda x: net.vit(x).last_hidden_state[:, 1:].mean(1)


@pytest.fixture(params=[timm_vit, timm_resnet, hugging_face_vit], ids=lambda make: make.__name__)
def weights(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[list[str], Any]:
    """The words that name weights on the command line, and their own library's features of uint8 images."""
    torch.manual_seed(0)
    (tmp_path / "weights").mkdir()
    words, (mean, std), forward = request.param(tmp_path / "weights")

    def features(images: np.ndarray) -> np.ndarray:
        x = (torch.from_numpy(images).permute(0, 3, 1, 2) / 255 - torch.tensor(mean)[:, None, None]) / torch.tensor(
            std
        )[:, None, None]
        with torch.no_grad():
            found: np.ndarray = forward(x.float()).numpy()
        return found

    return words, features


def test_embedded_features_are_those_of_the_library(weights: Any, labelled: Path, tmp_path: Path) -> None:
    words, features = weights
    command = ["embed", *words, "--data", str(labelled), "--split", "test", "--labels", "folders", "--device", "cpu"]
    assert main([*command, "-o", str(tmp_path / "x.npz")]) == 0
    found = np.load(tmp_path / "x.npz")
    numbers = [int(Path(name).stem) for name in found["name"]]
    np.testing.assert_allclose(found["features"], features(draw(30, 30)[0][numbers]), rtol=1e-3, atol=1e-4)
