"""Image files as arrays: photographs upright, and TIFF and DICOM on files that tifffile and pydicom write here."""

import io
import sys
import tarfile
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image, ImageCms, ImageOps

from pmae.config import DataConfig
from pmae.data.images import ImageSet
from pmae.data.sets import load, load_settled
from pmae.errors import UserError

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


@pytest.mark.parametrize("compression", ["tiff_lzw", "jpeg"])
def test_a_tiff_of_brightness_and_two_differences_becomes_colours(tmp_path: Path, compression: str) -> None:
    smooth = Image.fromarray(PIXELS).resize((48, 32))
    smooth.convert("YCbCr").save(tmp_path / "a.tif", compression=compression)
    for channels in (None, 3):
        found = load(DataConfig(str(tmp_path), channels=channels)).train.images[0].transpose(1, 2, 0)
        assert np.abs(found.astype(int) - np.asarray(smooth)).mean() < 4


@pytest.mark.parametrize("channels", [None, 1, 3])
def test_one_that_nobody_reads_is_not_called_cut_short(tmp_path: Path, channels: int | None) -> None:
    Image.fromarray(PIXELS).convert("YCbCr").save(tmp_path / "a.tif")
    with pytest.raises(UserError, match="no colours but YCBCR"):
        load(DataConfig(str(tmp_path), channels=channels))


def test_lab_numbers_are_not_taken_for_colours(tmp_path: Path) -> None:
    profiles = (ImageCms.createProfile(name) for name in ("sRGB", "LAB"))
    made = ImageCms.profileToProfile(Image.fromarray(PIXELS), *profiles, outputMode="LAB")
    made.save(tmp_path / "a.tif")
    found = load(DataConfig(str(tmp_path))).train.images[0].transpose(1, 2, 0)
    assert np.abs(found.astype(int) - PIXELS).mean() < 3, "colours come back to the rounding of 8 bits"


def test_orientation_is_applied_before_resizing_and_to_deep_images(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "a.png").write_bytes(photograph(6))
    turned = Image.fromarray(PIXELS).transpose(Image.Transpose.ROTATE_270).resize((4, 4), Image.Resampling.BICUBIC)
    found = load(DataConfig(str(tmp_path / "plain"), resize=4, crop_mode="squash")).train.images[0]
    np.testing.assert_array_equal(found.transpose(1, 2, 0), turned)
    exif = Image.Exif()
    exif[ORIENTATION] = 8
    (tmp_path / "deep").mkdir()
    deep = PIXELS[..., 0].astype(np.uint16) * 200
    Image.fromarray(deep).save(tmp_path / "deep" / "a.png", exif=exif)
    np.testing.assert_array_equal(load(DataConfig(str(tmp_path / "deep"))).train.images[0, 0], np.rot90(deep))


def test_a_photograph_may_say_in_xmp_how_it_is_turned(tmp_path: Path) -> None:
    turned = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    Image.fromarray(PIXELS).save(tmp_path / "a.jpg", xmp=turned)
    data = load(DataConfig(str(tmp_path), resize=6)).train
    assert data.originals is not None
    expected = upright((tmp_path / "a.jpg").read_bytes())
    np.testing.assert_array_equal(data.originals.capped(9).ragged(np.zeros(1, int))[0], expected)
    np.testing.assert_array_equal(load(DataConfig(str(tmp_path))).train.images[0], expected)


def test_damaged_exif_data_do_not_make_a_photograph_unreadable(tmp_path: Path) -> None:
    content = photograph(6, "JPEG")
    at = content.index(b"Exif") + 6
    (tmp_path / "a.jpg").write_bytes(content[:at] + b"\xff" * 8 + content[at + 8 :])
    assert load(DataConfig(str(tmp_path))).train.shape == (3, 6, 9)


tifffile = pytest.importorskip("tifffile")
pydicom = pytest.importorskip("pydicom")


def read(folder: Path, **settings: object) -> ImageSet:
    return load(DataConfig(source=str(folder), **settings)).train


def numbers(*shape: int, dtype: type = np.uint16) -> np.ndarray:
    return np.random.default_rng(0).integers(0, np.iinfo(dtype).max, shape).astype(dtype)


def write_dicom(path: Path, pixels: np.ndarray, syntax: str = "1.2.840.10008.1.2.1", **header: object) -> None:
    from pydicom.dataset import FileMetaDataset
    from pydicom.uid import UID, CTImageStorage, generate_uid

    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID, meta.TransferSyntaxUID = CTImageStorage, UID(syntax)
    meta.MediaStorageSOPInstanceUID = generate_uid()
    little = meta.TransferSyntaxUID.is_little_endian
    file = pydicom.FileDataset(str(path), {}, file_meta=meta, preamble=b"\0" * 128, is_little_endian=little)
    bits = 8 * pixels.itemsize
    colour = pixels.shape[-1] == 3
    plain = {"Rows": pixels.shape[-3 if colour else -2], "Columns": pixels.shape[-2 if colour else -1]}
    plain |= {"SamplesPerPixel": 3 if colour else 1, "PhotometricInterpretation": "RGB" if colour else "MONOCHROME2"}
    plain |= {"BitsAllocated": bits, "BitsStored": bits, "HighBit": bits - 1}
    plain |= {"PixelRepresentation": int(pixels.dtype.kind == "i"), "PlanarConfiguration": 0 if colour else None}
    for key, value in {**plain, **header}.items():
        if value is not None:
            setattr(file, key, value)
    file.PixelData = pixels.tobytes()
    file.save_as(path, enforce_file_format=True)


@pytest.mark.parametrize(
    ("pixels", "options", "channel_axis"),
    [
        (numbers(6, 9, 3), {"photometric": "rgb"}, 2),
        (numbers(6, 9, 5), {"photometric": "minisblack", "planarconfig": "contig"}, 2),
        (numbers(4, 6, 9), {"photometric": "minisblack", "planarconfig": "separate"}, 0),
        (numbers(4, 6, 9), {"imagej": True, "metadata": {"axes": "CYX"}}, 0),
        (numbers(6, 9, 3), {"photometric": "rgb", "byteorder": ">"}, 2),
        (numbers(6, 9, 3, dtype=np.uint8) / np.float32(7), {"photometric": "rgb"}, 2),
        (numbers(6, 9, 3), {"photometric": "rgb", "compression": "zlib"}, 2),
        (numbers(3, 6, 9), {"photometric": "rgb", "planarconfig": "separate"}, 0),
        (numbers(6, 9, 4, dtype=np.uint8), {"photometric": "rgb", "extrasamples": ["unspecified"]}, 2),
    ],
    ids=["rgb16", "five", "planar", "imagej", "big-endian", "float", "compressed", "rgb-planes", "infrared"],
)
def test_a_tiff_keeps_its_channels_and_depth(
    tmp_path: Path, pixels: np.ndarray, options: dict[str, object], channel_axis: int
) -> None:
    for number in range(2):
        tifffile.imwrite(tmp_path / f"{number}.tif", pixels, **options)
    found = read(tmp_path).images
    assert found.dtype == pixels.dtype
    np.testing.assert_array_equal(found, np.stack([np.moveaxis(pixels, channel_axis, 0)] * 2))


def test_a_fourth_channel_is_left_out_where_three_are_asked_for(tmp_path: Path) -> None:
    pixels = numbers(6, 9, 4, dtype=np.uint8)
    tifffile.imwrite(tmp_path / "a.tif", pixels, photometric="rgb", extrasamples=["unspecified"])
    np.testing.assert_array_equal(read(tmp_path, channels=3).images[0], pixels[..., :3].transpose(2, 0, 1))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("shape", [(6, 9), (6, 9, 3)], ids=["grey", "colour"])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_a_tiff_is_turned_upright_whoever_reads_it(
    tmp_path: Path, orientation: int, shape: tuple[int, ...], dtype: type
) -> None:
    pixels = numbers(*shape, dtype=dtype)
    turned = [pixels, pixels[:, ::-1], pixels[::-1, ::-1], pixels[::-1]]  # and then with rows as columns
    turned += [np.swapaxes(pixels, 0, 1), np.rot90(pixels, -1), np.swapaxes(turned[2], 0, 1), np.rot90(pixels)]
    for folder in ("one", "both"):
        (tmp_path / folder).mkdir()
        extra = [(ORIENTATION, 3, 1, orientation, True)]
        tifffile.imwrite(tmp_path / folder / "a.tif", pixels, extratags=extra, metadata=None)
    expected = np.moveaxis(np.atleast_3d(turned[orientation - 1]), 2, 0)
    np.testing.assert_array_equal(read(tmp_path / "one").images[0], expected)
    # Upright beside turned: sizes differ, which the headers tell.
    tifffile.imwrite(tmp_path / "both" / "b.tif", pixels)
    config = load_settled(DataConfig(str(tmp_path / "both")))[0]
    assert config.resize == (None if orientation < 5 else 6)


@pytest.mark.parametrize(("dtype", "ends"), [(np.uint8, 255), (np.uint16, 65535), (np.int16, -1), (np.float32, None)])
@pytest.mark.parametrize("channels", [1, 2])
def test_a_tiff_from_white_to_black_is_turned_round(
    tmp_path: Path, dtype: type, ends: int | None, channels: int
) -> None:
    pixels = np.random.default_rng(0).integers(0, 99, (channels, 6, 9)).astype(dtype)
    planes = {"planarconfig": "separate"} if channels > 1 else {}
    tifffile.imwrite(tmp_path / "a.tif", pixels, photometric="miniswhite", **planes)
    expected = pixels if ends is None else ends - pixels.astype(int)
    np.testing.assert_array_equal(read(tmp_path).images[0], expected)


@pytest.mark.parametrize(
    ("pixels", "options", "told"),
    [
        (numbers(6, 9, dtype=np.int8), {}, "unsupported depth int8"),
        (numbers(6, 9, 4), {"photometric": "separated"}, "no colours but SEPARATED"),
        (numbers(6, 9), {"photometric": "palette", "colormap": numbers(3, 2**16)}, "no colours but PALETTE"),
    ],
    ids=["signed bytes", "inks", "palette"],
)
def test_numbers_that_are_no_colours_are_named(
    tmp_path: Path, pixels: np.ndarray, options: dict[str, object], told: str
) -> None:
    tifffile.imwrite(tmp_path / "a.tif", pixels, **options)
    with pytest.raises(UserError, match=told):
        read(tmp_path)


def test_a_stack_of_planes_is_no_image(tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "stack.tif", numbers(7, 6, 9), imagej=True, metadata={"axes": "ZYX"})
    with pytest.raises(UserError, match=r"stack\.tif.*7 pages in one file"):
        read(tmp_path)


def test_channels_that_were_written_as_a_stack_are_told_how_to_be_written(tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "a.tif", numbers(16, 12, 5), photometric="minisblack")
    with pytest.raises(UserError, match=r"16 pages in one file; .*; where the 5 are channels, .* planarconfig="):
        read(tmp_path)
    tifffile.imwrite(tmp_path / "a.tif", numbers(16, 12, 5), photometric="minisblack", planarconfig="contig")
    assert read(tmp_path).images.shape == (1, 5, 16, 12)


def test_files_that_are_unreadable_for_one_reason_have_it_told_once(tmp_path: Path) -> None:
    for number in range(3):
        tifffile.imwrite(tmp_path / f"{number}.tif", numbers(7, 6, 9), imagej=True, metadata={"axes": "ZYX"})
    with pytest.raises(
        UserError, match=r"'0\.tif', '1\.tif', '2\.tif' \(each: ValueError: 7 pages in one file"
    ) as found:
        read(tmp_path)
    assert str(found.value).count("7 pages") == 1


def test_pillow_does_not_speak_of_every_file_with_many_channels(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(2):
        pixels = numbers(8, 8, 13, dtype=np.uint16)
        tifffile.imwrite(tmp_path / f"{number}.tif", pixels, photometric="minisblack", planarconfig="contig")
    assert read(tmp_path).images.shape == (2, 13, 8, 8)
    assert not caplog.records


def test_deep_channels_are_resized_one_by_one(tmp_path: Path) -> None:
    flat = np.stack([np.full((6, 9), value, np.uint16) for value in (7, 300, 65535, 0)], -1)
    tifffile.imwrite(tmp_path / "a.tif", flat, photometric="minisblack", planarconfig="contig")
    found = read(tmp_path, resize=4).images
    assert found.shape == (1, 4, 4, 4)
    assert found.max((2, 3)).tolist() == found.min((2, 3)).tolist() == [[7, 300, 65535, 0]]
    with pytest.raises(UserError, match=r"4 channels, which data\.channels 3 cannot make"):
        read(tmp_path, channels=3)


def test_deep_colour_becomes_the_grey_that_pillow_makes_of_8_bits(tmp_path: Path) -> None:
    colour = numbers(6, 9, 3) // 257 * 257
    tifffile.imwrite(tmp_path / "a.tif", colour, photometric="rgb")
    (found,) = read(tmp_path, channels=1).images
    expected = np.asarray(Image.fromarray((colour // 257).astype(np.uint8)).convert("L"))
    assert (found.dtype, found.shape) == (np.uint16, (1, 6, 9))
    np.testing.assert_allclose(found[0] / 257, expected, atol=0.51)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int16])
def test_a_dicom_file_keeps_its_depth(tmp_path: Path, dtype: type) -> None:
    pixels = numbers(6, 9, dtype=dtype)
    write_dicom(tmp_path / "a.dcm", pixels)
    found = read(tmp_path).images
    assert found.dtype == dtype
    np.testing.assert_array_equal(found[0, 0], pixels)
    assert read(tmp_path, channels=3).shape == (3, 6, 9)


def test_a_colour_dicom_is_three_channels(tmp_path: Path) -> None:
    pixels = numbers(6, 9, 3, dtype=np.uint8)
    write_dicom(tmp_path / "a.dcm", pixels)
    np.testing.assert_array_equal(read(tmp_path).images[0], pixels.transpose(2, 0, 1))


def test_units_follow_the_header(tmp_path: Path) -> None:
    pixels = numbers(6, 9) % 4096
    write_dicom(tmp_path / "a.dcm", pixels, RescaleSlope="2", RescaleIntercept="-1024")
    found = read(tmp_path).images
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found[0, 0], 2.0 * pixels - 1024)


def test_a_ct_is_in_its_units_whether_or_not_they_were_saved_as_they_are(tmp_path: Path) -> None:
    pixels = numbers(6, 9, dtype=np.int16) - 1024
    write_dicom(tmp_path / "a.dcm", pixels, Modality="CT", RescaleSlope="1", RescaleIntercept="0")
    write_dicom(tmp_path / "b.dcm", (pixels + 1024).astype(np.uint16), Modality="CT", RescaleIntercept="-1024")
    found = read(tmp_path).images
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found[:, 0], np.stack([pixels, pixels]))


def test_the_order_of_bytes_does_not_matter(tmp_path: Path) -> None:
    pixels = numbers(6, 9, dtype=np.int16)
    write_dicom(tmp_path / "a.dcm", pixels.astype(">i2"), "1.2.840.10008.1.2.2")
    write_dicom(tmp_path / "b.dcm", pixels)
    np.testing.assert_array_equal(read(tmp_path).images[:, 0], np.stack([pixels, pixels]))


def test_white_to_black_is_turned_round(tmp_path: Path) -> None:
    pixels = numbers(6, 9) % 4096
    write_dicom(tmp_path / "a.dcm", pixels, PhotometricInterpretation="MONOCHROME1", BitsStored=12, HighBit=11)
    np.testing.assert_array_equal(read(tmp_path).images[0, 0], 4095 - pixels)


def test_frames_are_not_one_image_and_nonsense_is_named(tmp_path: Path) -> None:
    write_dicom(tmp_path / "frames.dcm", numbers(2, 6, 9), NumberOfFrames=2)
    (tmp_path / "nonsense.dcm").write_text("no image at all")
    with pytest.raises(UserError, match=r"'frames\.dcm' \(ValueError: 2 frames.*'nonsense\.dcm'"):
        read(tmp_path)


def test_without_the_extra_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_dicom(tmp_path / "a.dcm", numbers(6, 9))
    tifffile.imwrite(tmp_path / "b.tif", numbers(6, 9, 3), photometric="rgb")
    monkeypatch.setitem(sys.modules, "pydicom", None)
    monkeypatch.setitem(sys.modules, "tifffile", None)
    with pytest.raises(UserError, match=r"pydicom.*pip install 'pmae\[data\]'.*tifffile.*pip install 'pmae\[data\]'"):
        read(tmp_path)
