"""Crops from the pixels of files: against torchvision given the same boxes, and the same wherever the pixels wait."""

import errno
import os
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as F

from pmae import api
from pmae.config import AugmentConfig, Config, DataConfig, replace
from pmae.data import crops, jpeg
from pmae.data.augment import Boxes, boxes_of, draw_crops
from pmae.data.ragged import ragged
from pmae.data.sets import load, load_settled
from pmae.errors import UserError
from pmae.runs import Run

CPU = torch.device("cpu")
SIZES = [(60, 40), (33, 90), (48, 48), (40, 70), (9, 64), (41, 1)]


def photograph(seed: int, width: int, height: int) -> Image.Image:
    """Smooth colours with some grain."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (5, 5, 3), dtype=np.uint8)).resize((width, height))
    return Image.fromarray((np.asarray(coarse) * 0.8 + rng.integers(0, 50, (height, width, 3))).astype(np.uint8))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty-two photographs, most larger than 16 pixels, of many sizes."""
    path = tmp_path_factory.mktemp("photographs")
    for number in range(32):
        photograph(number, *SIZES[number % len(SIZES)]).save(path / f"{number:02d}.png")
    return path


def of_folder(folder: Path, noise: torch.Tensor, config: AugmentConfig) -> tuple[torch.Tensor, Boxes]:
    """Crops of the first images, as training gets them, and their boxes."""
    data = load(DataConfig(str(folder), resize=16)).train
    plan = crops.plan_crops(data, Config(augment=config), CPU)
    assert plan is not None
    (found,) = crops.Crops(plan, (16, 16), config, CPU).each([(torch.arange(6), noise)])
    heights, widths = torch.tensor([SIZES[i % 6][::-1] for i in range(len(noise))]).float().T
    return found, boxes_of(noise, heights, widths, config)


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
def test_crops_of_two_views_are_torchvisions_of_the_same_boxes(folder: Path, interpolation: str) -> None:
    config = AugmentConfig(interpolation=interpolation, crop_scale=(0.02, 1.0))  # type: ignore[arg-type]
    noise = draw_crops(12, torch.Generator().manual_seed(1), CPU)
    found, boxes = of_folder(folder, noise, config)
    images = [F.pil_to_tensor(Image.open(folder / f"{i % 6:02d}.png")) for i in range(12)]
    assert found.dtype == torch.uint8
    for image, ours, *box, flip in zip(images, found, *boxes, strict=True):
        wanted = F.resized_crop(image, *map(int, box), [16, 16], InterpolationMode(interpolation), antialias=True)
        wanted = F.horizontal_flip(wanted) if flip else wanted
        assert int((ours.int() - wanted.int()).abs().max()) <= 1


@pytest.mark.parametrize("depth", [torch.uint8, torch.int32])
def test_matrix_multiplications_cut_the_same_crops(depth: torch.dtype) -> None:
    """What a GPU does, here on a CPU."""
    pixels = torch.randint(0, 256, (3 * sum(w * h for w, h in SIZES),)).to(depth)
    images = ragged(pixels, np.array([(h, w, 3) for w, h in SIZES]))
    heights, widths = torch.from_numpy(images.sizes).float().T
    boxes = boxes_of(draw_crops(6, torch.Generator().manual_seed(2), CPU), heights, widths, AugmentConfig())
    plain = crops.crop_ragged(images, range(6), boxes, (24, 20), "bicubic")
    found = crops.by_gemm(images, np.arange(6), boxes, (24, 20), "bicubic", plain=True)
    assert found.dtype == plain.dtype
    assert float((found.float() - plain.float()).abs().max()) <= (1 if depth == torch.uint8 else 1e-3)


@pytest.mark.parametrize("threads", [1, 3, 40])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_some_images_are_copied_into_one_piece(threads: int, dtype: torch.dtype) -> None:
    sizes = np.array([(h, w, 3) for w, h in SIZES])
    images = ragged(torch.arange(int(sizes.prod(1).sum())).to(dtype), sizes)
    wanted = np.array([4, 0, 5, 4, 2])
    found = images.take(wanted, threads)
    assert found.pixels.dtype == dtype
    for place, image in enumerate(wanted):
        whole = (0, 0, *map(int, images.sizes[image]))
        assert torch.equal(found.window(place, *whole), images.window(int(image), *whole))


def test_no_more_pixels_are_kept_than_crops_can_use(tmp_path: Path) -> None:
    photograph(0, 400, 300).save(tmp_path / "a.png")
    photograph(1, 90, 30).save(tmp_path / "b.jpg")
    data = load(DataConfig(str(tmp_path), resize=16)).train
    plan = crops.plan_crops(data, Config(), CPU)
    assert plan is not None
    kept = [image.shape for image in plan.images.ragged(np.arange(2))]
    assert kept == [(3, 36, 48), (3, 30, 90)]  # 16 / sqrt(0.2) is 35.8
    assert plan.bytes == 3 * (36 * 48 + 30 * 90)
    assert str(plan) == "crops are cut from the files' own pixels, about 13.3 kB, in memory"


def test_files_no_larger_than_the_squares_are_cropped_as_arrays_are(folder: Path, tmp_path: Path) -> None:
    for number in range(4):
        photograph(number, 16, 12 + number).save(tmp_path / f"{number}.png")
    small = load(DataConfig(str(tmp_path), resize=16)).train
    large = load(DataConfig(str(folder), resize=16)).train
    squashed = load(DataConfig(str(folder), resize=16, crop_mode="squash")).train
    asked = Config(augment=AugmentConfig(crop_from="square"))
    for data, config in [(small, Config()), (squashed, Config()), (large, asked)]:
        assert crops.plan_crops(data, config, CPU) is None
    assert crops.plan_crops(large, Config(augment=AugmentConfig(crop=False)), CPU) is None


def weights(run: Path) -> dict[str, bytes]:
    tensors = load_file(Run(run).checkpoint() / "encoder.safetensors")
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


@pytest.mark.usefixtures("no_figures")
def test_training_on_files_is_a_function_of_the_seed(
    folder: Path, tmp_path: Path, tiny: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"data__source": str(folder), "data__resize": 16, "train__batch_size": 8, "train__epochs": 2}
    config = replace(tiny, **changes, objective__contrastive_weight=1.0)
    api.pretrain(config, out=tmp_path / "whole")
    assert "crops are cut from the files' own pixels" in capsys.readouterr().out
    # Decoded anew for every batch, stopped and resumed, it ends with the same bits.
    monkeypatch.setattr(crops, "available_bytes", lambda: 0)
    api.pretrain(config, out=tmp_path / "cut", until=1, quiet=True)
    # From a cache too.
    cache = tmp_path / "cache"
    api.pretrain(replace(config, data__cache=str(cache)), out=tmp_path / "cut", resume=True)
    assert f"in the cache {str(cache)!r}" in capsys.readouterr().out
    assert weights(tmp_path / "cut") == weights(tmp_path / "whole")
    api.pretrain(replace(config, augment__crop_from="square"), out=tmp_path / "squares", quiet=True)
    assert weights(tmp_path / "squares") != weights(tmp_path / "whole")


@pytest.mark.usefixtures("no_figures")
def test_a_batch_in_parts_trains_the_same(folder: Path, tmp_path: Path, tiny: Config) -> None:
    changes = {"data__source": str(folder), "data__resize": 16, "train__batch_size": 8, "train__epochs": 1}
    for parts in (1, 2):
        api.pretrain(replace(tiny, **changes, train__accumulate=parts), out=tmp_path / str(parts), quiet=True)
    one, two = (load_file(Run(tmp_path / n).checkpoint() / "encoder.safetensors") for n in "12")
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, atol=2e-4, rtol=1e-3)


@pytest.fixture
def cache(folder: Path, tmp_path: Path) -> Callable[..., list[Path]]:
    """Fill a cache with a folder's photographs, with other settings if need be; its entries afterwards."""

    def fill(source: Path = folder, side: int = 16) -> list[Path]:
        config = Config(DataConfig(str(source), resize=side, cache=str(tmp_path / "cache")))
        plan = crops.plan_crops(load(config.data).train, config, CPU)
        assert plan is not None
        held = plan.held(CPU)
        assert held is not None
        plain = plan.images.ragged(np.arange(len(plan.images)))
        assert all(np.array_equal(held.window(i, 0, 0, *x.shape[1:]), x) for i, x in enumerate(plain))
        return sorted((tmp_path / "cache").iterdir())

    return fill


def test_a_cache_has_an_entry_for_other_settings_and_other_files(
    folder: Path, tmp_path: Path, cache: Callable[..., list[Path]]
) -> None:
    (entry,) = cache()
    written = {file: file.stat().st_mtime_ns for file in entry.iterdir()}
    assert cache() == [entry]
    assert {file: file.stat().st_mtime_ns for file in entry.iterdir()} == written
    assert len(cache(side=12)) == 2
    source = Path(shutil.copytree(folder, tmp_path / "copy", copy_function=shutil.copy2))
    assert len(cache(source)) == 2
    photograph(99, 60, 40).save(source / "00.png")
    assert len(cache(source)) == 3


def test_files_alike_in_name_size_and_time_are_told_apart(tmp_path: Path, cache: Callable[..., list[Path]]) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        for number in range(3):
            place = tmp_path / folder / f"{number}.bmp"
            photograph(number + 10 * (folder == "b"), 60, 40).save(place)
            os.utime(place, (0, 0))
    assert [len(cache(tmp_path / folder)) for folder in ("a", "b", "a")] == [1, 2, 2]


def test_a_damaged_entry_is_written_again(cache: Callable[..., list[Path]]) -> None:
    (entry,) = cache()
    os.truncate(entry / "pixels.uint8", 1000)
    assert cache() == [entry]


def test_a_file_in_place_of_the_cache_is_one_sentence(tmp_path: Path, cache: Callable[..., list[Path]]) -> None:
    (tmp_path / "cache").touch()
    with pytest.raises(UserError, match="cache' failed because a file is in its place"):
        cache()


def test_two_at_once_share_one_entry(cache: Callable[..., list[Path]]) -> None:
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: cache(), range(2)))
    assert len([path for path in found[-1] if path.is_dir() and not path.name.startswith(".")]) == 1


def test_a_full_disk_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, cache: Callable[..., list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as little:
        little.setattr("shutil.disk_usage", lambda path: usage._replace(free=1000))
        with pytest.raises(UserError, match=r"data.cache must be a folder with room for about .* kB.* 1.0 kB are free"):
            cache()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no room")

    with monkeypatch.context() as later:
        later.setattr("numpy.save", full)
        with pytest.raises(UserError, match="failed because the disk is full"):
            cache()
    assert list((tmp_path / "cache").iterdir()) == []


def odd_photographs(folder: Path) -> None:
    """Files as they come: turned, printed, thin, much too large, cut short, in motion."""
    folder.mkdir()
    for number, size in enumerate([(40, 30), (300, 31), (33, 90), (64, 64)]):
        photograph(number, *size).save(folder / f"plain{number}.jpg")
    photograph(5, 1, 50).save(folder / "thin.png")
    photograph(6, 70, 50).convert("CMYK").save(folder / "printed.jpg")
    turned = Image.Exif()
    turned[0x0112] = 6
    photograph(7, 60, 30).save(folder / "turned.jpg", exif=turned)
    photograph(8, 1300, 900).save(folder / "enormous.png")
    moving = [photograph(n, 40, 40) for n in range(2)]
    moving[0].save(folder / "moving.webp", save_all=True, append_images=moving[1:])
    photograph(9, 80, 80).save(folder / "short.jpg", quality=95)
    os.truncate(folder / "short.jpg", (folder / "short.jpg").stat().st_size // 2)


def test_without_a_decoder_of_torch_pillow_reads_jpeg_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchvision will remove its own, and torchcodec need not be there."""
    for name in ("a.jpg", "b.jpg"):
        photograph(0, 40, 30).save(tmp_path / name)
    content, plain = (tmp_path / "a.jpg").read_bytes(), np.asarray(Image.open(tmp_path / "a.jpg")).transpose(2, 0, 1)
    np.testing.assert_array_equal(jpeg.decode_plain(content, DataConfig()), plain)
    monkeypatch.delattr("torchvision.io.decode_jpeg")
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", None)
    monkeypatch.setattr(jpeg, "decode_jpeg", jpeg._decoder())
    assert jpeg.decode_plain(content, DataConfig()) is None
    assert not jpeg.has_nvjpeg(CPU)
    np.testing.assert_array_equal(load(DataConfig(str(tmp_path), crop_mode="squash")).train.images[0], plain)


def test_batches_of_jpeg_files_are_decoded_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What nvJPEG does on a GPU, here by torchvision on the CPU: plain files in a batch, the others one by one."""
    odd_photographs(tmp_path / "odd")
    for name in ("enormous.png", "moving.webp", "short.jpg"):
        (tmp_path / "odd" / name).unlink()
    photograph(9, 60, 30).convert("L").save(tmp_path / "odd" / "grey.jpg")
    data = load(DataConfig(str(tmp_path / "odd"), resize=16, channels=3)).train
    assert data.originals is not None
    images, places = data.originals.capped(64), np.arange(len(data))
    plain = {
        name
        for name, content in zip(data.names, images.contents(places), strict=True)
        if min(jpeg.plain_size(content) or (99,)) <= 64
    }
    assert plain == {"plain0.jpg", "plain1.jpg", "plain2.jpg", "plain3.jpg"}
    assert jpeg.has_nvjpeg(CPU)
    for broken in (False, True):
        if broken:
            monkeypatch.setattr(jpeg, "decode_jpeg", refuse)
        found = jpeg.decode_on(CPU, images, places, 64)
        for i, wanted in enumerate(images.ragged(places)):
            np.testing.assert_array_equal(found.window(i, 0, 0, *wanted.shape[1:]), wanted)
    assert not jpeg.has_nvjpeg(CPU)


def refuse(*_: object, **__: object) -> None:
    """As torchvision does where it has no nvJPEG, or a file is broken."""
    raise RuntimeError("no")


@pytest.mark.usefixtures("no_figures")
@pytest.mark.filterwarnings("ignore:skipped 3 unreadable files", "ignore:Image size")
def test_odd_photographs_train_or_are_named(
    tmp_path: Path, tiny: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    odd_photographs(tmp_path / "odd")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1_000_000)
    config = replace(tiny, data__source=str(tmp_path / "odd"), data__resize=16, train__batch_size=7, train__epochs=1)
    with pytest.warns(UserWarning, match="skipped 3 unreadable files") as told:
        run = api.pretrain(config, out=tmp_path / "run")
    assert "7 train images of 16x16, 3 channels" in capsys.readouterr().out
    (named,) = (text for one in told if (text := str(one.message)).startswith("skipped 3 unreadable files"))
    for name, why in (("enormous.png", "decompression bomb"), ("moving.webp", "2 pages"), ("short.jpg", "truncated")):
        assert name in named
        assert why in named
    assert all(np.isfinite(line["loss"]) for line in run.metrics() if "loss" in line)
    plan = crops.plan_crops(load(config.data).train, config, CPU)
    assert plan is not None
    images = plan.images.ragged(np.arange(7))
    sizes = {name: image.shape[1:] for name, image in zip(plan.images.names, images, strict=True)}
    assert (sizes["turned.jpg"], sizes["thin.png"], sizes["printed.jpg"]) == ((60, 30), (50, 1), (36, 50))


def test_large_files_of_one_size_become_squares_unless_asked(tmp_path: Path) -> None:
    for number in range(2):
        photograph(number, 400, 300).save(tmp_path / f"{number}.jpg")
    assert load_settled(DataConfig(str(tmp_path)))[0].resize == 224
    assert load_settled(DataConfig(str(tmp_path), resize=300))[0].resize == 300
    for number in range(2):
        photograph(number, 400, 256).save(tmp_path / f"{number}.jpg")
    assert load_settled(DataConfig(str(tmp_path)))[0].resize is None
