"""`pmae evaluate --masks`: scikit-learn's regression on the same tokens, its Jaccard index, and masks gone wrong."""

import csv
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from skimage.transform import resize
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, jaccard_score
from tests.classify.conftest import make_run
from timm.models.swin_transformer import SwinTransformer

from pmae.classify.labels import as_splits, read_labelled
from pmae.classify.table import Columns
from pmae.cli import main
from pmae.config import DataConfig, EncoderConfig
from pmae.data.images import ImageSet, Splits
from pmae.data.sets import load
from pmae.errors import UserError
from pmae.evaluate.segment import MaskedData, pixels_like, read_mask, read_masked, tokens_of
from pmae.models import Encoder, build_encoder
from pmae.models.maps import attention_maps, colours, token_maps
from pmae.train.checkpoint import load_encoder

SIDE = 16


def scenes(folder: Path, count: int = 12, kind: str = "L") -> None:
    """Noise with a red and a green square, the masks of which are 1 and 2, with a border of no class around red."""
    rng = np.random.default_rng(0)
    for name in ("images", "masks"):
        (folder / name / "sub").mkdir(parents=True)
    for number in range(count):
        image, mask = rng.integers(60, 160, (SIDE, SIDE, 3)), np.zeros((SIDE, SIDE), np.uint8)
        for channel, (y, x) in enumerate(rng.integers(0, SIDE - 7, (2, 2))):
            image[y : y + 6, x : x + 6, channel] += 90
            mask[y : y + 6, x : x + 6] = channel + 1
        mask[:2] = 255
        Image.fromarray(image.astype(np.uint8)).save(folder / f"images/sub/{number}.png")
        Image.fromarray(mask).convert(kind).save(folder / f"masks/sub/{number}.png")


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    def call(*words: object) -> tuple[int, str]:
        code = main([str(word) for word in words])
        said = capsys.readouterr()
        return code, said.err if code else said.out

    return call


def test_the_probe_is_scikit_learns_and_the_score_its_jaccard_index(tmp_path: Path, command: Any) -> None:
    scenes(tmp_path)
    run = make_run(tmp_path / "run", shape=(3, SIDE, SIDE))
    words = ("--data", tmp_path / "images", "--masks", tmp_path / "masks", "--device", "cpu")
    code, said = command("evaluate", run.path, *words)
    assert code == 0, said
    assert said.startswith("images with masks: 10 to fit on, 2 to score\n")
    told = run.results["segmentation"]
    assert list(told["scores"]) == ["pmae epoch 1", "random weights", "raw pixels"]
    assert (told["classes"], told["counts"]) == ([0, 1, 2], {"train": 10, "test": 2})
    data = read_masked(load(DataConfig(str(tmp_path / "images"))), tmp_path / "masks")
    _, encoder, standardize = load_encoder(run)
    with torch.no_grad():
        maps = [
            token_maps(encoder, standardize(torch.from_numpy(part.images.images))) for part in (data.train, data.test)
        ]
    truth, answer = data.test.targets, reference(maps, data)
    ours = told["scores"]["pmae epoch 1"]
    known = truth >= 0
    assert ours["accuracy"] == pytest.approx(accuracy_score(truth[known], answer[known]), abs=0.01)
    assert ours["miou"]["value"] == pytest.approx(jaccard_score(truth[known], answer[known], average="macro"), abs=0.01)
    each = jaccard_score(truth[known], answer[known], average=None)
    np.testing.assert_allclose(list(ours["iou"].values()), each, atol=0.02)
    assert ours["miou"]["low"] <= ours["miou"]["value"] <= ours["miou"]["high"]
    assert f"mIoU {100 * ours['miou']['value']:.1f}" in said
    assert command("report", run.path, "-o", tmp_path / "report.html")[0] == 0
    _on_the_page(tmp_path, told["scores"])


def _on_the_page(folder: Path, scores: dict[str, Any]) -> None:
    page = (folder / "report.html").read_text()
    own = ", ".join(f"{one['miou']['value']:.1%} on {name}" for name, one in list(scores.items())[:2])
    assert f"A linear segmentation probe gets a mIoU of {own}" in page
    with (folder / "report_files/segmentation.csv").open() as file:
        rows = {row["tokens of"]: row for row in csv.DictReader(file)}
    for name, one in scores.items():
        assert float(rows[name]["mIoU %"]) == pytest.approx(100 * one["miou"]["value"], abs=1e-5)
        assert float(rows[name]["IoU of 2 %"]) == pytest.approx(100 * one["iou"]["2"])
        assert (
            f'<th scope="row">{name}</th><td data-name="mIoU %" class="number">{100 * one["miou"]["value"]:.1f}' in page
        )


def reference(maps: list[torch.Tensor], data: MaskedData) -> np.ndarray:
    """Answers (N, H, W): every class in a patch is a sample of its token, weighted by the pixels it has there."""
    tokens = [m.permute(0, 2, 3, 1).double().numpy() for m in maps]
    side = SIDE // tokens[0].shape[1]
    patches = (
        data.train.targets.reshape(len(tokens[0]), -1, side, SIDE // side, side).swapaxes(2, 3).reshape(-1, side**2)
    )
    x = tokens[0].reshape(-1, tokens[0].shape[-1])
    mean, std = x[(patches >= 0).any(1)].mean(0), x[(patches >= 0).any(1)].std(0)
    rows, labels, weights = [], [], []
    for token, patch in zip((x - mean) / std, patches, strict=True):
        for label in range(3):
            if (patch == label).any():
                rows.append(token)
                labels.append(label)
                weights.append((patch == label).sum() / (patch >= 0).sum())
    model = LogisticRegression(C=1.0, max_iter=2000).fit(np.array(rows), labels, sample_weight=weights)
    logits = ((tokens[1] - mean) / std) @ model.coef_.T + model.intercept_
    return np.stack([resize(own, (SIDE, SIDE), order=1, mode="edge", anti_aliasing=False).argmax(-1) for own in logits])


def test_no_patient_has_masks_on_both_sides_and_an_interval_is_over_patients(tmp_path: Path, command: Any) -> None:
    scenes(tmp_path)
    run = make_run(tmp_path / "run", shape=(3, SIDE, SIDE))
    rows = [f"sub/{i}.png,{i % 2},P{i // 3}" for i in range(12)]
    (tmp_path / "t.csv").write_text("\n".join(["file,label,patient", *rows]))
    words = ("--data", tmp_path / "images", "--masks", tmp_path / "masks", "--device", "cpu", "--no-baselines")
    table = ("--labels", tmp_path / "t.csv", "--columns", "group=patient")
    code, said = command("evaluate", run.path, *words, *table)
    assert code == 0, said
    assert said.startswith("images with masks: 9 to fit on, 3 to score\n")
    found = run.results["segmentation"]["scores"]["pmae epoch 1"]
    assert found["images"] == 3
    assert found["miou"]["low"] is found["miou"]["high"] is None, "resamples of one patient say nothing of others"
    assert "(no interval)" in said
    assert command("report", run.path, "-o", tmp_path / "r.html")[0] == 0
    places = read_masked(as_splits(read_labelled(*given_table(tmp_path))[1]), tmp_path / "masks")
    assert not set(places.train.images.groups) & set(places.test.images.groups)


def given_table(folder: Path) -> tuple[DataConfig, Path, Columns]:
    return DataConfig(str(folder / "images")), folder / "t.csv", Columns(group="patient")


def test_parts_depths_and_black_and_white_masks(tmp_path: Path) -> None:
    """A test part is scored where there is one; images without a mask are left out; 255 alone beside 0 is a class."""
    scenes(tmp_path)
    names = [f"sub/{i}.jpg" for i in range(12)]
    images = np.random.default_rng(0).integers(0, 255, (13, 3, SIDE, SIDE), dtype=np.uint8)
    train, test = ImageSet(images[:9], names=(*names[:8], "none.jpg")), ImageSet(images[9:], names=tuple(names[8:]))
    data = read_masked(Splits("toy", train, None, test), tmp_path / "masks")
    assert (len(data.train.images), len(data.test.images)) == (8, 4)
    assert data.notes == ("1 images without a mask are left out",)
    np.testing.assert_array_equal(
        data.test.targets[0], np.where((m := read_mask(tmp_path / "masks/sub/8.png", (16, 16))) == 255, -1, m)
    )
    for path in (tmp_path / "masks").rglob("*.png"):
        Image.fromarray(np.where(np.asarray(Image.open(path)) == 1, 255, 0).astype(np.uint8)).save(path)
    assert read_masked(Splits("toy", train, None, test), tmp_path / "masks").values == (0, 255)
    deep = np.array([[0, 300], [300, 7]], np.uint16)
    Image.fromarray(deep).save(tmp_path / "deep.png")
    assert read_mask(tmp_path / "deep.png", (4, 2)).tolist() == np.repeat(deep, 2, axis=0).tolist()
    Image.fromarray(deep > 9).save(tmp_path / "bits.png")
    assert read_mask(tmp_path / "bits.png", (2, 2)).tolist() == [[0, 1], [1, 0]]


UPRIGHT: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    1: lambda stored: stored,
    2: lambda stored: stored[:, ::-1],
    3: lambda stored: stored[::-1, ::-1],
    4: lambda stored: stored[::-1],
    5: lambda stored: stored.T,
    6: lambda stored: np.rot90(stored, -1),
    7: lambda stored: np.rot90(stored, 2).T,
    8: lambda stored: np.rot90(stored, 1),
}
"""What EXIF's orientations say is to be done to the pixels in a file (CIPA DC-008, tag 274)."""


WAYS = [(orientation, drawn) for orientation in UPRIGHT for drawn in ("upright", "stored, with its EXIF data")]
WAYS += [(orientation, "stored") for orientation in (1, 5, 6, 7, 8)]  # of the others sizes do not tell


@pytest.mark.parametrize(("orientation", "drawn"), WAYS)
def test_a_mask_is_turned_with_its_image(tmp_path: Path, orientation: int, drawn: str) -> None:
    """Each pixel's grey value tells its class; the first image is a third larger than its mask."""
    rng, exif = np.random.default_rng(0), Image.Exif()
    exif[0x112] = orientation
    for folder in ("images", "masks"):
        (tmp_path / folder).mkdir()
    for number in range(5):
        stored = np.kron(rng.integers(0, 2, (2, 3)), np.ones((8, 8))).astype(np.uint8)
        image = np.kron(stored, np.ones((2, 2), np.uint8)) if number == 0 else stored
        Image.fromarray(200 * image).save(tmp_path / f"images/{number}.png", exif=exif)
        mask = Image.fromarray(np.ascontiguousarray(UPRIGHT[orientation](stored)) if drawn == "upright" else stored)
        mask.save(tmp_path / f"masks/{number}.png", **({"exif": exif} if "EXIF" in drawn else {}))
    for reading in (DataConfig(resize=8), DataConfig(resize=8, crop_mode="squash")):
        reading = dataclasses.replace(reading, source=str(tmp_path / "images"))
        data = read_masked(load(reading), tmp_path / "masks", read=reading)
        for part in (data.train, data.test):
            same = (part.images.images[:, 0] > 100) == part.targets
            assert same.mean() > 0.95
    square = "turned by their EXIF data; their masks are taken to be upright"
    assert (square in " ".join(data.notes)) == (orientation in (2, 3, 4))


def test_a_mask_of_other_proportions_is_refused(tmp_path: Path, command: Any) -> None:
    scenes(tmp_path, 3)
    run, path = make_run(tmp_path / "run", shape=(3, SIDE, SIDE)), tmp_path / "masks/sub/1.png"
    Image.open(path).resize((SIDE, 3 * SIDE)).save(path)
    words = ("--data", tmp_path / "images", "--masks", tmp_path / "masks", "--device", "cpu")
    code, said = command("evaluate", run.path, *words)
    assert (code, said) == (
        2,
        f"pmae: error: mask {path} must be of the proportions of its image, (16, 16) pixels, got (16, 48)\n",
    )


def test_resizing_a_mask_makes_no_classes(tmp_path: Path, command: Any) -> None:
    """Of masks three times as large each pixel is kept, not a mean of the numbers around it: 1 is not half of 2."""
    scenes(tmp_path)
    small = {path.stem: np.asarray(Image.open(path)) for path in (tmp_path / "masks").rglob("*.png")}
    for path in tmp_path.rglob("sub/*.png"):
        Image.open(path).resize((3 * SIDE, 3 * SIDE), Image.Resampling.NEAREST).save(path)
    run = make_run(tmp_path / "run", shape=(3, SIDE, SIDE))
    words = ("--data", tmp_path / "images", "--masks", tmp_path / "masks", "--device", "cpu", "--no-baselines")
    code, said = command("evaluate", run.path, *words)
    assert code == 0, said
    assert run.results["segmentation"]["classes"] == [0, 1, 2]
    reading = DataConfig(str(tmp_path / "images"), resize=SIDE)
    for part in read_masked(load(reading), tmp_path / "masks", read=reading)[:2]:
        for name, mask in zip(part.images.names, part.targets, strict=True):
            np.testing.assert_array_equal(np.where(mask < 0, 255, mask), small[Path(name).stem])


def test_two_images_of_one_name_have_one_mask(tmp_path: Path) -> None:
    scenes(tmp_path)
    with Image.open(tmp_path / "images/sub/0.png") as image:
        image.save(tmp_path / "images/sub/0.bmp")
    found = read_masked(load(DataConfig(str(tmp_path / "images"))), tmp_path / "masks")
    masks = {name: mask for part in found[:2] for name, mask in zip(part.images.names, part.targets, strict=True)}
    assert len(masks) == 13
    np.testing.assert_array_equal(masks["sub/0.bmp"], masks["sub/0.png"])


def test_a_mistake_in_masks_is_one_sentence(tmp_path: Path, command: Any) -> None:
    scenes(tmp_path, 3)
    run, masks = make_run(tmp_path / "run", shape=(3, SIDE, SIDE)), tmp_path / "masks"

    def said(*more: str) -> str:
        words = ("--data", tmp_path / "images", "--masks", masks, "--device", "cpu", *more)
        code, text = command("evaluate", run.path, *words)
        assert (code, len(text.splitlines())) == (2, 1), text
        return str(text)

    (masks / "other.png").write_bytes((masks / "sub/0.png").read_bytes())
    assert "got 1 that are not, such as other.png" in said()
    Image.new("RGB", (4, 4)).save(masks / "sub/0.png")
    (masks / "other.png").unlink()
    assert "sub/0.png must have one channel, of class numbers, got mode RGB" in said()
    (masks / "sub/0.png").write_bytes(b"no picture")
    assert "must be a PNG file" in said()
    for path in masks.rglob("*.png"):
        Image.new("L", (4, 4), 3).save(path)
    assert "two classes or more" in said()
    train, test = (ImageSet(np.zeros((1, 3, 2, 2), np.uint8), names=(name,)) for name in ("0", "1"))
    (tmp_path / "void").mkdir()
    for name, values in enumerate(([[0, 1], [2, 0]], [[255, 255], [255, 255]])):
        Image.fromarray(np.array(values, np.uint8)).save(tmp_path / f"void/{name}.png")
    with pytest.raises(UserError, match="masks of test images must be of pixels of a class"):
        read_masked(Splits("void", train, test=test), tmp_path / "void")
    masks = tmp_path / "nowhere"
    assert "masks must be a folder of PNG files" in said()
    masks = tmp_path / "masks"
    ignored = {"--layers": "2", "--epochs": "1", "--seeds": "2", "--shots": "3", "--label-fraction": "0.5"}
    for option, value in ignored.items():
        assert f"{option} must be left out with masks" in said(option, value)
    assert "segmentation" not in run.results


SIDES = (32, 64)


def swin() -> Encoder:
    sizes: dict[str, Any] = {"embed_dim": 8, "depths": (1, 1), "num_heads": (1, 1), "window_size": 2}
    return Encoder(SwinTransformer(img_size=SIDES, num_classes=0, **sizes), (3, *SIDES))


def named(name: str, **sizes: int) -> Callable[[], Encoder]:
    return lambda: build_encoder(EncoderConfig(name, **sizes), (3, *SIDES))


MADE = {
    "ViT": named("vit_tiny", patch_size=8, width=16, depth=2, heads=2),
    "ResNet": named("resnet10t"),
    "Swin, channels last": swin,
}


@pytest.mark.parametrize("kind", MADE)
def test_maps_are_the_features_of_every_patch(kind: str) -> None:
    """Their mean is the encoder's own pooled feature, and their places those of the image."""
    side, encoder = SIDES, MADE[kind]().eval()
    x = torch.randn(2, 3, *side)
    with torch.no_grad():
        maps = token_maps(encoder, x)
        torch.testing.assert_close(maps.mean((2, 3)), encoder.features(x)["mean"])
        shape = tuple(tokens_of(encoder)(x).shape)
    assert shape[3] == 2 * shape[2]
    patches = pixels_like(encoder)(x)
    assert patches.shape[2:] == maps.shape[2:]
    high, wide = side[0] // shape[2], side[1] // shape[3]
    torch.testing.assert_close(patches[0, :, 0, 1], x[0, :, :high, wide : 2 * wide].flatten())


def test_attention_is_the_softmax_of_the_last_block() -> None:
    """By hand from timm's own layers: queries of [CLS] and keys of all tokens."""
    torch.manual_seed(0)
    encoder = build_encoder(EncoderConfig(patch_size=4, width=16, depth=2, heads=2), (3, 8, 12)).eval()
    net: Any = encoder.net
    x = torch.randn(2, 3, 8, 12)
    with torch.no_grad():
        found = attention_maps(encoder, x)
        tokens = net.blocks[:1](net.norm_pre(net._pos_embed(net.patch_embed(x))))
        q, k, _ = net.blocks[1].attn.qkv(net.blocks[1].norm1(tokens)).view(2, 7, 3, 2, 8).permute(2, 0, 3, 1, 4)
        expected = (q[:, :, :1] @ k.mT * 8**-0.5).softmax(-1)[:, :, 0, 1:]
    assert found is not None
    torch.testing.assert_close(found, expected.view(2, 2, 2, 3))
    assert (
        attention_maps(build_encoder(EncoderConfig("resnet10t"), (3, 32, 32)).eval(), torch.randn(1, 3, 32, 32)) is None
    )


def test_colours_are_principal_components() -> None:
    maps = torch.randn(2, 6, 3, 4) * torch.tensor([9, 5, 3, 1, 1, 0.5])[:, None, None]
    found = colours(maps)
    assert (found.shape, float(found.min()), float(found.max())) == ((2, 3, 4, 3), 0.0, 1.0)
    theirs = PCA(3).fit_transform(maps.movedim(1, -1).reshape(-1, 6).numpy())
    inside = (found.reshape(-1, 3) > 0) & (found.reshape(-1, 3) < 1)
    for i in range(3):
        own = inside[:, i].numpy()
        assert abs(np.corrcoef(found.reshape(-1, 3)[own, i], theirs[own, i])[0, 1]) == pytest.approx(1, abs=1e-5)
    assert colours(torch.randn(1, 2, 3, 3)).shape == (1, 3, 3, 3)
    assert torch.isfinite(colours(torch.zeros(1, 4, 2, 2))).all()
