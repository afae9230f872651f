"""Features written to files: against the encoder run by hand, plain timm, and other readers of the same formats."""

import csv
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from pyarrow import parquet
from timm.layers import PatchEmbed
from timm.models.vision_transformer import VisionTransformer
from torch.nn.modules.module import register_module_forward_pre_hook
from torchvision.datasets import ImageFolder

from pmae import api
from pmae.cli import main
from pmae.config import Config, DataConfig, DecoderConfig, EncoderConfig, OptimConfig, TrainConfig, replace
from pmae.data.augment import Standardize
from pmae.derive import resolve
from pmae.embed import Embedder, embed
from pmae.errors import UserError
from pmae.files import read_tensors
from pmae.models import build_encoder
from pmae.pretraining import in_memory
from pmae.runs import Run
from pmae.train import loop
from pmae.train.checkpoint import load_encoder

SHAPE = (8, 12, 3)
TINY = Config(
    encoder=EncoderConfig(patch_size=4, width=16, depth=2, heads=4),
    decoder=DecoderConfig("small", width=16, depth=1, heads=2),
    optim=OptimConfig(base_lr=4e-3),
    train=TrainConfig(epochs=2, batch_size=16, device="cpu", checkpoint_every=1, log_every=2),
)


def pixels(count: int, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    splits = in_memory(pixels(48, *SHAPE), TINY.data)
    config, _ = resolve(TINY, len(splits.train), splits.train.shape)
    return loop.pretrain(config, splits, tmp_path_factory.mktemp("embed") / "run", quiet=True)


def write_images(folder: Path, names: list[str], *shape: int) -> np.ndarray:
    images = pixels(len(names), *(shape or SHAPE), seed=1)
    for name, image in zip(names, images, strict=True):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / name, "png")
    return images


def by_hand(run: Run, images: np.ndarray, epoch: int | None = None) -> dict[str, np.ndarray]:
    """The encoder of a run on images (N, H, W, C), without any of the code under test."""
    _, encoder, standardize = load_encoder(run, epoch)
    with torch.no_grad():
        found = encoder.features(standardize(torch.from_numpy(images.transpose(0, 3, 1, 2))))
    return {name: values.numpy() for name, values in found.items()}


def left_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.filterwarnings("ignore:the images are float32")
def test_an_array_with_nan_is_refused_and_nothing_is_written(run: Run, tmp_path: Path) -> None:
    images = pixels(6, *SHAPE).astype(np.float32)
    images[4, 0, 0, 0] = np.nan
    np.save(tmp_path / "in.npy", images)
    with pytest.raises(UserError, match="finite numbers, got NaN or infinity in 1 of 6 images"):
        embed(run, tmp_path / "in.npy", tmp_path / "out.csv", device="cpu")
    assert left_in(tmp_path) == {"in.npy"}


def test_a_folder_becomes_features_names_and_labels(run: Run, tmp_path: Path) -> None:
    names = ["b/2.png", "a/1.png", "a/deep/0.png", "b/10.png", "a.png/3.png"]
    images = dict(zip(names, write_images(tmp_path / "in", names), strict=True))
    data = DataConfig(source=str(tmp_path / "in"), labels="folders")
    assert embed(run, data, tmp_path / "new" / "out.npz", batch_size=2, device="cpu") == 5
    found = np.load(tmp_path / "new" / "out.npz", allow_pickle=False)
    reference = ImageFolder(tmp_path / "in")
    expected = {os.path.relpath(path, tmp_path / "in"): label for path, label in reference.samples}
    assert found["name"].tolist() == sorted(names, key=lambda name: Path(name).parts)
    assert dict(zip(found["name"].tolist(), found["label"].tolist(), strict=True)) == expected
    assert found["class"].tolist() == [reference.classes[label] for label in found["label"]]
    assert found["features"].dtype == np.float32
    ordered = np.stack([images[name] for name in found["name"]])
    np.testing.assert_allclose(found["features"], by_hand(run, ordered)["mean"], atol=1e-6)


def test_every_pooling_is_what_plain_timm_computes(run: Run, tmp_path: Path) -> None:
    images = pixels(5, *SHAPE, seed=2)
    np.save(tmp_path / "in.npy", images)
    net = VisionTransformer(
        img_size=SHAPE[:2], patch_size=4, in_chans=3, num_classes=0, embed_dim=16, depth=2, num_heads=4
    ).eval()
    net.load_state_dict(read_tensors(run.checkpoint() / "encoder.safetensors"))
    statistics = read_tensors(run.path / "fitted.safetensors", "standardize.")
    x = (torch.from_numpy(images.transpose(0, 3, 1, 2)).float() - statistics["mean"]) / statistics["std"]
    with torch.no_grad():
        tokens = net.forward_features(x).numpy()
    expected = {"cls": tokens[:, 0], "mean": tokens[:, 1:].mean(1), "patches": tokens[:, 1:]}
    expected["both"] = np.concatenate([expected["cls"], expected["mean"]], 1)
    for pooling, value in expected.items():
        embed(run, DataConfig(source=str(tmp_path / "in.npy")), tmp_path / "out.npz", pooling, device="cpu")
        found = np.load(tmp_path / "out.npz")
        assert found.files == ["features"]
        np.testing.assert_allclose(found["features"], value, atol=1e-5, err_msg=pooling)


def test_the_last_blocks_are_timms_intermediate_layers(tmp_path: Path) -> None:
    images = pixels(6, *SHAPE, seed=2)
    np.save(tmp_path / "in.npy", images)
    deep = replace(TINY, encoder__depth=5, train__epochs=1)
    run = api.pretrain(deep, pixels(48, *SHAPE), out=tmp_path / "deep", quiet=True, figures=False)
    command = ["embed", str(run.path), "--data", str(tmp_path / "in.npy"), "--pooling", "last_4"]
    assert main([*command, "-o", str(tmp_path / "out.csv")]) == 0
    shape = {"img_size": SHAPE[:2], "patch_size": 4, "embed_dim": 16, "depth": 5, "num_heads": 4, "num_classes": 0}
    net = VisionTransformer(**shape).eval()
    net.load_state_dict(read_tensors(run.checkpoint() / "encoder.safetensors"))
    statistics = read_tensors(run.path / "fitted.safetensors", "standardize.")
    x = (torch.from_numpy(images.transpose(0, 3, 1, 2)).float() - statistics["mean"]) / statistics["std"]
    with torch.no_grad():
        expected = torch.cat([tokens.mean(1) for tokens in net.get_intermediate_layers(x, 4)], 1)
    head, *rows = (tmp_path / "out.csv").read_text().splitlines()
    assert head.split(",")[:2] == ["block-4_0", "block-4_1"]
    assert head.split(",")[63] == "block-1_15"
    found = np.array([[float(cell) for cell in row.split(",")[:64]] for row in rows])
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-4)


ODD = ["a b.png", "ü 画像.png", "new\nline.png", "quote'\",.png", "-dash.png", "x" * 60 + ".png"]


def test_all_formats_hold_the_same_and_odd_names_survive(run: Run, tmp_path: Path) -> None:
    write_images(tmp_path / "in", ODD)
    data = DataConfig(source=str(tmp_path / "in"))
    for suffix in ("npz", "csv", "parquet"):
        embed(run, data, tmp_path / f"out.{suffix}", "both", batch_size=4, device="cpu")
    arrays = np.load(tmp_path / "out.npz", allow_pickle=False)
    assert arrays["name"].tolist() == sorted(ODD)
    table = parquet.read_table(tmp_path / "out.parquet")
    with (tmp_path / "out.csv").open(newline="", encoding="utf-8") as file:
        header, *lines = csv.reader(file)
    columns = ["name", *(f"{kind}{i}" for kind in ("cls", "mean") for i in range(16))]
    assert header == table.column_names == columns
    assert [line[0] for line in lines] == table["name"].to_pylist() == sorted(ODD)
    np.testing.assert_array_equal(np.array([line[1:] for line in lines], np.float32), arrays["features"])
    np.testing.assert_array_equal(np.stack([table[name] for name in columns[1:]], 1), arrays["features"])


@pytest.mark.parametrize("suffix", ["npz", "csv", "parquet"])
def test_twice_gives_the_same_bytes(run: Run, tmp_path: Path, suffix: str) -> None:
    write_images(tmp_path / "in", [f"{i % 2}/{i}.png" for i in range(9)])
    data = DataConfig(source=str(tmp_path / "in"), labels="folders")
    written = []
    for _ in range(2):
        embed(run, data, tmp_path / f"out.{suffix}", batch_size=4, device="cpu")
        written.append((tmp_path / f"out.{suffix}").read_bytes())
    assert written[0] == written[1]
    assert left_in(tmp_path) == {"in", f"out.{suffix}"}


def test_an_archive_keeps_its_splits_and_the_labels_it_has(run: Run, tmp_path: Path) -> None:
    train, test = pixels(7, *SHAPE, seed=3), pixels(3, *SHAPE, seed=4)
    np.savez(tmp_path / "in.npz", train_images=train, test_images=test, test_labels=np.array([9, 5, 9]))
    data = DataConfig(source=str(tmp_path / "in.npz"))
    assert embed(run, data, tmp_path / "out.npz", device="cpu") == 10
    found = np.load(tmp_path / "out.npz")
    assert found["split"].tolist() == ["train"] * 7 + ["test"] * 3
    assert found["label"].tolist() == [-1] * 7 + [1, 0, 1]
    assert found["class"].tolist() == [""] * 7 + ["9", "5", "9"]
    assert "name" not in found
    assert embed(run, data, tmp_path / "test.npz", split="test", device="cpu") == 3
    part = np.load(tmp_path / "test.npz")
    assert set(part.files) == {"features", "label", "class"}
    np.testing.assert_array_equal(part["features"], found["features"][7:])
    with pytest.raises(UserError, match=r"split: unknown name 'val'.*all, test, train"):
        embed(run, data, tmp_path / "val.npz", split="val", device="cpu")


def test_earlier_epochs_can_be_asked_for(run: Run, tmp_path: Path) -> None:
    images = pixels(4, *SHAPE, seed=5)
    np.save(tmp_path / "in.npy", images)
    data = DataConfig(source=str(tmp_path / "in.npy"))
    for epoch in (1, 2):
        embed(run, data, tmp_path / "out.npz", "cls", epoch=epoch, device="cpu")
        features = np.load(tmp_path / "out.npz")["features"]
        np.testing.assert_allclose(features, by_hand(run, images, epoch)["cls"], atol=1e-6)
    assert np.abs(by_hand(run, images, 1)["cls"] - by_hand(run, images, 2)["cls"]).max() > 1e-3
    with pytest.raises(UserError, match="checkpoint of epoch 7"):
        embed(run, data, tmp_path / "out.npz", epoch=7, device="cpu")


def test_neighbours_and_batches_change_nothing(run: Run) -> None:
    _, encoder, standardize = load_encoder(run)
    images = pixels(20, 3, *SHAPE[:2], seed=6)
    whole = Embedder(encoder, standardize, batch_size=20)(images)
    order = np.random.default_rng(0).permutation(20)
    np.testing.assert_allclose(Embedder(encoder, standardize, batch_size=3)(images[order]), whole[order], atol=1e-6)
    np.testing.assert_array_equal(Embedder(encoder, standardize, batch_size=20)(images), whole)
    with pytest.raises(UserError, match="batch_size must be at least 1, got 0"):
        Embedder(encoder, standardize, batch_size=0)


def test_nothing_is_padded_where_chunks_meet(run: Run, tmp_path: Path) -> None:
    images = pixels(80, *SHAPE, seed=7)
    np.save(tmp_path / "in.npy", images)
    given: list[int] = []

    def count(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if isinstance(module, PatchEmbed):
            given.append(len(inputs[0]))

    # A chunk of 37 images is what 384 pixels and three channels get.
    with register_module_forward_pre_hook(count):
        embed(run, DataConfig(source=str(tmp_path / "in.npy")), tmp_path / "out.npz", batch_size=37, device="cpu")
    assert sum(given) == len(images)
    assert len(set(given)) == 1
    found = np.load(tmp_path / "out.npz")["features"]
    np.testing.assert_allclose(found, by_hand(run, images)["mean"], atol=1e-6)


def test_unreadable_files_are_listed_and_skipped_up_to_the_cap(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = write_images(tmp_path / "in", [f"{i}.png" for i in range(6)])
    for broken in ("0.png", "3.png"):
        (tmp_path / "in" / broken).write_bytes(b"no image")
    data = DataConfig(source=str(tmp_path / "in"), max_unreadable=2)
    with pytest.warns(UserWarning, match=r"skipped 2 unreadable files: '0.png'.*'3.png'"):
        assert embed(run, data, tmp_path / "out.npz", batch_size=2, device="cpu") == 4
    found = np.load(tmp_path / "out.npz")
    assert found["name"].tolist() == ["1.png", "2.png", "4.png", "5.png"]
    np.testing.assert_allclose(found["features"], by_hand(run, images[[1, 2, 4, 5]])["mean"], atol=1e-6)
    before = (tmp_path / "out.npz").read_bytes()
    fewer = ["embed", str(run.path), "--data", str(tmp_path / "in"), "-o", str(tmp_path / "out.npz"), "--device", "cpu"]
    assert main([*fewer, "--max-unreadable", "1"]) == 2
    assert re.match(r"pmae: error: --max-unreadable is 1.*3.png", capsys.readouterr().err)
    assert (tmp_path / "out.npz").read_bytes() == before
    assert left_in(tmp_path) == {"in", "out.npz"}


def test_a_run_is_not_told_its_network(run: Run, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="encoder must be left out for a run, which tells it, got 'resnet18'"):
        embed(run, "photos", tmp_path / "out.npz", encoder="resnet18")
    assert not left_in(tmp_path)


@pytest.mark.parametrize("suffix", ["npz", "csv", "parquet"])
def test_what_fails_midway_leaves_the_old_file(run: Run, tmp_path: Path, suffix: str) -> None:
    write_images(tmp_path / "in", [f"{i}.png" for i in range(20)])
    Image.fromarray(pixels(1, 5, 5, 3)[0]).save(tmp_path / "in" / "9.png")
    (tmp_path / f"out.{suffix}").write_text("old")
    with pytest.raises(UserError, match=r"data.resize.*'9.png' is 5x5"):
        embed(run, DataConfig(source=str(tmp_path / "in")), tmp_path / f"out.{suffix}", batch_size=2, device="cpu")
    assert (tmp_path / f"out.{suffix}").read_text() == "old"
    assert left_in(tmp_path) == {"in", f"out.{suffix}"}


def test_a_missing_extra_is_named(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"pyarrow.*pip install 'pmae\[embed\]'"):
        embed(run, DataConfig(source="digits"), tmp_path / "out.parquet", device="cpu")


def test_an_encoder_without_a_cls_token_says_so() -> None:
    encoder = build_encoder(EncoderConfig("test_resnet"), (1, 32, 32))
    standardize = Standardize(torch.full((1, 1, 1), 128.0), torch.full((1, 1, 1), 60.0))
    assert Embedder(encoder, standardize)(pixels(2, 1, 32, 32)).shape == (2, encoder.width)
    with pytest.raises(UserError, match=r"pooling must be mean or patches .* got 'both'"):
        Embedder(encoder, standardize, "both")
    with pytest.raises(UserError, match=r"pooling must be another one for what is no ViT of 4 blocks .* got 'last_4'"):
        Embedder(encoder, standardize, "last_4")
    with pytest.raises(UserError, match="pooling: unknown name 'max'"):
        Embedder(encoder, standardize, "max")
