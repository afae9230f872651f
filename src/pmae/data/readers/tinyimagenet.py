"""The tiny-imagenet-200 tree: labelled training folders, and validation images with their own table of labels.

The published test images carry no labels, so the validation images are what everybody tests on: they are `test` here.
"""

from pathlib import Path

from pmae.config import DataConfig
from pmae.data.images import Splits
from pmae.data.readers.files import ImageFile, read_files
from pmae.data.readers.folder import list_images, printable
from pmae.errors import UserError

ANNOTATIONS = Path("val", "val_annotations.txt")
NOTE = "the published test images carry no labels and are not read; the validation images are the test split"


def is_tinyimagenet(folder: Path) -> bool:
    """Whether the folder has the tree's two landmarks."""
    return (folder / "train").is_dir() and (folder / ANNOTATIONS).is_file()


def read_tinyimagenet(folder: Path, config: DataConfig) -> Splits:
    """Training and validation images in memory."""
    classes, files = tinyimagenet_files(folder)
    return read_files("tinyimagenet", files, classes, config, (NOTE,))


def tinyimagenet_files(folder: Path) -> tuple[tuple[str, ...], list[ImageFile]]:
    """The classes in the order of their WordNet identifiers, named by words.txt, and the files of both splits."""
    identifiers = sorted(path.name for path in (folder / "train").iterdir() if path.is_dir())
    number = {identifier: index for index, identifier in enumerate(identifiers)}
    files = [*_train_files(folder, number), *_val_files(folder, number)]
    if not files:
        raise UserError(f"data.source: the Tiny ImageNet folder {folder} holds no images")
    return _class_names(folder, identifiers), files


def _train_files(folder: Path, number: dict[str, int]) -> list[ImageFile]:
    return [
        ImageFile(path, printable(path.relative_to(folder)), "train", label)
        for identifier, label in number.items()
        for path in list_images(folder / "train" / identifier)
    ]


def _val_files(folder: Path, number: dict[str, int]) -> list[ImageFile]:
    files = []
    for line in filter(str.strip, (folder / ANNOTATIONS).read_text(encoding="utf-8").splitlines()):
        name, identifier = [*line.split("\t"), ""][:2]
        if identifier not in number:
            raise UserError(f"data.source: {folder / ANNOTATIONS} names the class {identifier!r}, which train/ lacks")
        path = folder / "val" / "images" / name
        files.append(ImageFile(path, printable(path.relative_to(folder)), "test", number[identifier]))
    return files


def _class_names(folder: Path, identifiers: list[str]) -> tuple[str, ...]:
    """The first word of each class; identifiers stand in where words.txt has nothing."""
    words = folder / "words.txt"
    lines = words.read_text(encoding="utf-8").splitlines() if words.is_file() else []
    names = {line.split("\t")[0]: line.split("\t")[1].split(",")[0] for line in lines if "\t" in line}
    return tuple(names.get(identifier, identifier) for identifier in identifiers)
