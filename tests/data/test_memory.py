"""Files that unpack to more than a machine holds: refused by their headers, and never unpacked all at once."""

import threading
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.data.test_decode import write_dicom

from pmae.config import DataConfig
from pmae.data import decode
from pmae.data.sets import load
from pmae.errors import UserError

tifffile = pytest.importorskip("tifffile")
pydicom = pytest.importorskip("pydicom")


def read(folder: Path) -> np.ndarray:
    return load(DataConfig(str(folder), max_unreadable=0)).train.images  # type: ignore[return-value]


def test_threads_wait_for_each_other_and_a_large_one_goes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "BUDGET_BYTES", 1000)
    monkeypatch.setattr(decode, "SMALL_BYTES", 0)
    lock, inside, seen = threading.Lock(), [0], []

    def unpack(values: int) -> None:
        with decode.unpacking(values, 1):
            with lock:
                inside[0] += values
                seen.append(inside[0])
            time.sleep(0.01)
            with lock:
                inside[0] -= values

    threads = [threading.Thread(target=unpack, args=(size,)) for size in [400] * 12 + [5000] * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(seen) == {400, 800, 5000}
    with pytest.raises(ZeroDivisionError), decode.unpacking(900, 1):
        raise ZeroDivisionError
    with decode.unpacking(900, 1):
        assert decode._taken == 900


def test_more_than_is_available_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "available_bytes", lambda: 10**6)
    with pytest.raises(ValueError, match="more than are available"), decode.unpacking(10**7, 1000):
        pytest.fail("it was unpacked")


@pytest.mark.parametrize("compression", [None, "zlib"])
def test_a_large_tiff_is_refused_by_its_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str | None
) -> None:
    pixels = np.zeros((200, 300, 5), np.uint16)
    tifffile.imwrite(
        tmp_path / "a.tif", pixels, photometric="minisblack", planarconfig="contig", compression=compression
    )
    assert read(tmp_path).shape == (1, 5, 200, 300)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 299_999)
    monkeypatch.setattr(tifffile.TiffPageSeries, "asarray", lambda self: pytest.fail("it was unpacked"))
    with pytest.raises(UserError, match=r"a\.tif.*300,000 values, more than 299,999"):
        read(tmp_path)


def test_a_strip_that_is_longer_than_the_header_says_is_refused(tmp_path: Path) -> None:
    pixels = np.zeros((6, 9, 5), np.uint16)
    tifffile.imwrite(tmp_path / "a.tif", pixels, photometric="minisblack", planarconfig="contig", compression="zlib")
    bomb = zlib.compress(bytes(10**6))
    with tifffile.TiffFile(tmp_path / "a.tif") as file:
        (start,), (length,) = file.pages[0].dataoffsets, file.pages[0].databytecounts
        counts = file.pages[0].tags["StripByteCounts"]
        where, width = counts.valueoffset, {3: 2, 4: 4, 16: 8}[int(counts.dtype)]
    content = bytearray((tmp_path / "a.tif").read_bytes())
    assert start + length == len(content)
    content[where : where + width] = len(bomb).to_bytes(width, "little")
    (tmp_path / "a.tif").write_bytes(content[:start] + bomb)
    with pytest.raises(UserError, match="a strip or tile is longer than the header says"):
        read(tmp_path)


def test_a_large_dicom_is_refused_by_its_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_dicom(tmp_path / "a.dcm", np.zeros((200, 300), np.uint16))
    assert read(tmp_path).shape == (1, 1, 200, 300)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 59_999)
    with pytest.raises(UserError, match=r"a\.dcm.*60,000 values, more than 59,999"):
        read(tmp_path)


def test_a_dicom_that_is_deflated_whole_is_counted_before_it_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = np.arange(200 * 300, dtype=np.uint16).reshape(200, 300)
    write_dicom(tmp_path / "a.dcm", pixels, syntax="1.2.840.10008.1.2.1.99")
    assert b"1.2.840.10008.1.2.1.99" in (tmp_path / "a.dcm").read_bytes()
    np.testing.assert_array_equal(read(tmp_path)[0, 0], pixels)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10_000)
    monkeypatch.setattr(pydicom, "dcmread", lambda path: pytest.fail("it was unpacked"))
    with pytest.raises(UserError, match=r"a\.dcm.*it may be a decompression bomb"):
        read(tmp_path)
    content = bytearray((tmp_path / "a.dcm").read_bytes())
    content[140:144] = bytes(4)
    (tmp_path / "a.dcm").write_bytes(content)
    with pytest.raises(UserError, match=r"a\.dcm.*first group is not as long as it says"):
        read(tmp_path)
