"""Photographs are read the way up they were taken, from folders, shards and tables alike."""

import io
import tarfile
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image, ImageOps

from pmae.config import DataConfig
from pmae.data.sets import load

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 9, 3), dtype=np.uint8)
ORIENTATION = 0x0112


def photograph(orientation: int, kind: str = "PNG") -> bytes:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    file = io.BytesIO()
    Image.fromarray(PIXELS).save(file, kind, exif=exif, quality=100)
    return file.getvalue()


def upright(content: bytes) -> np.ndarray:
    """As Pillow itself turns it."""
    with Image.open(io.BytesIO(content)) as image:
        return np.asarray(ImageOps.exif_transpose(image)).transpose(2, 0, 1)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF"])
def test_orientation_is_applied(tmp_path: Path, orientation: int, kind: str) -> None:
    content, name = photograph(orientation, kind), f"a.{kind.lower()}"
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / name).write_bytes(content)
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        info = tarfile.TarInfo(name)
        info.size = len(content)
        archive.addfile(info, io.BytesIO(content))
    pyarrow.parquet.write_table(pyarrow.table({"image": [{"bytes": content, "path": name}]}), tmp_path / "a.parquet")
    for source in ("folder", "a.tar", "a.parquet"):
        found = load(DataConfig(str(tmp_path / source))).train.images[:]
        assert found.shape[2:] == ((6, 9) if orientation < 5 else (9, 6))
        np.testing.assert_array_equal(found[0], upright(content))


def test_orientation_is_applied_before_resizing_and_to_deep_images(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "a.png").write_bytes(photograph(6))
    turned = Image.fromarray(PIXELS).transpose(Image.Transpose.ROTATE_270).resize((4, 4), Image.Resampling.BICUBIC)
    found = load(DataConfig(str(tmp_path / "plain"), resize=4)).train.images[0]
    np.testing.assert_array_equal(found.transpose(1, 2, 0), turned)
    exif = Image.Exif()
    exif[ORIENTATION] = 8
    (tmp_path / "deep").mkdir()
    deep = PIXELS[..., 0].astype(np.uint16) * 200
    Image.fromarray(deep).save(tmp_path / "deep" / "a.png", exif=exif)
    np.testing.assert_array_equal(load(DataConfig(str(tmp_path / "deep"))).train.images[0, 0], np.rot90(deep))


def test_damaged_exif_data_do_not_make_a_photograph_unreadable(tmp_path: Path) -> None:
    content = photograph(6, "JPEG")
    at = content.index(b"Exif") + 6
    (tmp_path / "a.jpg").write_bytes(content[:at] + b"\xff" * 8 + content[at + 8 :])
    assert load(DataConfig(str(tmp_path))).train.shape == (3, 6, 9)
