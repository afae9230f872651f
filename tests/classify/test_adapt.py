"""`pmae pretrain --init`: other libraries' weights, slower and frozen layers, and k-NN before and after."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from pmae.config import Config, EncoderConfig, OptimConfig
from pmae.config_file import of_older_versions, to_dict
from pmae.derive import resolve
from pmae.models import build_encoder
from pmae.models.described import adopted, pixels_note
from pmae.models.huggingface import convnet_name
from pmae.models.weights import load_weights
from pmae.pretraining import add_adaptation
from pmae.runs import Run
from pmae.train.step import rate_scales

from .conftest import make_run, stripes

Command = Callable[..., tuple[int, str]]


class Model(torch.nn.Module):
    """What the rates are asked of: a ViT of two blocks, and a decoder."""

    def __init__(self, name: str = "vit_tiny") -> None:
        super().__init__()
        sizes: dict[str, Any] = {"patch_size": 4, "width": 8, "depth": 2, "heads": 2} if name == "vit_tiny" else {}
        self.encoder = build_encoder(EncoderConfig(name, **sizes), (3, 8, 8))
        self.decoder = torch.nn.Linear(8, 8)


def test_rates_fall_with_depth_and_frozen_blocks_have_none() -> None:
    found = rate_scales(Model(), OptimConfig(encoder_rate=0.1, layer_decay=0.5))
    expected = {
        "decoder.weight": 1.0,
        "encoder.net.norm.weight": 0.1,
        "encoder.net.blocks.1.attn.qkv.weight": 0.05,
        "encoder.net.blocks.0.attn.qkv.weight": 0.025,
        "encoder.net.patch_embed.proj.weight": 0.0125,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    frozen = rate_scales(Model(), OptimConfig(frozen_blocks=1))
    assert {name for name, scale in frozen.items() if not scale} == {
        name for name in frozen if "blocks.0" in name or "patch_embed" in name or "token" in name or "pos_embed" in name
    }
    with pytest.raises(ValueError, match=r"frozen_blocks must be at most the encoder's blocks \(2\), got 3"):
        rate_scales(Model(), OptimConfig(frozen_blocks=3))
    with pytest.raises(ValueError, match="no ViT"):
        rate_scales(Model("resnet10t"), OptimConfig(frozen_blocks=1))


def test_given_weights_have_small_rates_and_old_runs_keep_theirs() -> None:
    plain, reasons = resolve(Config(encoder=EncoderConfig(patch_size=4)), 500, (3, 16, 16))
    adapting, _ = resolve(Config(encoder=EncoderConfig(patch_size=4, weights="w")), 500, (3, 16, 16))
    assert (plain.optim.encoder_rate, adapting.optim.encoder_rate, adapting.optim.layer_decay) == (None, 0.1, 0.75)
    assert (adapting.optim.warmup_epochs or 0) > (plain.optim.warmup_epochs or 0)
    assert not any("encoder_rate" in name for name in reasons)
    old = to_dict(adapting)
    del old["optim"]["encoder_rate"], old["optim"]["layer_decay"], old["optim"]["frozen_blocks"]
    assert of_older_versions(old)["optim"]["encoder_rate"] == 1.0


@pytest.fixture
def labels(tmp_path: Path) -> Path:
    numbers = np.arange(90) % 3
    np.savez(tmp_path / "d.npz", images=stripes(numbers), labels=numbers)
    return tmp_path / "d.npz"


@pytest.mark.usefixtures("no_figures")
def test_a_run_is_adapted_and_says_whether_it_helped(
    run: Run, labels: Path, tmp_path: Path, command: Command, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "pmae")
    out = tmp_path / "adapted"
    short = ("--epochs", 2, "--decoder.depth", 1, "--decoder.width", 16, "--decoder.heads", 2, "--device", "cpu")
    code, said = command(
        "pretrain", "--init", run.path, "--data", labels, "--out", out, "--optim.frozen-blocks", 1, *short
    )
    assert code == 0, said
    adapted = Run(out)
    assert replace(adapted.config.encoder, weights=None) == run.config.encoder
    before, after = (load_file(r.checkpoint() / "encoder.safetensors") for r in (run, adapted))
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert {name for name in before if "blocks.0" in name or "patch_embed" in name} <= same
    assert "blocks.1.attn.qkv.weight" not in same
    probes = [line for line in adapted.metrics() if "knn" in line]
    told = json.loads((out / "results.json").read_text())["adaptation"]
    assert (probes[0]["step"], told["before"]["knn"], told["after"]["knn"]) == (0, probes[0]["knn"], probes[-1]["knn"])
    assert f"k-NN {probes[0]['knn']:.1%} before, {probes[-1]['knn']:.1%} after: adapting " in caplog.text


@pytest.mark.usefixtures("no_figures")
def test_a_run_goes_on_with_smaller_patches_at_the_full_rate(labels: Path, tmp_path: Path, command: Command) -> None:
    sizes = [f"--{part}.{size}" for part in ("encoder", "decoder") for size in ("width", "depth", "heads")]
    small = [word for size, number in zip(sizes, (16, 2, 2) * 2, strict=True) for word in (size, number)]
    first, rates, said = tmp_path / "first", {}, {}
    code, told = command("pretrain", "--data", labels, "--patch-size", 8, "--epochs", 1, *small, "--out", first)
    assert code == 0, told
    again = ("pretrain", "--config", first / "config.json", "--init", first, "--patch-size", 4)
    for name, images in {"same": labels, "other": other_images(tmp_path)}.items():
        code, said[name] = command(*again, "--data", images, "--out", tmp_path / name)
        assert code == 0, said[name]
        rates[name] = Run(tmp_path / name).config.optim
    assert [(rate.encoder_rate, rate.layer_decay) for rate in rates.values()] == [(1.0, 1.0), (0.1, 0.75)]
    notes = Run(tmp_path / "same").environment["start"]
    assert "patches resampled from 8x8 to 4x4" in notes
    # The network is that of the weights, where nothing but its patches is said.
    asked = adopted(EncoderConfig(weights=str(first), patch_size=4), (3, 16, 16))
    assert (asked.width, asked.depth, asked.heads, asked.patch_size) == (16, 2, 2, 4)


def other_images(folder: Path) -> Path:
    numbers = np.arange(90) % 3
    np.savez(folder / "other.npz", images=255 - stripes(numbers), labels=numbers)
    return folder / "other.npz"


@pytest.mark.parametrize(
    ("after", "verdict"), [(0.75, "seems to help"), (0.25, "seems not to help"), (0.5, "made no difference")]
)
def test_whether_adapting_helped_is_said(after: float, verdict: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    lines = [{"step": step, "epoch": step, "knn": knn, "linear": 0.5} for step, knn in ((0, 0.5), (9, after))]
    (run.path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    told = add_adaptation(run)
    assert told is not None
    assert f"k-NN 50.0% before, {after:.1%} after: adapting {verdict}" in told


@pytest.mark.parametrize("registers", [0, 4])
def test_dinov2_of_hugging_face_is_timms(registers: int, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = {"hidden_size": 384, "num_attention_heads": 6, "num_hidden_layers": 12, "image_size": 28}
    kind = "Dinov2WithRegisters" if registers else "Dinov2"
    more = {"num_register_tokens": registers} if registers else {}
    config = getattr(transformers, f"{kind}Config")(patch_size=14, **sizes, **more)
    theirs = getattr(transformers, f"{kind}Model")(config)
    theirs.eval().save_pretrained(tmp_path / "w")
    transformers.BitImageProcessor(image_mean=[0.5, 0.4, 0.3], image_std=[0.2] * 3).save_pretrained(tmp_path / "w")
    config = adopted(EncoderConfig(weights=str(tmp_path / "w")), (3, 28, 28))
    assert config.name == f"vit_small_patch14{'_reg4' if registers else ''}_dinov2"
    encoder = build_encoder(config, (3, 28, 28)).eval()
    pretrained = load_weights(str(tmp_path / "w"), encoder)
    encoder.net.load_state_dict(pretrained.tensors)
    x = torch.randn(2, 3, 28, 28)
    with torch.no_grad():
        tokens, found = theirs(x).last_hidden_state, encoder.features(x)
    torch.testing.assert_close(found["cls"], tokens[:, 0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found["mean"], tokens[:, 1 + registers :].mean(1), atol=1e-4, rtol=1e-4)
    assert pixels_note(str(tmp_path / "w")) == [
        "its pixels had mean 127.5, 102, 76.5 and standard deviation 51, 51, 51"
    ]


CONVNETS: dict[str, tuple[str, dict[str, Any]]] = {
    "resnet18": ("ResNet", {"layer_type": "basic", "depths": [2, 2, 2, 2], "hidden_sizes": [64, 128, 256, 512]}),
    "resnet26": ("ResNet", {"depths": [2, 2, 2, 2]}),
    "convnext_tiny": ("ConvNext", {}),
    "convnextv2_atto": ("ConvNextV2", {"depths": [2, 2, 6, 2], "hidden_sizes": [40, 80, 160, 320]}),
}


@pytest.mark.parametrize("name", CONVNETS)
def test_convolutional_networks_of_hugging_face_are_timms(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    kind, sizes = CONVNETS[name]
    torch.manual_seed(0)
    theirs = getattr(transformers, f"{kind}ForImageClassification")(
        getattr(transformers, f"{kind}Config")(**sizes)
    ).eval()
    # Nothing is at its default: a norm, a shortcut or a scale that was lost would be seen.
    for tensor in theirs.state_dict().values():
        if tensor.is_floating_point():
            tensor.add_(0.05 * torch.rand_like(tensor))
    theirs.save_pretrained(tmp_path / "w")
    config = adopted(EncoderConfig(weights=str(tmp_path / "w")), (3, 32, 32))
    assert config.name == name
    encoder = build_encoder(config, (3, 32, 32)).eval()
    pretrained = load_weights(str(tmp_path / "w"), encoder)
    assert "left out classifier" in pretrained.notes
    encoder.net.load_state_dict(pretrained.tensors)
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = theirs.base_model(x).last_hidden_state.mean((2, 3))
    torch.testing.assert_close(encoder.features(x)["mean"], expected, atol=1e-4, rtol=1e-4)


def test_a_resnet_whose_strides_are_elsewhere_is_not_taken_for_timms() -> None:
    assert convnet_name({"model_type": "resnet", "layer_type": "bottleneck", "depths": [3, 4, 6, 3]}) == "resnet50"
    for key in ("downsample_in_bottleneck", "downsample_in_first_stage"):
        told = {"model_type": "resnet", "layer_type": "bottleneck", "depths": [3, 4, 6, 3], key: True}
        assert convnet_name(told) is None
    assert convnet_name({"model_type": "bert", "hidden_sizes": [96], "depths": [1]}) is None
