"""Stand-ins for what the pages speak of: folders, arrays, CIFAR-10 and MedMNIST in their own formats, and a run."""

import hashlib
import io
import shutil
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from pmae import api, demo, doctor
from pmae.config import Config, DecoderConfig, EncoderConfig, TrainConfig
from pmae.data import fetch
from pmae.data.images import Splits
from pmae.data.named import load_photos
from pmae.data.sets import NAMED
from pmae.doctor import CHECKS
from pmae.evaluate import protocols

BATCHES = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
SMALL = Config(
    encoder=EncoderConfig(patch_size=4, width=16, depth=4, heads=2),
    decoder=DecoderConfig("small", width=16, depth=1, heads=2),
    train=TrainConfig(epochs=1, batch_size=8, device="cpu"),
)


def pixels(count: int, *shape: int) -> np.ndarray:
    """Images of two classes in turn, of which the second is brighter."""
    noise = np.random.default_rng(0).integers(0, 200, (count, *shape))
    noise[1::2] += 50
    return noise.astype(np.uint8)


def write_pictures(folder: Path, side: int) -> None:
    for number, image in enumerate(pixels(32, side, side, 3)):
        path = folder / ("dark", "bright")[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)


def write_cifar10(folder: Path) -> None:
    folder.mkdir(parents=True)
    records = np.concatenate([(np.arange(60) % 10)[:, None], pixels(60, 3072)], 1).astype(np.uint8)
    for name, part in zip(BATCHES, np.split(records, 6), strict=True):
        (folder / f"{name}.bin").write_bytes(part.tobytes())


def write_medmnist(path: Path) -> None:
    images, labels = pixels(64, 16, 16, 3), np.arange(64)[:, None] % 8
    parts = {"train": slice(0, 32), "val": slice(32, 48), "test": slice(48, 64)}
    arrays = {f"{name}_images": images[part] for name, part in parts.items()}
    np.savez(path, **arrays, **{f"{name}_labels": labels[part] for name, part in parts.items()})


def as_png(image: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    return buffer.getvalue()


def write_shards(folder: Path) -> None:
    """Tar files of pictures and class numbers, and the same as a saved data set and as a table."""
    samples = [{"image": as_png(image), "label": number % 2} for number, image in enumerate(pixels(40, 16, 16, 3))]
    (folder / "shards").mkdir()
    for start, name in zip(range(0, 40, 8), (*(f"train-00{n}" for n in range(4)), "val-000"), strict=True):
        with tarfile.open(folder / "shards" / f"{name}.tar", "w") as archive:
            for number, sample in enumerate(samples[start : start + 8]):
                for suffix, data in (("png", sample["image"]), ("cls", str(sample["label"]).encode())):
                    member = tarfile.TarInfo(f"{start + number:03d}.{suffix}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
    table = datasets.Dataset.from_list(samples).cast_column("image", datasets.Image())
    table.save_to_disk(folder / "saved")
    table.to_parquet(folder / "table" / "0.parquet")


@pytest.fixture(scope="session")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything by the name that the pages give it, and `run`, trained for one epoch on images of that size."""
    folder = tmp_path_factory.mktemp("stand_ins")
    for name, side in (("pictures", 40), ("scans", 16), ("labelled", 16)):
        write_pictures(folder / name, side)
    files = sorted((folder / "scans").rglob("*.png"))
    table = [f"{path.relative_to(folder / 'scans').as_posix()},{path.parent.name}" for path in files]
    for path in files:
        mask = folder / "masks" / path.relative_to(folder / "scans")
        mask.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels(16, 16) // 128).save(mask)
    (folder / "mine.json").write_text('{"encoder": {"patch_size": 4}, "masking": {"masked_variance": 0.3}}')
    (folder / "labels.csv").write_text("\n".join(["file,label", *table]))
    patients = [f"{row},P{number // 2}" for number, row in enumerate(table)]
    (folder / "records.csv").write_text("\n".join(["image_id,diagnosis,patient", *patients]))
    np.save(folder / "images.npy", pixels(32, 16, 16, 3))
    np.save(folder / "spectra.npy", pixels(32, 5, 16, 16))
    scenes = pixels(32, 5, 16, 16).astype(np.float32)
    scenes[::4, :, :3] = np.nan
    np.save(folder / "scenes.npy", scenes)
    (folder / "table").mkdir()
    write_shards(folder)
    write_cifar10(folder / "data" / "cifar-10-batches-bin")
    write_medmnist(folder / "data" / "bloodmnist_64.npz")
    api.pretrain(SMALL, pixels(32, 16, 16, 3), folder / "run", quiet=True, figures=False)
    return folder


@pytest.fixture
def reader(stand_ins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A reader's folder: the current one, with the stand-ins and a home, where downloads come from this disk."""
    shutil.copytree(stand_ins, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("run"))
    for folder in ("home/.zfunc", "home/.config/fish/completions"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    with tarfile.open(tmp_path / "c.tar.gz", "w:gz") as archive:
        archive.add(stand_ins / "data" / "cifar-10-batches-bin", "cifar-10-batches-py")
    digest = hashlib.md5((tmp_path / "c.tar.gz").read_bytes()).hexdigest()
    monkeypatch.setattr(fetch, "CIFAR10", fetch.Archive(((tmp_path / "c.tar.gz").as_uri(),), digest))
    return tmp_path


def few(whole: Splits, step: int) -> Splits:
    """Every so manieth image of a set with a test part."""
    assert whole.test is not None
    train, test = (part.take(np.arange(0, len(part), step)) for part in (whole.train, whole.test))
    return Splits(whole.name, train, None, test)


def coarse(whole: Splits) -> Splits:
    """Every other pixel in both directions."""
    assert whole.test is not None
    train, test = (replace(part, images=part.images[:, :, ::2, ::2].copy()) for part in (whole.train, whole.test))
    return Splits(whole.name, train, None, test)


def few_photos() -> Splits:
    """Every twelfth crop, coarse."""
    return coarse(few(load_photos(), 12))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One thread, few photographs and digits, few pixels, short protocols.

    Figures of every run and beside every page, and the doctor's processes, have tests of their own.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(demo, "load_photos", few_photos)
    monkeypatch.setitem(NAMED, "photos", lambda _: few_photos())
    monkeypatch.setitem(NAMED, "cifar10", lambda root, whole=NAMED["cifar10"]: coarse(whole(root)))
    monkeypatch.setitem(NAMED, "digits", lambda root, whole=NAMED["digits"]: few(whole(root), 6))
    monkeypatch.setattr(api, "save_figures", lambda run: [])
    monkeypatch.setattr("pmae.report.page.write_beside", lambda *_: None)
    monkeypatch.setattr(doctor, "ask", lambda name, *given, **_: list(CHECKS[name].run(*given)))
    monkeypatch.setenv("RAY_worker_niceness", "0")  # Ray's own number, 15, waits for all other tests
    monkeypatch.setenv("RAY_enable_worker_prestart", "0")  # one run needs no worker for every core
    for name, settings in protocols.PRESETS.items():
        monkeypatch.setitem(protocols.PRESETS, name, short(settings))
    yield
    torch.set_num_threads(before)


def short(given: protocols.Protocols) -> protocols.Protocols:
    """The same heads and fine-tuning for two epochs."""
    length = {"epochs": 2, "warmup_epochs": 1}
    probe = given.probe and replace(given.probe, **length)
    return replace(given, probe=probe, finetune=given.finetune and replace(given.finetune, **length))
