"""What a machine does to a run: a full or read-only disk, files that vanish or rot, no memory, a clock that jumps."""

import errno
import itertools
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from pmae import files
from pmae.config import Config, DataConfig, replace
from pmae.data.arrays import read_npy
from pmae.data.batches import Batches
from pmae.data.images import ImageSet, Splits
from pmae.data.sets import load
from pmae.derive import resolve
from pmae.errors import UserError
from pmae.files import write_text
from pmae.runs import Run
from pmae.train.loop import pretrain
from pmae.train.step import Plain

FULL = (errno.ENOSPC, errno.EDQUOT)
NO_MEMORY = (
    torch.OutOfMemoryError("CUDA out of memory"),
    MemoryError(),
    RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
)


@pytest.fixture
def config(tiny: Config, toy: Splits) -> Config:
    return resolve(replace(tiny, train__epochs=2), len(toy.train), toy.train.shape)[0]


def weights(run: Run) -> dict[str, torch.Tensor]:
    return load_file(run.checkpoint() / "encoder.safetensors")


def same(first: Run, second: Run) -> bool:
    one, other = weights(first), weights(second)
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs Linux")
def test_a_place_that_takes_no_folders_is_one_sentence(config: Config, toy: Splits) -> None:
    with pytest.raises(UserError, match="writing '/proc/run' failed because its folder is gone, or takes no files"):
        pretrain(config, toy, "/proc/run", quiet=True)


@pytest.mark.parametrize(
    ("call", "number"), list(enumerate(2 * [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EACCES], 1))
)
def test_a_disk_that_refuses_any_write_is_one_sentence_and_the_run_resumes(
    config: Config, toy: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, call: int
) -> None:
    calls, flush = itertools.count(1), files.flush

    def refuse(path: Path) -> None:
        if next(calls) == call:
            raise OSError(number, "injected", str(path))
        flush(path)

    monkeypatch.setattr(files, "flush", refuse)
    with pytest.raises(UserError, match="the disk is full" if number in FULL else "it cannot be written"):
        pretrain(replace(config, train__epochs=1), toy, tmp_path / "run", quiet=True)
    assert not list(tmp_path.rglob(".*"))
    resume = (tmp_path / "run" / "config.json").exists()
    done = pretrain(replace(config, train__epochs=1), toy, tmp_path / "run", resume, quiet=True)
    assert done.results["pretrain"]["epoch"] == 1


LIMITED = """
import resource, signal, sys
from pathlib import Path
from pmae.files import write_text
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
write_text(Path(sys.argv[1]), "x" * 5000)
"""


def test_a_file_that_may_not_grow_leaves_the_old_one_whole(tmp_path: Path) -> None:
    path = write_text(tmp_path / "results.json", "old")
    done = subprocess.run([sys.executable, "-c", LIMITED, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "UserError" in done.stderr
    assert "a file may not grow this large" in done.stderr
    assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["results.json"]
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 1000


def test_a_data_file_that_vanishes_does_not_stop_a_run_but_its_resumption(
    config: Config, toy: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save(tmp_path / "images.npy", toy.train.images)
    in_memory = pretrain(config, Splits("images", toy.train), tmp_path / "memory", quiet=True)
    take = Batches.take

    def vanish(self: Batches, index: torch.Tensor) -> torch.Tensor:
        (tmp_path / "images.npy").unlink(missing_ok=True)
        return take(self, index)

    splits = read_npy(tmp_path / "images.npy", "NCHW")
    monkeypatch.setattr(Batches, "take", vanish)
    assert same(pretrain(config, splits, tmp_path / "run", quiet=True), in_memory)
    with pytest.raises(UserError, match=r"cannot be read as arrays of numbers: .*No such file"):
        read_npy(tmp_path / "images.npy")


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_a_data_file_that_is_cut_short_stops_a_run_with_a_sentence(
    config: Config, toy: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    path, calls, read = tmp_path / "images.npy", itertools.count(1), Batches._read
    axes = (0, 1, 2, 3) if layout == "NCHW" else (0, 2, 3, 1)
    np.save(path, np.ascontiguousarray(toy.train.images.transpose(axes)))
    whole = path.stat().st_size

    def cut(self: Batches, index: torch.Tensor) -> torch.Tensor:
        # Two reads are the fits', four an epoch; the others are ahead of the steps.
        if next(calls) == 8:
            os.truncate(path, 5000)
        return read(self, index)

    monkeypatch.setattr(Batches, "_read", cut)
    words = rf"the file must stay as it is while it is read; it had {whole:,} bytes and has 5,000 now"
    with pytest.raises(UserError, match=words):
        pretrain(config, read_npy(path, layout), tmp_path / "run", quiet=True)
    with pytest.raises(UserError, match=r"images\.npy cannot be read as arrays of numbers"):
        read_npy(path, layout)


def test_a_mapped_file_that_is_cut_short_is_not_embedded(toy: Splits, tmp_path: Path) -> None:
    np.save(tmp_path / "images.npy", toy.train.images)
    splits = read_npy(tmp_path / "images.npy", "NCHW")
    assert len(splits.train.take(np.arange(4))) == 4
    os.truncate(tmp_path / "images.npy", 5000)
    with pytest.raises(UserError, match="and has 5,000 now"):
        splits.train.take(np.arange(4))


@pytest.fixture(scope="module")
def thousands(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three thousand small pictures, eight of them broken in eight ways."""
    folder = tmp_path_factory.mktemp("thousands")
    Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3)).save(folder / "whole.png")
    whole = (folder / "whole.png").read_bytes()
    for number in range(3000):
        (folder / f"{number:04d}.png").write_bytes(whole)
    broken = [b"", b"\0" * 80, whole[:20], whole[:40], whole[:-30], b"<html>", whole[:16] + b"\xff" * 8 + whole[24:]]
    for number, content in enumerate(broken):
        (folder / f"{number * 400 + 7:04d}.png").write_bytes(content)
    (folder / "2999.png").unlink()
    (folder / "2999.png").symlink_to(folder / "nowhere.png")
    return folder


def test_broken_pictures_among_thousands_are_named_and_skipped(thousands: Path) -> None:
    with pytest.warns(UserWarning, match=r"skipped 7 unreadable files: '0007\.png'"):
        splits = load(DataConfig(str(thousands)))
    assert len(splits.train) == 3001 - 8
    assert not {"0007.png", "2407.png", "2999.png"} & set(splits.train.names)
    assert (splits.train.images == splits.train.images[0]).all()


def test_more_broken_pictures_than_allowed_are_refused(thousands: Path) -> None:
    with pytest.raises(UserError, match=r"data\.max_unreadable is 6, and more files than that cannot be read"):
        load(DataConfig(str(thousands), max_unreadable=6))


def test_pictures_that_vanish_while_they_are_read_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(20):
        Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / f"{number:02d}.png")
    opened = Image.open

    def vanish(file: object, *arguments: object, **named: object) -> object:
        if file == tmp_path / "03.png":
            (tmp_path / "19.png").unlink(missing_ok=True)
        return opened(file, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(Image, "open", vanish)
    with pytest.warns(UserWarning, match=r"skipped 1 unreadable file: '19\.png' \(FileNotFoundError"):
        assert len(load(DataConfig(str(tmp_path))).train) == 19


def test_images_that_are_all_alike_are_refused_before_anything_is_written(
    config: Config, toy: Splits, tmp_path: Path
) -> None:
    images = np.repeat(np.asarray(toy.train.images[:1]), 40, 0)
    with pytest.raises(UserError, match="data must be images that vary, got images that are all alike"):
        pretrain(config, Splits("bad", ImageSet(images)), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_none_are_refused_before_anything_is_written(
    config: Config, toy: Splits, tmp_path: Path, value: float
) -> None:
    images = toy.train.images.astype(np.float32)
    images[5, 0, 0, 0] = value
    with pytest.raises(UserError, match="data must be finite numbers"):
        pretrain(config, Splits("bad", ImageSet(images)), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_batch_that_turns_bad_later_is_saved_and_named(
    config: Config, toy: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    floats = Splits("floats", ImageSet(toy.train.images.astype(np.float32)))
    take, calls = Batches.take, itertools.count()

    def rot(self: Batches, index: torch.Tensor) -> torch.Tensor:
        if next(calls) == 4:
            floats.train.images[:] = np.nan
        return take(self, index)

    monkeypatch.setattr(Batches, "take", rot)
    with pytest.raises(UserError, match=r"NaN or infinity at step \d+ .*; 32 of its images are not finite"):
        pretrain(config, floats, tmp_path / "run", quiet=True)
    saved = load_file(next((tmp_path / "run").glob("failure_step_*.safetensors")))
    assert not saved["finite_images"].any()


@pytest.mark.parametrize(("error", "step"), list(zip(NO_MEMORY, (0, 5, 0, 0), strict=True)))
def test_out_of_memory_names_the_batch_to_try(
    config: Config, toy: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, step: int
) -> None:
    measure, calls = Plain.measure, itertools.count()

    def fail(*arguments: object) -> object:
        if next(calls) == step:
            raise error
        return measure(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Plain, "measure", fail)
    with pytest.raises(UserError, match=r"train\.batch_size must fit in the memory of cpu, got 32, .*; 16 would"):
        pretrain(config, toy, tmp_path / "run", quiet=True)
    # Refused at the first step it leaves nothing, so the same folder can be used with a smaller batch.
    assert (tmp_path / "run").exists() == (step > 0)


def test_another_error_is_not_taken_for_a_lack_of_memory(
    config: Config, toy: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("something else")

    monkeypatch.setattr(Plain, "measure", fail)
    with pytest.raises(RuntimeError, match="something else"):
        pretrain(config, toy, tmp_path / "run", quiet=True)


def test_a_clock_that_jumps_changes_nothing(
    config: Config, toy: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = pretrain(config, toy, tmp_path / "plain", quiet=True)
    jumps = itertools.cycle([0.0, 4e9, -1.0, 1.7e9])
    monkeypatch.setattr(time, "time", lambda: next(jumps))
    monkeypatch.setattr(time, "monotonic", lambda: 5.0)
    assert same(pretrain(config, toy, tmp_path / "jumping", quiet=True), plain)
    # The newest checkpoint is the one of the last step, whatever the dates of the files say.
    shutil.copystat(plain.path, plain.path / "checkpoints" / "epoch_0002" / "state.json")
    assert plain.checkpoint().name == "epoch_0002"
