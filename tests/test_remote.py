"""Remote stores, with fsspec's memory and local file systems, and with ones that are full, slow or gone."""

import errno
import io
import shutil
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from PIL import Image

import pmae
from pmae import remote
from pmae.api import evaluate, pretrain
from pmae.cli import main
from pmae.config import Config, DataConfig
from pmae.data.images import Splits
from pmae.data.sets import load, read_chunks
from pmae.errors import UserError
from pmae.evaluate.protocols import only, preset
from pmae.files import folder_path, read_tensors

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 8, 8, 3), dtype=np.uint8)


class Faulty(MemoryFileSystem):
    """A store of its own whose writes fail as told, or wait."""

    protocol = "faulty"
    store: dict[str, Any] = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012
    error: Exception | None = None
    gate = threading.Event()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("faulty:/"))

    def put_file(self, *arguments: Any, **settings: Any) -> None:
        self.gate.wait(20)
        if Faulty.error:
            raise Faulty.error
        super().put_file(*arguments, **settings)


@pytest.fixture(autouse=True)
def stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    fsspec.register_implementation("faulty", Faulty, clobber=True)
    Faulty.error = None
    Faulty.gate.set()
    yield
    for store in (MemoryFileSystem, Faulty):
        store.store.clear()
        store.pseudo_dirs[:] = [""]


def shard(numbers: range) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for number in numbers:
            png = io.BytesIO()
            Image.fromarray(PIXELS[number]).save(png, "png")
            member = tarfile.TarInfo(f"{number:03d}.png")
            member.size = len(png.getvalue())
            archive.addfile(member, io.BytesIO(png.getvalue()))
    return packed.getvalue()


@pytest.fixture(params=["memory://bucket/set", "file://{}/set"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Two shards of three images each in a store."""
    url = str(request.param).format(tmp_path.as_posix())
    for number in range(2):
        with fsspec.open(f"{url}/part-{number}.tar", "wb", auto_mkdir=True) as file:
            file.write(shard(range(3 * number, 3 * number + 3)))
    return url


@pytest.mark.parametrize("which", ["", "/part-*.tar", "/part-{0..1}.tar", "/part-{0,1}.tar"])
def test_shards_in_a_store_read_as_those_on_the_disk(address: str, which: str) -> None:
    config = DataConfig(source=address + which, root="data")
    np.testing.assert_array_equal(np.stack(list(load(config).train.images)), PIXELS.transpose(0, 3, 1, 2))
    assert load(config).name == "set"
    _, first = next(iter(read_chunks(config, 4).chunks))
    assert len(first) == 4


def test_one_file_of_a_store(address: str) -> None:
    assert len(load(DataConfig(source=f"{address}/part-1.tar")).train) == 3


def test_only_what_changed_is_copied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    store, copied = MemoryFileSystem(), []
    for number in range(2):
        store.pipe(f"/b/part-{number}.tar", shard(range(3)))
    plain = store.get_file
    monkeypatch.setattr(store, "get_file", lambda path, *rest: (copied.append(path), plain(path, *rest)))
    config = DataConfig(source="memory://b")
    load(config)
    load(config)
    assert copied == ["/b/part-0.tar", "/b/part-1.tar"]
    store.pipe("/b/part-1.tar", shard(range(3, 6)))
    np.testing.assert_array_equal(load(config).train.images[3], PIXELS[3].transpose(2, 0, 1))
    Path("data/b/part-0.tar").unlink()
    load(config)
    assert copied[2:] == ["/b/part-1.tar", "/b/part-0.tar"]


@pytest.mark.parametrize("which", ["", "/part-*.tar"])
def test_what_a_store_has_no_more_is_not_read(which: str) -> None:
    store = MemoryFileSystem()
    for name in ("set/part-0", "set/part-1", "other/part-2"):
        store.pipe(f"/b/{name}.tar", shard(range(3)))
    load(DataConfig(source="memory://b/other"))
    config = DataConfig(source=f"memory://b/set{which}")
    assert len(load(config).train) == 6
    store.rm_file("/b/set/part-1.tar")
    assert len(load(config).train) == 3
    assert Path("data/b/other/part-2.tar").exists(), "of another address, which says nothing of it"


def test_what_was_copied_is_read_from_a_disk_that_is_full_now(monkeypatch: pytest.MonkeyPatch) -> None:
    MemoryFileSystem().pipe("/full/part-0.tar", shard(range(3)))
    first = remote.stage("memory://full", ["memory://full"], Path("data"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))
    assert remote.stage("memory://full", ["memory://full"], Path("data")) == first


def test_what_cannot_be_had_is_told_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"data.source must be an address with files, got 'memory://nothing'"):
        load(DataConfig(source="memory://nothing"))
    with pytest.raises(UserError, match=r"^nosuch://b/x cannot be reached: Protocol not known: nosuch"):
        load(DataConfig(source="nosuch://b/x"))
    MemoryFileSystem().store["/b/../../out.tar"] = MemoryFileSystem().open("/x", "wb")
    with pytest.raises(UserError, match="must be one below its folder"):
        remote.stage("memory://b", ["memory://b"], Path("data"))
    MemoryFileSystem().store.clear()
    MemoryFileSystem().pipe("/b/part-0.tar", shard(range(3)))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 0, 10))
    with pytest.raises(UserError, match=r"must be on a disk with 10,240 bytes free, got '10'"):
        load(DataConfig(source="memory://b"))
    with pytest.raises(UserError, match="out must be a path on this machine, got 's3://b/clf'"):
        folder_path("s3://b/clf")


def weights(folder: Path | str) -> dict[str, Any]:
    return {k: v.tolist() for k, v in read_tensors(pmae.Run(folder).checkpoint() / "encoder.safetensors").items()}


@pytest.fixture
def two(tiny: Config) -> Config:
    train = replace(tiny.train, epochs=2, keep=1, batch_size=64)
    return replace(tiny, train=train, probe=replace(tiny.probe, every=2))


@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize("address", ["memory://bucket/a", "file:///{}/store/a"])
def test_a_run_goes_on_from_its_store(two: Config, toy: Splits, address: str, tmp_path: Path) -> None:
    url = address.format(tmp_path.as_posix())
    pretrain(two, toy, "whole", quiet=True)
    pretrain(two, toy, url, quiet=True, until=1)
    with pytest.raises(UserError, match="out must be an address without a run"):
        pretrain(two, toy, url, quiet=True)
    shutil.rmtree("runs")
    run = pretrain(two, toy, url, quiet=True, resume=True)
    assert run.path == Path("runs/a")
    assert weights("runs/a") == weights("whole")
    there = fsspec.filesystem(url.partition(":")[0])
    names = {path.partition("/a/")[2] for path in there.find(url)}
    hidden = {".remote.json"}
    assert names == {path.relative_to(run.path).as_posix() for path in run.path.rglob("*") if path.is_file()} - hidden
    # An older copy, as of another machine, gives way to what has gone further.
    shutil.rmtree("runs/a/checkpoints/epoch_0002")
    assert pmae.Run(url).checkpoint().name == "epoch_0002"
    if url.startswith("memory"):  # whatever reads a run reads one in a store, and evaluations go back there
        evaluate(url, only(preset("strong"), ["knn"]), toy, baselines=False, device="cpu")
        assert b"knn" in there.cat(f"{url}/results.json")


@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("checkpoints/epoch_9999", "checkpoints/epoch_10000"),
        ("checkpoints/epoch_0001", "checkpoints/epoch_0001_step_000001"),
        ("first/checkpoints/epoch_0002", "first/checkpoints/epoch_0004"),
        ("first/checkpoints/epoch_0004", "checkpoints/epoch_0001"),
    ],
)
def test_the_later_checkpoint_is_the_one_that_is_taken(two: Config, toy: Splits, older: str, newer: str) -> None:
    pretrain(two, toy, "memory://b/a", quiet=True, until=1)
    store, here = MemoryFileSystem(), Path("runs/a")
    written = (here / "checkpoints/epoch_0001").rename("written")
    store.rm("/b/a/checkpoints", recursive=True)
    shutil.copytree(written, here / older)
    for path in written.iterdir():
        store.pipe(f"/b/a/{newer}/{path.name}", path.read_bytes())
    pmae.Run("memory://b/a")
    assert (here / newer).exists()


@pytest.mark.usefixtures("no_figures")
def test_a_store_that_is_full_costs_a_sentence(two: Config, toy: Splits) -> None:
    Faulty.error = OSError(errno.ENOSPC, "No space left on device")
    with pytest.warns(UserWarning, match=r"faulty://b/a was not reached \(.*left.*\); all is in runs/a") as told:
        pretrain(two, toy, "faulty://b/a", quiet=True)
    assert 1 <= len(told) <= 3
    assert not Faulty.store
    Faulty.error = None
    pretrain(two, toy, "runs/a", quiet=True, resume=True)  # which knows where it is copied to
    assert "/b/a/checkpoints/epoch_0002/state.json" in Faulty.store


@pytest.mark.usefixtures("no_figures")
def test_a_store_that_is_slow_keeps_nobody_waiting(two: Config, toy: Splits, monkeypatch: pytest.MonkeyPatch) -> None:
    Faulty.gate.clear()
    before = set(threading.enumerate())
    monkeypatch.setattr(remote, "PATIENCE_SECONDS", 0.1)
    with pytest.warns(UserWarning, match=r"not done after 0 s.*all is in runs/a"):
        run = pretrain(two, toy, "faulty://b/a", quiet=True)
    assert run.checkpoint().name == "epoch_0002"
    Faulty.gate.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(20)


def test_a_folder_of_another_run_is_not_taken(two: Config, toy: Splits) -> None:
    Path("runs/a").mkdir(parents=True)
    Path("runs/a/config.json").write_text("{}")
    with pytest.raises(UserError, match=r"runs/a, in which memory://b/a is kept here, must be a folder without"):
        pretrain(two, toy, "memory://b/a", quiet=True)


@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize("address", ["memory://bucket/set"], indirect=True)
def test_on_the_command_line(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    small = "--data.max-unreadable 0 --train.batch-size 2 --encoder.width 16 --encoder.depth 1 --encoder.heads 2"
    command = ["pretrain", "--data", address, "--out", "memory://b/cli", "--epochs", "1", *small.split()]
    assert main(command) == 0
    assert main(["pretrain", "--out", "memory://b/cli", "--resume"]) == 0
    assert main(["pretrain", "--out", "memory://b/none", "--resume"]) == 2
    assert "run must be a folder that pretraining wrote" in capsys.readouterr().err
