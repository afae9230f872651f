"""Files that somebody might upload: good, odd, broken and hostile."""

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pmae.app.material import LARGEST_FILE, read_upload
from pmae.errors import UserError

UINT8 = np.dtype("uint8")


def gradient(height: int, width: int) -> np.ndarray:
    """(H, W, 3) bytes that change slowly."""
    down, across = np.mgrid[0:height, 0:width]
    return np.stack([255 * down / height, 255 * across / width, 0 * down + 90], -1).astype(np.uint8)


def bomb(path: Path, side: int) -> Path:
    """A PNG of a few bytes whose header promises side x side pixels."""
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)), (b"IDAT", zlib.compress(b"\0" * 100))]
    whole = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    ]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(whole))
    return path


@pytest.mark.parametrize("suffix", ["png", "bmp", "tif", "webp"])
def test_a_picture_is_resized_as_pillow_does(tmp_path: Path, suffix: str) -> None:
    picture = Image.fromarray(gradient(90, 120))
    picture.save(tmp_path / f"a.{suffix}", **({"lossless": True} if suffix == "webp" else {}))
    found = read_upload(tmp_path / f"a.{suffix}", (3, 16, 24), UINT8, 0, 255)
    reference = np.asarray(picture.resize((24, 16), Image.Resampling.BICUBIC)).transpose(2, 0, 1)
    assert found.dtype == np.uint8
    np.testing.assert_allclose(found.astype(int), reference.astype(int), atol=1)


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1", "CMYK", "I;16"])
@pytest.mark.parametrize("channels", [1, 3])
def test_every_mode_becomes_the_channels_of_the_data(tmp_path: Path, mode: str, channels: int) -> None:
    grey = np.full((12, 10), 40_000 if mode == "I;16" else 255, np.uint16 if mode == "I;16" else np.uint8)
    picture = Image.fromarray(grey) if mode == "I;16" else Image.fromarray(grey).convert("RGB").convert(mode)
    picture.save(tmp_path / "a.tif")
    found = read_upload(tmp_path / "a.tif", (channels, 8, 8), UINT8, 0, 255)
    expected = round(40_000 / 65_535 * 255) if mode == "I;16" else 255
    assert found.shape == (channels, 8, 8)
    assert set(np.unique(found)) == {expected}


@pytest.mark.parametrize(
    ("dtype", "low", "high"), [("uint8", 0, 16), ("float32", 0, 1), ("int16", -100, 900), ("uint16", 0, 4000)]
)
def test_black_and_white_become_those_of_the_data(tmp_path: Path, dtype: str, low: float, high: float) -> None:
    halves = np.zeros((32, 32), np.uint8)
    halves[:, 16:] = 255
    Image.fromarray(halves).save(tmp_path / "a.png")
    found = read_upload(tmp_path / "a.png", (1, 32, 32), np.dtype(dtype), low, high)
    assert found.dtype == dtype
    assert (found.min(), found.max()) == (low, high)


def test_deep_files_keep_the_units_of_deep_data(tmp_path: Path) -> None:
    pixels = np.arange(64, dtype=np.uint16).reshape(8, 8) * 500
    Image.fromarray(pixels).save(tmp_path / "a.png")
    np.testing.assert_array_equal(read_upload(tmp_path / "a.png", (1, 8, 8), np.dtype("uint16"), 7, 9)[0], pixels)


def test_what_is_no_picture_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "notes.png").write_text("not a picture")
    with pytest.raises(UserError, match=r"upload must be an image \(PNG, .*\), got 'notes.png'"):
        read_upload(tmp_path / "notes.png", (3, 8, 8), UINT8, 0, 255)
    (tmp_path / "empty.jpg").write_bytes(b"")
    with pytest.raises(UserError, match="must be an image"):
        read_upload(tmp_path / "empty.jpg", (3, 8, 8), UINT8, 0, 255)


def test_a_broken_picture_is_refused_without_its_folder(tmp_path: Path) -> None:
    Image.fromarray(gradient(64, 64)).save(tmp_path / "a.png")
    whole = (tmp_path / "a.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"can be read, got 'cut.png'") as caught:
        read_upload(tmp_path / "cut.png", (3, 8, 8), UINT8, 0, 255)
    assert str(tmp_path) not in str(caught.value)


@pytest.mark.parametrize("side", [8_000, 12_000, 60_000])
def test_a_small_file_that_unpacks_to_many_pixels_is_refused_by_its_header(tmp_path: Path, side: int) -> None:
    with pytest.raises(UserError, match=r"at most 50,000,000 pixels, got 'bomb.png'"):
        read_upload(bomb(tmp_path / "bomb.png", side), (3, 8, 8), UINT8, 0, 255)


def test_a_large_file_is_refused_unread(tmp_path: Path) -> None:
    with (tmp_path / "large.png").open("wb") as file:
        file.truncate(LARGEST_FILE + 1)
    with pytest.raises(UserError, match="at most 20,971,520 bytes, got '20,971,521 bytes'"):
        read_upload(tmp_path / "large.png", (3, 8, 8), UINT8, 0, 255)


def test_data_of_many_channels_takes_no_uploads(tmp_path: Path) -> None:
    Image.fromarray(gradient(8, 8)).save(tmp_path / "a.png")
    with pytest.raises(UserError, match="upload must have the data's 5 channels"):
        read_upload(tmp_path / "a.png", (5, 8, 8), UINT8, 0, 255)
