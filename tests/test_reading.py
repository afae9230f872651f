"""Files are read as the library of given weights reads them, from the weights to the exported classifier."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from scipy.special import softmax
from timm.data import create_transform, resolve_model_data_config

import pmae
from pmae.classify import FinetuneConfig
from pmae.classify.finetune import finetune
from pmae.cli import main
from pmae.config import DataConfig
from pmae.data.decode import decode

SIDE = 32
SIZES = ((30, 20), (32, 32), (45, 33), (33, 90), (160, 61), (9, 14))
"""Width and height of files: smaller and larger than the network's, narrow and wide."""


def picture(size: tuple[int, int], seed: int, steep: bool = False) -> Image.Image:
    """Waves, which resizing in 8 bits or in floats leaves alike, from left to right or from top to bottom."""
    width, height = size
    rng, (rows, columns) = np.random.default_rng(seed), np.mgrid[:height, :width]
    along = rows / height if steep else columns / width
    waves = 120 + 90 * np.sin(9 * along[..., None] + rng.uniform(0, 6, 3))
    return Image.fromarray((waves + 20 * np.cos(rows + columns)[..., None] / 9).clip(0, 255).astype(np.uint8))


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files") / "labelled"
    for number in range(36):
        path = folder / ("flat", "steep")[number % 2] / f"{number:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(SIZES[number // 2 % len(SIZES)], number, bool(number % 2)).save(path)
    return folder


def timm_weights(folder: Path, **pixels: Any) -> Path:
    """A ViT with random weights as timm keeps it."""
    torch.manual_seed(0)
    folder.mkdir()
    sizes = {"img_size": SIDE, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3}
    save_file(timm.create_model("vit_tiny_patch16_224", **sizes).state_dict(), folder / "model.safetensors")
    known = {"input_size": [3, SIDE, SIDE], "mean": [0.3, 0.4, 0.5], "std": [0.2, 0.25, 0.3], **pixels}
    config = {"architecture": "vit_tiny_patch16_224", "model_args": sizes, "pretrained_cfg": known}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def by_timm(folder: Path, files: list[Path], head: bool = False) -> np.ndarray:
    """Features, or logits, of files from timm's own transform and network."""
    net: Any = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    transform: Any = create_transform(**resolve_model_data_config(net))
    with torch.no_grad():
        x = torch.stack([transform(Image.open(file).convert("RGB")) for file in files])
        found: np.ndarray = (net(x) if head else net.forward_features(x)[:, 1:].mean(1)).numpy()
    return found


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize(("crop_mode", "crop_pct"), [("center", 0.875), ("center", 1.0), ("squash", 0.9)])
def test_features_of_files_are_those_of_timms_own_transform_and_network(
    crop_mode: str, crop_pct: float, interpolation: str, labelled: Path, tmp_path: Path
) -> None:
    how = {"crop_mode": crop_mode, "crop_pct": crop_pct, "interpolation": interpolation}
    weights = timm_weights(tmp_path / "weights", **how)
    pmae.embed(weights, labelled, tmp_path / "x.npz", device="cpu")
    found = np.load(tmp_path / "x.npz")
    theirs = by_timm(weights, [labelled / name for name in found["name"]])
    np.testing.assert_allclose(found["features"], theirs, rtol=1e-3, atol=1e-4)


def test_another_way_of_timm_to_read_files_is_named_with_what_is_done_instead(labelled: Path, tmp_path: Path) -> None:
    bordered = timm_weights(tmp_path / "weights", crop_mode="border", crop_pct=0.9)
    with pytest.warns(UserWarning, match="crop_mode 'border' of the weights is not known here: .* with 'center'"):
        pmae.embed(bordered, labelled, tmp_path / "x.npz", device="cpu")
    found = np.load(tmp_path / "x.npz")
    centred = by_timm(timm_weights(tmp_path / "centred", crop_pct=0.9), [labelled / name for name in found["name"]])
    np.testing.assert_allclose(found["features"], centred, rtol=1e-3, atol=1e-4)


def test_timms_crop_is_that_of_the_pixels(tmp_path: Path) -> None:
    for number, size in enumerate(SIZES):
        picture(size, number).save(tmp_path / "x.png")
        read = decode(tmp_path / "x.png", DataConfig("x", resize=SIDE, crop_pct=0.8))
        pixels = {"mean": (0.0,) * 3, "std": (1 / 255,) * 3, "crop_pct": 0.8, "interpolation": "bicubic"}
        transform: Any = create_transform((3, SIDE, SIDE), **pixels)
        np.testing.assert_array_equal(read, transform(Image.open(tmp_path / "x.png")).numpy().round())


def test_16_bits_are_cropped_as_8_are_also_at_the_size_asked_for(tmp_path: Path) -> None:
    """The same values: the size of a file that is that of the squares is no reason to keep the margin of it alone."""
    weights, features = timm_weights(tmp_path / "weights", crop_pct=0.75), {}
    for depth in (np.uint8, np.uint16):
        folder = tmp_path / np.dtype(depth).name
        folder.mkdir()
        for number, size in enumerate(SIZES):
            grey = np.asarray(picture(size, number).convert("L"))
            Image.fromarray(grey.astype(depth)).save(folder / f"{number}.png")
        words = ["embed", str(weights), "--data", str(folder), "-o", str(tmp_path / "x.npz"), "--device", "cpu"]
        assert main(words) == 0
        features[depth] = np.load(tmp_path / "x.npz")["features"]
    np.testing.assert_allclose(features[np.uint16], features[np.uint8], atol=0.02)


def test_a_margin_is_left_out_of_files_that_are_resized_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files of one size stay as they are: trained on whole, they would have lost their margins in later commands."""
    for number in range(24):
        picture((SIDE, SIDE), number).save(tmp_path / f"{number}.png")
    out = tmp_path / "run"
    assert (
        main(["pretrain", "--data", str(tmp_path), "--data.crop-pct", "0.5", "--epochs", "1", "--out", str(out)]) == 2
    )
    said = "pmae: error: --data.crop-pct must be 1 where images keep their size, as without data.resize, got 0.5\n"
    assert capsys.readouterr().err == said
    assert not out.exists()


@pytest.fixture(scope="module")
def classifier(labelled: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("classifier")
    weights = timm_weights(folder / "weights", crop_pct=0.8, interpolation="bilinear")
    finetune(weights, labelled, folder / "clf", FinetuneConfig(method="linear", pooling="cls"), device="cpu")
    return folder / "clf"


@pytest.fixture(scope="module")
def predicted(classifier: Path, labelled: Path) -> dict[Path, np.ndarray]:
    """Files, and the probabilities of both classes that `pmae predict` writes of them."""
    out = classifier.parent / "predictions.csv"
    assert main(["predict", str(classifier), "--data", str(labelled), "--top-k", "2", "-o", str(out)]) == 0
    rows = list(csv.DictReader(out.open()))
    both = ({row["label"]: row["probability"], row["label_2"]: row["probability_2"]} for row in rows)
    answers = (np.array([float(row["flat"]), float(row["steep"])]) for row in both)
    return dict(zip((labelled / row["file"] for row in rows), answers, strict=True))


def test_an_exported_classifier_answers_of_files_as_predict_does(
    classifier: Path, predicted: dict[Path, np.ndarray], tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    files, ours = list(predicted), np.stack(list(predicted.values()))
    for kind in ("timm", "huggingface", "onnx"):
        assert main(["export", str(classifier), "--format", kind, "-o", str(tmp_path / kind)]) == 0
    np.testing.assert_allclose(softmax(by_timm(tmp_path / "timm", files, head=True), 1), ours, atol=1e-4)
    model = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "huggingface").eval()
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "huggingface")
    with torch.no_grad():
        logits = model(**processor([Image.open(file) for file in files], return_tensors="pt")).logits.numpy()
    # Where the margin is odd, its crop lies one pixel beside timm's.
    np.testing.assert_allclose(softmax(logits, 1), ours, atol=0.03)
    told = json.loads((tmp_path / "onnx/preprocessing.json").read_text())
    transform: Any = create_transform(
        (3, told["height"], told["width"]),
        interpolation=told["interpolation"],
        crop_pct=told["crop_pct"],
        crop_mode=told["crop_mode"],
        mean=(0.0,) * 3,
        std=(1 / 255,) * 3,
    )
    session = onnxruntime.InferenceSession(tmp_path / "onnx/classifier.onnx", providers=["CPUExecutionProvider"])
    images = np.stack([transform(Image.open(file)).numpy() for file in files])
    np.testing.assert_allclose(session.run(["probabilities"], {"images": images})[0], ours, atol=1e-4)


def test_what_was_exported_is_read_in_the_same_way_again(classifier: Path, tmp_path: Path) -> None:
    pmae.export(classifier, "timm", tmp_path / "x")
    data = pmae.load_encoder(tmp_path / "x")[0].data
    assert (data.crop_mode, data.crop_pct, data.interpolation) == ("center", 0.8, "bilinear")


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("BitImageProcessor", {"size": {"shortest_edge": 76}, "crop_size": {"height": 48, "width": 48}, "resample": 2}),
        ("BitImageProcessor", {"size": {"height": 40, "width": 40}, "crop_size": {"height": 32, "width": 32}}),
        ("ViTImageProcessor", {"size": {"height": 32, "width": 32}, "resample": 2}),
        ("ConvNextImageProcessor", {"size": {"shortest_edge": 32}, "crop_pct": 0.875, "resample": 3}),
        ("ConvNextImageProcessor", {"size": {"shortest_edge": 384}, "crop_pct": 0.875, "resample": 3}),
    ],
)
def test_files_are_read_as_the_processors_of_transformers_read_them(
    kind: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    vit = transformers.ViTConfig(hidden_size=12, num_hidden_layers=1, num_attention_heads=3, intermediate_size=48)
    transformers.ViTModel(vit).save_pretrained(tmp_path)
    processor = getattr(transformers, kind)(**settings, image_mean=[0.0] * 3, image_std=[1.0] * 3)
    processor.save_pretrained(tmp_path)
    config, encoder, _ = pmae.load_encoder(tmp_path)
    reading = replace(config.data, resize=encoder.shape[1])
    # Sides of which even margins are cut: of odd ones transformers leaves the smaller half first, timm the larger.
    for number, size in enumerate(((30, 20), (32, 32), (64, 128), (6, 9))):
        picture(size, number).save(tmp_path / "x.png")
        theirs = processor(Image.open(tmp_path / "x.png"), return_tensors="pt")["pixel_values"][0].numpy() * 255
        ours = decode(tmp_path / "x.png", reading)
        assert np.abs(theirs - ours).mean() < 1, size
