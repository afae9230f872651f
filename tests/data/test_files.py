"""Folders of image files, on files written here in the real formats."""

import os
import struct
import warnings
import zlib
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import tifffile
from PIL import Image
from sklearn.datasets import load_sample_image
from torchvision.datasets import ImageFolder
from torchvision.transforms import CenterCrop, InterpolationMode, Resize

from pmae.config import DataConfig
from pmae.data import decode
from pmae.data.images import Splits
from pmae.data.sets import load, load_settled
from pmae.derive import patch_for
from pmae.errors import UserError


def pixels(height: int, width: int, *channels: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, *channels), dtype=np.uint8)


def save(path: Path, array: np.ndarray) -> np.ndarray:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path)
    return array


def png_of_16_bit_colour(height: int, width: int) -> bytes:
    """Made by hand, because Pillow cannot write one."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0)
    rows = zlib.compress((b"\0" + bytes(6 * width)) * height)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def read(folder: Path, **settings: object) -> Splits:
    return load(DataConfig(source=str(folder), **settings))


@pytest.mark.parametrize("suffix", ["png", "bmp", "gif", "tif", "tiff", "PNG"])
def test_lossless_formats_come_back_exactly(tmp_path: Path, suffix: str) -> None:
    saved = [save(tmp_path / f"{i}.{suffix}", pixels(6, 9, 3, seed=i)) for i in range(3)]
    splits = read(tmp_path)
    np.testing.assert_array_equal(splits.train.images, np.stack(saved).transpose(0, 3, 1, 2))
    assert splits.train.labels is None
    assert splits.train.names == tuple(f"{i}.{suffix}" for i in range(3))
    assert splits.notes == ("the folder has no train/ and test/ (or val/)",)


@pytest.mark.parametrize("suffix", ["jpg", "jpeg", "jfif", "webp", "JPEG"])
def test_lossy_formats_come_back_nearly(tmp_path: Path, suffix: str) -> None:
    smooth = np.broadcast_to(np.linspace(0, 255, 32)[:, None, None], (32, 24, 3)).astype(np.uint8)
    Image.fromarray(smooth).save(tmp_path / f"a.{suffix}", quality=95)
    difference = read(tmp_path).train.images[0].transpose(1, 2, 0).astype(int) - smooth
    assert np.abs(difference).mean() < 3


def test_depths_and_modes_are_kept(tmp_path: Path) -> None:
    deep = np.random.default_rng(0).integers(0, 65536, (5, 7), dtype=np.uint16)
    cases = {
        "grey16.png": (deep, deep[None]),
        "grey16.tif": (deep, deep[None]),
        "float.tif": ((deep / 7).astype(np.float32), (deep / 7).astype(np.float32)[None]),
        "int.tif": (deep.astype(np.int32), deep[None]),
        "rgba.png": (pixels(5, 7, 4), pixels(5, 7, 4).transpose(2, 0, 1)),
        "grey.png": (pixels(5, 7), pixels(5, 7)[None]),
    }
    for name, (array, expected) in cases.items():
        folder = tmp_path / name.replace(".", "-")
        save(folder / name, array)
        result = read(folder).train.images[0]
        assert result.dtype == expected.dtype, name
        np.testing.assert_array_equal(result, expected, err_msg=name)


def test_palette_becomes_colour_and_bits_become_grey(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    (tmp_path / "b").mkdir()
    palette = Image.fromarray(pixels(5, 7, 3)).quantize(16)
    palette.save(tmp_path / "p" / "a.png")
    bits = pixels(5, 7) > 127
    Image.fromarray(bits).save(tmp_path / "b" / "a.png")
    np.testing.assert_array_equal(read(tmp_path / "p").train.images[0].transpose(1, 2, 0), palette.convert("RGB"))
    np.testing.assert_array_equal(read(tmp_path / "b").train.images[0, 0], bits * np.uint8(255))


def test_what_would_lose_bits_or_pages_is_refused_not_cut(tmp_path: Path) -> None:
    save(tmp_path / "good.png", pixels(4, 4, 3))
    (tmp_path / "deep.png").write_bytes(png_of_16_bit_colour(4, 4))
    pages = [Image.fromarray(pixels(4, 4, 3, seed=i)) for i in range(2)]
    pages[0].save(tmp_path / "pages.tif", save_all=True, append_images=pages[1:])
    save(tmp_path / "wide.tif", np.full((4, 4), 1 << 20, np.int32))
    with pytest.warns(UserWarning, match="3 unreadable"):
        splits = read(tmp_path)
    assert splits.train.names == ("good.png",)
    assert all(reason in splits.notes[-1] for reason in ("16-bit colour", "2 pages", "more than 16 bits"))


def test_subfolders_are_not_classes_unless_asked(tmp_path: Path) -> None:
    for name in ("b/1.png", "a/deep/2.png", "a/3.png"):
        save(tmp_path / name, pixels(4, 4, 3))
    plain, labelled = read(tmp_path), read(tmp_path, labels="folders")
    assert plain.train.labels is None
    assert plain.train.classes == ()
    reference = ImageFolder(tmp_path)
    assert list(labelled.train.classes) == reference.classes
    expected = {os.path.relpath(path, tmp_path): label for path, label in reference.samples}
    assert labelled.train.labels is not None
    assert dict(zip(labelled.train.names, labelled.train.labels.tolist(), strict=True)) == expected


def test_an_image_in_no_class_folder_is_named(tmp_path: Path) -> None:
    save(tmp_path / "a" / "1.png", pixels(4, 4))
    save(tmp_path / "stray.png", pixels(4, 4))
    with pytest.raises(UserError, match=r"data.labels.*stray.png"):
        read(tmp_path, labels="folders")


@pytest.mark.parametrize("held_out", [("test",), ("val",), ("val", "test")])
def test_split_folders_are_honoured(tmp_path: Path, held_out: tuple[str, ...]) -> None:
    saved = {
        s: save(tmp_path / s / "cat" / "1.png", pixels(4, 4, 3, seed=i)) for i, s in enumerate(("train", *held_out))
    }
    save(tmp_path / "train" / "dog" / "2.png", pixels(4, 4, 3, seed=9))
    save(tmp_path / "elsewhere" / "x.png", pixels(9, 9))
    splits = read(tmp_path, labels="folders")
    assert splits.train.names == ("train/cat/1.png", "train/dog/2.png")
    assert splits.train.classes == ("cat", "dog")
    for split in held_out:
        part = getattr(splits, split)
        np.testing.assert_array_equal(part.images[0].transpose(1, 2, 0), saved[split])
        assert part.labels.tolist() == [0]
        assert part.classes == ("cat", "dog")
    assert (splits.val is None) == ("val" not in held_out)
    assert splits.notes == (f"images beside train/ and {'/ and '.join(held_out)}/ are not read: elsewhere/",)


@pytest.mark.parametrize(
    ("train", "val", "test"),
    [("train", "valid", None), ("Training", None, "Testing"), ("TRAIN", "validation", "test")],
)
def test_split_folders_have_several_names(tmp_path: Path, train: str, val: str | None, test: str | None) -> None:
    """Else all would be trained on, and the splits would be taken for the classes."""
    for place in (name for name in (train, val, test) if name):
        save(tmp_path / place / "cat" / "1.png", pixels(4, 4))
        save(tmp_path / place / "dog" / "2.png", pixels(4, 4))
    splits = read(tmp_path, labels="folders")
    assert splits.train.names == (f"{train}/cat/1.png", f"{train}/dog/2.png")
    for part, name in ((splits.val, val), (splits.test, test)):
        assert (None if part is None else part.names[0]) == (name and f"{name}/cat/1.png")
    assert splits.train.classes == ("cat", "dog")


def test_two_folders_for_one_split_are_refused(tmp_path: Path) -> None:
    for place in ("train", "val", "valid"):
        save(tmp_path / place / "1.png", pixels(4, 4))
    with pytest.raises(UserError, match="one folder for val, got val/ and valid/"):
        read(tmp_path)


def test_classes_named_like_a_split_stay_classes(tmp_path: Path) -> None:
    """A train beside a tram, or beside a test tube."""
    for place in ("train", "tram", "test tube"):
        save(tmp_path / place / "1.png", pixels(4, 4))
    assert read(tmp_path, labels="folders").train.classes == ("test tube", "train", "tram")


def test_a_lone_train_folder_is_not_a_split(tmp_path: Path) -> None:
    save(tmp_path / "train" / "1.png", pixels(4, 4))
    save(tmp_path / "more" / "2.png", pixels(4, 4))
    assert read(tmp_path).train.names == ("more/2.png", "train/1.png")


def test_classes_of_a_folder_with_nothing_but_train_lie_inside_it(tmp_path: Path) -> None:
    for name in ("cat/1.png", "dog/2.png"):
        save(tmp_path / "train" / name, pixels(4, 4))
    (tmp_path / "labels").mkdir()
    (tmp_path / "README.txt").touch()
    train = read(tmp_path, labels="folders").train
    assert (train.names, train.classes) == (("train/cat/1.png", "train/dog/2.png"), ("cat", "dog"))


def test_files_of_several_sizes_become_squares(tmp_path: Path) -> None:
    save(tmp_path / "a.png", pixels(40, 48, 3))
    save(tmp_path / "b.png", pixels(300, 41, 3))
    config = DataConfig(str(tmp_path))
    assert load_settled(config)[0].resize == 40
    found = load(config).train
    assert found.shape == (3, 40, 40)
    assert found.images.dtype == np.uint8
    squashed = load(DataConfig(str(tmp_path), resize=16, crop_mode="squash")).train.images[0]
    reference = Image.open(tmp_path / "a.png").resize((16, 16), Image.Resampling.BICUBIC)
    np.testing.assert_array_equal(squashed.transpose(1, 2, 0), reference)


@pytest.mark.parametrize(("short", "side"), [(5, 5), (15, 15), (30, 24), (63, 56), (64, 64), (79, 64), (300, 224)])
def test_a_derived_side_loses_few_pixels_and_has_patches(tmp_path: Path, short: int, side: int) -> None:
    save(tmp_path / "a.png", pixels(short, short + 1))
    save(tmp_path / "b.png", pixels(short + 2, short))
    assert load_settled(DataConfig(str(tmp_path)))[0].resize == side
    assert side < 16 or 7 <= side / patch_for(side, side) <= 16


def test_headers_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        save(tmp_path / f"{number}.png", pixels(4, 4))
    header = Mock(side_effect=decode.read_header)
    monkeypatch.setattr("pmae.data.ondemand.read_header", header)
    found, splits = load_settled(DataConfig(str(tmp_path), resize=2))
    assert (header.call_count, found.channels, splits.train.shape) == (3, None, (1, 2, 2))


@pytest.mark.parametrize("size", [(64, 96), (37, 90), (90, 37), (20, 21), (32, 32), (3, 47)])
def test_the_centre_is_torchvisions(size: tuple[int, int], tmp_path: Path) -> None:
    save(tmp_path / "a.png", pixels(*size, 3))
    found = read(tmp_path, resize=32).train.images[0]
    reference = CenterCrop(32)(Resize(32, InterpolationMode.BICUBIC)(Image.open(tmp_path / "a.png")))
    np.testing.assert_array_equal(found.transpose(1, 2, 0), reference)


def test_a_thread_of_pixels_is_not_resized_to_gigabytes(tmp_path: Path) -> None:
    save(tmp_path / "a.png", np.full((1, 50_000), 7, np.uint8))
    assert (read(tmp_path, resize=224).train.images == 7).all()


def test_a_large_jpeg_is_unpacked_smaller_and_looks_the_same(tmp_path: Path) -> None:
    photograph = Image.fromarray(load_sample_image("flower.jpg"))
    photograph.save(tmp_path / "a.jpg", quality=95)
    whole = CenterCrop(48)(Resize(48, InterpolationMode.BICUBIC)(Image.open(tmp_path / "a.jpg")))
    found = read(tmp_path, resize=48).train.images[0].transpose(1, 2, 0)
    assert np.abs(found.astype(int) - np.asarray(whole).astype(int)).mean() < 1.5


def test_different_channels_name_two_files_and_the_setting(tmp_path: Path) -> None:
    save(tmp_path / "a.tif", pixels(8, 8, 3))
    tifffile.imwrite(tmp_path / "b.tif", pixels(8, 8, 4), photometric="rgb", extrasamples=["unspecified"])
    with pytest.raises(UserError, match=r"data.channels.*'a.tif' is 3-channel and 'b.tif' is 4-channel"):
        read(tmp_path)


def test_transparency_is_kept_where_all_have_it_and_left_out_where_some_do(tmp_path: Path) -> None:
    colour = save(tmp_path / "b.png", pixels(8, 8, 4))
    assert read(tmp_path).train.shape == (4, 8, 8)
    grey = save(tmp_path / "a.png", pixels(8, 8))
    three, one = read(tmp_path).train.images, read(tmp_path, channels=1).train.images
    np.testing.assert_array_equal(three[0], np.stack([grey] * 3))
    np.testing.assert_array_equal(three[1].transpose(1, 2, 0), colour[..., :3])
    luma = colour[..., :3] @ np.array([0.299, 0.587, 0.114])
    np.testing.assert_allclose(one[1, 0], luma, atol=1)


def test_grey_with_and_without_transparency_is_grey(tmp_path: Path) -> None:
    grey = save(tmp_path / "a.png", pixels(8, 8))
    Image.fromarray(pixels(8, 8, 2), "LA").save(tmp_path / "b.png")
    found = read(tmp_path).train.images
    np.testing.assert_array_equal(found[0, 0], grey)
    np.testing.assert_array_equal(found[1, 0], np.asarray(Image.open(tmp_path / "b.png").getchannel("L")))


def test_different_depths_name_two_files(tmp_path: Path) -> None:
    save(tmp_path / "a.png", pixels(8, 8))
    save(tmp_path / "b.png", pixels(8, 8).astype(np.uint16))
    with pytest.raises(UserError, match=r"'a.png' is uint8 and 'b.png' is uint16"):
        read(tmp_path)


@pytest.mark.parametrize("dtype", ["uint16", "float32"])
def test_deep_images_are_resized_in_their_own_depth(tmp_path: Path, dtype: str) -> None:
    edge = np.zeros((20, 24), dtype)
    edge[:, 12:] = 65535
    save(tmp_path / "a.tif", edge)
    small, three = read(tmp_path, resize=10).train.images, read(tmp_path, resize=10, channels=3).train.images
    assert small.dtype == dtype
    assert small.shape == (1, 1, 10, 10)
    assert three.shape == (1, 3, 10, 10)
    # Bicubic overshoots at the edge; a wrap-around would put small numbers on the bright side.
    assert small[0, 0, :, 6:].min() > 60000
    assert small[0, 0, :, :4].max() < 5000


def truncate(path: Path, share: float = 0.5) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])


def test_unreadable_files_are_listed_and_skipped_up_to_the_cap(tmp_path: Path) -> None:
    kept = [save(tmp_path / f"{i}.png", pixels(8, 8, 3, seed=i)) for i in (1, 4)]
    save(tmp_path / "0.jpg", pixels(64, 64, 3))
    truncate(tmp_path / "0.jpg")
    (tmp_path / "2.png").write_bytes(b"")
    (tmp_path / "3.tif").write_text("no image at all")
    with pytest.warns(UserWarning, match="3 unreadable files"):
        splits = read(tmp_path, max_unreadable=3)
    np.testing.assert_array_equal(splits.train.images, np.stack(kept).transpose(0, 3, 1, 2))
    assert splits.train.names == ("1.png", "4.png")
    note = next(note for note in splits.notes if "unreadable" in note)
    assert all(name in note for name in ("0.jpg", "2.png", "3.tif"))
    assert "truncated" in note
    with pytest.raises(UserError, match=r"data.max_unreadable is 2.*0.jpg"):
        read(tmp_path, max_unreadable=2)


def test_a_folder_of_broken_files_alone_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"x")
    with pytest.raises(UserError, match=r"at least one readable image.*a.png"):
        read(tmp_path)


def test_nan_in_a_float_file_becomes_the_mean_of_its_channel_in_that_file(tmp_path: Path) -> None:
    """As where a satellite saw nothing; to be resized, it is filled first."""
    whole = pixels(16, 16).astype(np.float32)
    gap = np.where(np.arange(256).reshape(16, 16) < 40, np.float32(np.nan), whole)
    filled = np.where(np.isnan(gap), np.nanmean(gap), gap).astype(np.float32)
    for folder, image in (("filled", filled), ("gap", gap)):
        (tmp_path / folder).mkdir()
        save(tmp_path / folder / "a.tif", image)
    for given in ({}, {"resize": 8}):
        with pytest.warns(UserWarning, match="NaN in files is taken for missing: the mean of its channel"):
            found = read(tmp_path / "gap", **given).train.images
        np.testing.assert_array_equal(found, read(tmp_path / "filled", **given).train.images)


@pytest.mark.filterwarnings("ignore:NaN in files is taken for missing")
def test_a_float_file_of_nothing_but_nan_or_with_infinity_counts_as_unreadable(tmp_path: Path) -> None:
    whole = save(tmp_path / "a.tif", pixels(8, 8).astype(np.float32))
    save(tmp_path / "b0.tif", np.full_like(whole, np.nan))
    save(tmp_path / "b1.tif", np.where(np.arange(64).reshape(8, 8) == 9, np.float32(np.inf), whole))
    with pytest.warns(UserWarning, match=r"2 unreadable files: 'b0.tif', 'b1.tif' \(each: ValueError: NaN or infinity"):
        splits = read(tmp_path)
    np.testing.assert_array_equal(splits.train.images, whole[None, None])


def test_a_decompression_bomb_counts_as_unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "a.png", pixels(8, 8))
    save(tmp_path / "bomb.png", np.zeros((100, 100), np.uint8))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.warns(UserWarning, match=r"bomb.png.*DecompressionBombError"):
        splits = read(tmp_path)
    assert splits.train.names == ("a.png",)


def test_more_than_memory_is_refused_with_the_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(4):
        save(tmp_path / f"{i}.png", pixels(10, 10, 3))
    monkeypatch.setattr(decode, "available_bytes", lambda: 1199)
    with pytest.raises(UserError, match=r"4 images of 10x10 pixels.*1,200 bytes.*1,199"):
        read(tmp_path)


def test_links_and_other_files_are_left_alone(tmp_path: Path) -> None:
    save(tmp_path / "a" / "1.png", pixels(4, 4))
    (tmp_path / "a" / "loop").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "a" / "self.png").symlink_to("self.png")
    (tmp_path / "a" / "gone.png").symlink_to("nowhere.png")
    (tmp_path / "a" / "link.png").symlink_to("1.png")
    (tmp_path / "a" / "._1.png").write_bytes(b"not an image")
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "folder.png").mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        splits = read(tmp_path)
    assert splits.train.names == ("a/1.png", "a/link.png")
    assert any("1 linked folders" in note for note in splits.notes)


def test_odd_names_survive(tmp_path: Path) -> None:
    odd = ["a b.png", "ü 画像.png", "new\nline.png", "quote'\".png", "per%cent{}.png", "-dash.png"]
    for name in odd:
        save(tmp_path / name, pixels(4, 4))
    (tmp_path / os.fsdecode(b"latin\xe9.png")).write_bytes((tmp_path / "a b.png").read_bytes())
    names = read(tmp_path).train.names
    assert set(names) == {*odd, "latin\\xe9.png"}
    assert all(name.encode("utf-8") for name in names)


def test_pictures_of_other_kinds_are_told_of(tmp_path: Path) -> None:
    for name in ("IMG_1.HEIC", "IMG_2.heic", "slide.svs", "labels.csv", ".hidden.heic"):
        (tmp_path / name).touch()
    told = ("2 .heic files were passed over, a format that is not read", "1 .svs files were passed over, a format")
    with pytest.raises(UserError, match=f"holds no images .*; {told[0]}; {told[1]}"):
        read(tmp_path)
    save(tmp_path / "a.png", pixels(4, 4))
    save(tmp_path / "b.png", pixels(4, 4))
    notes = read(tmp_path).notes[1:]
    assert [note.startswith(start) for note, start in zip(notes, told, strict=True)] == [True, True]


def test_an_animation_is_left_out_by_name(tmp_path: Path) -> None:
    frames = [Image.fromarray(pixels(4, 4, 3, seed=i)) for i in range(2)]
    frames[0].save(tmp_path / "moving.gif", save_all=True, append_images=frames[1:])
    for name in ("a.gif", "b.gif"):
        frames[0].save(tmp_path / name)
    splits = read(tmp_path)
    assert splits.train.names == ("a.gif", "b.gif")
    assert any("moving.gif" in note and "2 pages in one file" in note for note in splits.notes)


def test_an_empty_folder_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{tmp_path} holds no images"):
        read(tmp_path)


def test_the_figures_of_a_run_are_no_images(tmp_path: Path) -> None:
    save(tmp_path / "a.png", pixels(4, 4))
    save(tmp_path / "runs" / "one" / "figures" / "loss.png", pixels(9, 9))
    for name in ("config.json", "environment.json"):
        (tmp_path / "runs" / "one" / name).write_text("{}")
    save(tmp_path / "notes" / "b.png", pixels(4, 4))
    (tmp_path / "notes" / "config.json").write_text("{}")
    splits = read(tmp_path)
    assert splits.train.names == ("a.png", "notes/b.png")
    assert any("1 folders of runs were passed over" in note for note in splits.notes)


def test_a_path_that_is_not_utf_8_is_one_sentence(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    save(folder / "a.png", pixels(4, 4))
    with pytest.raises(UserError, match=r"data\.source must be text, got .*caf"):
        read(folder)
    inner = tmp_path / "in"
    save(inner / os.fsdecode(b"caf\xe9") / "a.png", pixels(4, 4))
    found = read(inner, labels="folders").train
    assert (found.names, found.classes) == (("caf\\xe9/a.png",), ("caf\\xe9",))
