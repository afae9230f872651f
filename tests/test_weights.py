"""Weights of other libraries as they are: their features are those that timm and transformers compute."""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from sklearn.neighbors import KNeighborsClassifier
from timm.data import create_transform, resolve_model_data_config
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn

import pmae
from pmae.cli import main
from pmae.config import EncoderConfig
from pmae.errors import UserError
from pmae.evaluate.protocols import only, preset
from pmae.models import Encoder
from pmae.models.described import described_weights
from pmae.models.weights import load_weights
from pmae.runs import Run

SIDE, CLASSES = 32, ("flat", "steep")


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
    """A ViT as timm keeps it, with a head and as many attention heads as its name has; its features by timm itself."""
    sizes = {"img_size": SIDE, "patch_size": 8, "embed_dim": 48, "depth": 2}
    net = timm.create_model("vit_tiny_patch16_224", num_classes=5, **sizes).eval()
    torch.nn.init.normal_(net.pos_embed)
    save_file(net.state_dict(), folder / "model.safetensors")
    pixels = {"input_size": [3, SIDE, SIDE], "mean": [0.3, 0.4, 0.5], "std": [0.2, 0.25, 0.3]}
    pixels |= {"crop_pct": 0.9, "interpolation": "bicubic"}
    config = {"architecture": "vit_tiny_patch16_224", "model_args": sizes, "pretrained_cfg": pixels}
    (folder / "config.json").write_text(json.dumps(config))
    return [str(folder)], pixels, lambda x: net.forward_features(x)[:, 1:].mean(1)


def timm_resnet(folder: Path) -> tuple[list[str], Any, Any]:
    """A ResNet's checkpoint of training, as MAE keeps it, alone: timm knows the statistics by the name."""
    net = timm.create_model("resnet10t", num_classes=5).eval()
    more = {"epoch": 3, "args": argparse.Namespace(lr=0.1)}
    torch.save({"model": net.state_dict(), **more}, folder / "resnet.pth")
    words = [str(folder / "resnet.pth"), "--encoder", "resnet10t", "--resize", str(SIDE)]
    return words, resolve_model_data_config(net), lambda x: net.forward_features(x).mean((2, 3))


def hugging_face_vit(folder: Path, **changes: str) -> tuple[list[str], Any, Any]:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    config = transformers.ViTConfig(image_size=SIDE, patch_size=8, layer_norm_eps=1e-6, **sizes, **changes)
    net = transformers.ViTForImageClassification(config).eval()
    net.save_pretrained(folder)
    size = {"height": SIDE, "width": SIDE}
    transformers.ViTImageProcessor(size=size, image_mean=[0.5] * 3, image_std=[0.25] * 3).save_pretrained(folder)
    pixels = {"mean": [0.5] * 3, "std": [0.25] * 3, "crop_pct": 1.0}
    return [str(folder)], pixels, lambda x: net.vit(x).last_hidden_state[:, 1:].mean(1)


@pytest.fixture(params=[timm_vit, timm_resnet, hugging_face_vit], ids=lambda make: make.__name__)
def weights(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[list[str], Any]:
    """The words that name weights on the command line, and their own library's features of uint8 images."""
    torch.manual_seed(0)
    (tmp_path / "weights").mkdir()
    words, pixels, forward = request.param(tmp_path / "weights")
    transform: Any = create_transform(**{**pixels, "input_size": (3, SIDE, SIDE)})

    def features(images: np.ndarray) -> np.ndarray:
        x = torch.stack([transform(Image.fromarray(image)) for image in images])
        with torch.no_grad():
            found: np.ndarray = forward(x).numpy()
        return found

    return words, features


def test_embedded_features_are_those_of_the_library(weights: Any, labelled: Path, tmp_path: Path) -> None:
    words, features = weights
    command = ["embed", *words, "--data", str(labelled), "--split", "test", "--labels", "folders", "--device", "cpu"]
    assert main([*command, "-o", str(tmp_path / "x.npz")]) == 0
    found = np.load(tmp_path / "x.npz")
    numbers = [int(Path(name).stem) for name in found["name"]]
    np.testing.assert_allclose(found["features"], features(draw(30, 30)[0][numbers]), rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("no_figures")
def test_scores_are_those_of_scikit_learn_on_the_librarys_features(
    weights: Any, labelled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, features = weights
    out = str(tmp_path / "runs" / "scored")
    command = ["evaluate", *words, "--data", str(labelled), "--protocols", "knn", "--no-baselines", "--device", "cpu"]
    assert main([*command, "--out", out]) == 0
    assert "note: mean and standard deviation of pixels: " in capsys.readouterr().out
    (seen, train), (unseen, test) = ((features(images), labels) for images, labels in (draw(60, 60), draw(30, 30)))
    score = next(score for score in Run(out).evaluations[-1].scores if score.pooling == "mean")
    assert score.label == "weights"
    assert score.by_k
    for one in score.by_k:
        peer = KNeighborsClassifier(one.k, metric="cosine").fit(seen, train)
        assert one.accuracy == pytest.approx(peer.score(unseen, test)), one.k


@pytest.fixture
def vit(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    (tmp_path / "vit").mkdir()
    timm_vit(tmp_path / "vit")
    return tmp_path / "vit"


@pytest.mark.usefixtures("no_figures")
def test_the_folder_is_a_run_of_no_epochs(vit: Path, labelled: Path, tmp_path: Path) -> None:
    knn = only(preset("strong"), ["knn"])
    run = pmae.evaluate(vit, knn, device="cpu", data=labelled, out=tmp_path / "scored")
    names = [evaluation.method for evaluation in run.evaluations]
    assert names == ["weights", "random weights", "raw pixels", "pca features"]
    assert (run.shape, run.config.data.resize) == ((3, SIDE, SIDE), SIDE)
    again = pmae.evaluate(run.path, knn, device="cpu", data=labelled, baselines=False)
    assert again.evaluations[-1].scores == run.evaluations[0].scores
    for place in (vit, run.path):
        assert pmae.embed(place, labelled, tmp_path / f"{place.name}.npz", device="cpu") == 90
    np.testing.assert_array_equal(*(np.load(tmp_path / name)["features"] for name in ("vit.npz", "scored.npz")))
    with pytest.raises(UserError, match="run must be one that was trained here"):
        pmae.export(run, "timm", tmp_path / "exported")
    assert main(["report", str(run.path), "-o", str(tmp_path / "report.html")]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "k-NN on weights (patch mean) gets" in page
    assert "The weights were scored as they were given: nothing was trained here." in page
    assert "no training step was logged" not in page
    assert "masking.masked_variance" not in page


@pytest.mark.usefixtures("no_figures")
def test_scoring_goes_on_where_it_was_interrupted(
    vit: Path, labelled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    knn, out, said = only(preset("strong"), ["knn"]), tmp_path / "scored", list[str]()

    def interrupt(line: str) -> None:
        if line.startswith("raw pixels"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pmae.evaluate(vit, knn, device="cpu", data=labelled, out=out, say=interrupt)
    whole = pmae.evaluate(vit, knn, device="cpu", data=labelled, out=tmp_path / "whole")
    run = pmae.evaluate(vit, knn, device="cpu", data=labelled, out=out, say=said.append)
    assert [one.scores for one in run.evaluations] == [one.scores for one in whole.evaluations]
    assert {line.split(":")[0] for line in said if ":" in line and "left" not in line} == {"raw pixels", "pca features"}
    command = ["evaluate", str(vit), "--data", str(labelled), "--out", str(out), "--device", "cpu", "--no-baselines"]
    assert main([*command, "--protocols", "linear"]) == 0
    assert [one.method for one in run.evaluations].count("weights") == 2

    other = tmp_path / "other"
    shutil.copytree(vit, other)
    torch.manual_seed(1)
    timm_vit(other)
    shutil.copytree(labelled / "train", tmp_path / "fewer")
    before = (out / "results.json").read_bytes()
    rule = "out must be a new folder, or one where scoring of the same weights and images began"
    for words, reason in (
        ([other, "--data", labelled], "of other weights"),
        ([vit, "--data", tmp_path / "fewer"], "of other images"),
    ):
        assert main(["evaluate", *map(str, words), "--out", str(out), "--device", "cpu"]) == 2
        message = capsys.readouterr().err
        assert rule in message
        assert reason in message
    assert (out / "results.json").read_bytes() == before


def test_test_images_that_are_trained_on_are_refused(
    vit: Path, labelled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for split in ("train", "test"):
        shutil.copytree(labelled / "test", tmp_path / "shared" / split)
    command = ["evaluate", str(vit), "--data", str(tmp_path / "shared"), "--out", str(tmp_path / "scored")]
    assert main([*command, "--protocols", "knn", "--no-baselines", "--device", "cpu"]) == 2
    rule = "test must be of images that are not trained on, got 30 of 30 that are, such as 'test/"
    assert rule in capsys.readouterr().err
    assert not (tmp_path / "scored").exists()


def test_dinov2s_own_files_are_what_timm_makes_of_them(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"embed_dim": 32, "depth": 1, "num_heads": 2, "init_values": 1.0, "num_classes": 0}
    nets = [VisionTransformer(28, 14, **sizes, reg_tokens=4, no_embed_class=True).eval() for _ in range(2)]
    own = {key: torch.randn_like(value) for key, value in nets[0].state_dict().items()}
    own |= {"register_tokens": own.pop("reg_token"), "mask_token": torch.zeros(1, 32)}
    own["pos_embed"] = torch.randn(1, 5, 32)  # with one for [CLS]
    torch.save(own, tmp_path / "dinov2.pth")
    nets[0].load_state_dict(checkpoint_filter_fn(dict(own), nets[0]))
    nets[1].load_state_dict(load_weights(str(tmp_path / "dinov2.pth"), Encoder(nets[1], (3, 28, 28))).tensors)
    x = torch.randn(2, 3, 28, 28)
    with torch.no_grad():
        torch.testing.assert_close(*(net.forward_features(x) for net in nets))


class Planted:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("planted"),))


def test_code_in_a_file_is_not_run(
    labelled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"model": Planted()}, "bad.pth")
    assert main(["embed", "bad.pth", "--encoder", "resnet10t", "--data", str(labelled), "-o", "x.npz"]) == 2
    assert "file must hold tensors that torch.save wrote, got 'bad.pth'" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["bad.pth"]


@pytest.mark.parametrize(
    ("processor", "side", "crop"),
    [
        ({"size": {"height": 48, "width": 48}}, 48, "squash"),
        (
            {"size": {"shortest_edge": 64}, "crop_size": {"height": 40, "width": 40}, "do_center_crop": True},
            40,
            "center",
        ),
        ({"size": 56}, 56, "squash"),
        ({"size": {"shortest_edge": 64}, "crop_pct": 0.875}, 64, "center"),
        ({}, 32, "center"),
    ],
)
def test_images_have_the_size_that_the_weights_record(
    tmp_path: Path, processor: dict[str, Any], side: int, crop: str
) -> None:
    hugging_face_vit(tmp_path)
    told = {**processor, "image_mean": [0.5] * 3, "image_std": [0.25] * 3}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(told))
    config, encoder, _ = pmae.load_encoder(tmp_path)
    assert (encoder.shape, config.data.crop_mode) == ((3, side, side), crop)


@pytest.mark.parametrize("how", [{"do_normalize": False}, {"do_rescale": False}, {"rescale_factor": 1}])
def test_pixels_become_what_the_librarys_processor_makes_of_them(tmp_path: Path, how: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    hugging_face_vit(tmp_path)
    theirs = transformers.ViTImageProcessor(size={"height": SIDE, "width": SIDE}, do_resize=False, **how)
    theirs.save_pretrained(tmp_path)
    image = np.random.default_rng(0).integers(0, 255, (SIDE, SIDE, 3), np.uint8)
    expected = theirs(images=image, return_tensors="pt").pixel_values
    ours = pmae.load_encoder(tmp_path)[2](torch.from_numpy(image).permute(2, 0, 1)[None])
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def test_recorded_statistics_of_pixels_count_where_the_network_is_named(tmp_path: Path) -> None:
    told = {"image_mean": [0.5] * 3, "image_std": [0.25] * 3, "size": 48}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(told))
    found = described_weights(str(tmp_path), "resnet10t")
    assert found.encoder == EncoderConfig("resnet10t")
    assert (found.mean, found.std, found.shape) == ((0.5,) * 3, (0.25,) * 3, (3, 48, 48))


def test_mistakes_are_one_sentence_and_nothing_is_written(
    vit: Path, labelled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone, head, out = tmp_path / "alone.safetensors", tmp_path / "head", tmp_path / "out"
    for name in ("other", "relu"):
        (tmp_path / name).mkdir()
    hugging_face_vit(tmp_path / "relu", hidden_act="relu")
    capsys.readouterr()  # of transformers' progress
    save_file({"x": torch.zeros(1)}, alone)
    shutil.copytree(vit, head)
    save_file({"head.weight": torch.zeros(5, 32), "head.bias": torch.zeros(5)}, head / "model.safetensors")
    images = np.zeros((20, SIDE, SIDE, 5), np.uint8)
    np.savez(tmp_path / "five.npz", train_images=images, train_labels=np.arange(20) % 2)
    np.savez(tmp_path / "bare.npz", train_images=images[..., :3])
    where = ["--data", str(labelled), "--out", str(out)]
    for words, message in (
        ([tmp_path / "nowhere", *where], "run must be a folder that pretraining wrote, or weights that"),
        ([tmp_path / "other", *where], "run must be a folder that pretraining wrote, or weights that"),
        ([alone, *where], "must have a config.json beside them that tells their network"),
        ([tmp_path / "relu", *where], "config.json must be 'gelu', got 'relu'"),
        ([head, *where], "does not fit the encoder"),
        ([vit, "--data", tmp_path / "five.npz", "--out", out], "with the 3 channels of the weights, or grey, got 5"),
        ([vit, "--data", tmp_path / "bare.npz", "--out", out], "must have labels to be evaluated, got none"),
        ([vit, "--out", out], "data must be given for weights"),
        ([vit, "--data", labelled], "out must be a new folder for the scores of weights"),
        ([vit, "--data", labelled, "--out", vit], "out must be a new or an empty folder"),
        ([vit, *where, "--seeds", "0", "0"], "--seeds must be one whole number from 0 on or more, no two alike"),
        ([vit, *where, "--seeds", "-1"], "--seeds must be one whole number from 0 on or more, no two alike, got (-1,)"),
        ([vit, *where, "--with", "mae"], "with must be left out for weights"),
    ):
        assert main(["evaluate", *map(str, words), "--protocols", "knn", "--device", "cpu"]) == 2
        said = capsys.readouterr().err
        assert (len(said.splitlines()), message in said) == (1, True), said
        assert not out.exists()
