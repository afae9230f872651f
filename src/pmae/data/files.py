"""Which image files a source is, by split: those below a folder, or Tiny ImageNet's tree."""

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from pmae.config import DataConfig
from pmae.data.decode import SUFFIXES, reading
from pmae.data.ondemand import Samples
from pmae.data.streamed import SPLITS, SampleSet, shown
from pmae.errors import UserError

RUN_FILES = {"config.json", "environment.json"}
"""What tells the folder of a run: its figures are no images to train on."""
OTHER_PICTURES = {
    ".heic", ".heif", ".avif", ".jp2", ".j2k", ".jxl", ".jls", ".pgm", ".ppm", ".pnm", ".exr", ".psd", ".svg",
    ".raw", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".orf", ".rw2", ".svs", ".ndpi", ".mrxs", ".vsi", ".czi", ".nd2",
    ".lif", ".oib", ".oif", ".ims", ".mrc", ".nii", ".mha", ".mhd", ".nrrd", ".avi", ".mp4", ".mov",
}  # fmt: skip
"""Suffixes of pictures that are not read; that they are there is told, as nobody would expect them to be left out."""
TINY_ANNOTATIONS = Path("val", "val_annotations.txt")
TINY_NOTE = "the published test images carry no labels and are not read; the validation images are the test split"
_NAMED = re.compile(r"(train|val|test)(?:id|idation|ing)?(?![a-z])", re.IGNORECASE)


class FileSamples(Samples):
    """Image files below a folder by position; of each only its path is kept."""

    def __init__(
        self, folder: Path, paths: Sequence[str], labels: Sequence[int] | None, classes: tuple[str, ...]
    ) -> None:
        self._folder, self._paths = folder, paths
        self.labels = None if labels is None else np.array(labels, np.int64)
        self.classes = classes or None

    @property
    def files(self) -> Iterator[Path]:  # type: ignore[override]
        return (self._folder / path for path in self._paths)

    def __len__(self) -> int:
        return len(self._paths)

    def take(self, places: np.ndarray) -> "FileSamples":
        paths, labels = [self._paths[place] for place in places], self.labels
        return FileSamples(self._folder, paths, None if labels is None else labels[places].tolist(), self.classes or ())

    def read(self, position: int) -> tuple[str, Path]:
        return self.name(position), self._folder / self._paths[position]

    def name(self, position: int) -> str:
        return printable(self._paths[position])


def folder_samples(folder: Path, config: DataConfig) -> SampleSet:
    """The image files of each split in order, none of them opened."""
    roots, beside = _split_folders(folder)
    roots = roots or {"train": folder}
    passed_over: Counter[str] = Counter()
    found = {s: [str(path.relative_to(folder)) for path in walk_images(root, passed_over)] for s, root in roots.items()}
    told = [f"{count} {what}" for what, count in passed_over.items()]
    if beside:
        splits = " and ".join(f"{root.name}/" for root in roots.values())
        told.append(f"images beside {splits} are not read: {shown(beside)}")
    if not any(found.values()):
        raise UserError("; ".join([f"data.source: the folder {folder} holds no images ({', '.join(SUFFIXES)})", *told]))
    notes = [*([] if len(roots) > 1 else ["the folder has no train/ and test/ (or val/)"]), *told]
    depth = 0 if roots["train"] == folder else 1
    named = {s: [_class_of(path, depth) for path in paths if config.labels == "folders"] for s, paths in found.items()}
    classes = tuple(sorted(set().union(*named.values())))
    number = {name: index for index, name in enumerate(classes)}
    samples = {
        split: FileSamples(folder, paths, [number[name] for name in named[split]] if classes else None, classes)
        for split, paths in found.items()
    }
    return SampleSet(printable(folder.resolve().name), samples, tuple(notes))


def _split_folders(folder: Path) -> tuple[dict[str, Path], list[str]]:
    """The folders of splits under the names they usually have (Training, valid), and what else holds images.

    There are none unless some are held out, or there is nothing but train.
    """
    found: dict[str, Path] = {}
    others = []
    for entry in _entries(folder):
        split = split_called(entry.name)
        if split and entry.is_dir():
            if split in found:
                both = f"{found[split].name}/ and {entry.name}/"
                raise UserError(f"data.source: the folder {folder} must have one folder for {split}, got {both}")
            found[split] = folder / entry.name
        elif not entry.name.startswith("."):
            others.append(entry)
    if "train" not in found:
        return {}, []
    beside = [f"{printable(entry.name)}{'/' * entry.is_dir()}" for entry in others if _holds_images(entry)]
    if len(found) == 1 and beside:
        return {}, []
    return {split: found[split] for split in SPLITS if split in found}, beside


def _holds_images(entry: os.DirEntry[str]) -> bool:
    if entry.is_dir():
        return not entry.is_symlink() and next(walk_images(Path(entry.path)), None) is not None
    return is_image(Path(entry.path))


def split_called(name: str, whole: bool = True) -> str | None:
    """The split that a name stands for (`Training` and `valid` are train and val), or only begins with."""
    named = _NAMED.fullmatch(name) if whole else _NAMED.match(name)
    return named[1].lower() if named else None


def is_image(path: Path) -> bool:
    """Whether a path is an image file, by its suffix."""
    return is_image_name(path.name) and os.path.isfile(path)


def is_image_name(name: str) -> bool:
    """Whether a file is one of those that are read, by its suffix."""
    return name.lower().endswith(SUFFIXES)


def walk_images(folder: Path, passed_over: Counter[str] | None = None) -> Iterator[Path]:
    """Image files below a folder in sorted order; linked folders, runs and pictures of other kinds are counted."""
    passed_over = Counter() if passed_over is None else passed_over
    for entry in _entries(folder):
        if entry.is_dir(follow_symlinks=False):
            if all(os.path.isfile(os.path.join(entry, file)) for file in RUN_FILES):
                passed_over["folders of runs were passed over"] += 1
            elif not entry.name.startswith((".", "__MACOSX")):
                yield from walk_images(folder / entry.name, passed_over)
        elif entry.is_symlink() and os.path.isdir(entry):
            passed_over["linked folders were not followed"] += 1
        # Asked of the listing, which knows without looking at the file; of links the file is looked at.
        elif not entry.name.startswith(".") and (entry.is_file(follow_symlinks=False) or os.path.isfile(entry)):
            if is_image_name(entry.name):
                yield folder / entry.name
            elif (suffix := os.path.splitext(entry.name)[1].lower()) in OTHER_PICTURES:
                passed_over[f"{suffix} files were passed over, a format that is not read"] += 1


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise UserError(f"data.source: the folder {folder} cannot be listed: {error.strerror}") from error


def printable(path: str | Path) -> str:
    """A name with forward slashes; bytes that are not UTF-8 are escaped, so that it can be printed and saved."""
    return os.fsencode(Path(path).as_posix()).decode("utf-8", "backslashreplace")


def _class_of(path: str, depth: int) -> str:
    folders = path.split(os.sep)[:-1]
    if len(folders) <= depth:
        beside = "to finetune and evaluate, labels can be a table of files instead"
        told = f"data.labels 'folders' needs every image in a class folder; {printable(path)!r} is in none"
        raise UserError(f"{told} ({beside})")
    return printable(folders[depth])


def is_tinyimagenet(folder: Path) -> bool:
    """Whether the folder has the two landmarks of the tiny-imagenet-200 tree."""
    return os.path.isdir(folder / "train") and os.path.isfile(folder / TINY_ANNOTATIONS)


def tinyimagenet_samples(folder: Path) -> SampleSet:
    """Labelled training folders, and validation images with their own table of labels."""
    identifiers = sorted(path.name for path in (folder / "train").iterdir() if path.is_dir())
    number = {identifier: index for index, identifier in enumerate(identifiers)}
    found = {label: walk_images(folder / "train" / identifier) for identifier, label in number.items()}
    train = [(str(path.relative_to(folder)), label) for label, paths in found.items() for path in paths]
    # The published test images carry no labels, so the validation images are what everybody tests on.
    files = {"train": train, "test": _val_files(folder, number)}
    if not any(files.values()):
        raise UserError(f"data.source: the Tiny ImageNet folder {folder} holds no images")
    classes = _class_names(folder, identifiers)
    samples = {
        split: FileSamples(folder, [path for path, _ in pairs], [label for _, label in pairs], classes)
        for split, pairs in files.items()
    }
    # Some files are saved as grey; the set is meant to be RGB.
    return SampleSet("tinyimagenet", samples, (TINY_NOTE,), channels=3)


def _val_files(folder: Path, number: dict[str, int]) -> list[tuple[str, int]]:
    files, table = [], folder / TINY_ANNOTATIONS
    for line in filter(str.strip, _lines(table)):
        name, identifier = [*line.split("\t"), ""][:2]
        if identifier not in number:
            raise UserError(f"data.source: {table} names the class {identifier!r}, which train/ lacks")
        if name in ("", "..") or "/" in name or "\0" in name:
            raise UserError(f"data.source: {table} must hold names of files, got {name!r}")
        files.append((str(Path("val", "images", name)), number[identifier]))
    return files


def _class_names(folder: Path, identifiers: list[str]) -> tuple[str, ...]:
    """The first word of each class; identifiers stand in where words.txt has nothing."""
    lines = _lines(folder / "words.txt") if (folder / "words.txt").is_file() else []
    names = {line.split("\t")[0]: line.split("\t")[1].split(",")[0] for line in lines if "\t" in line}
    own = [names.get(identifier, printable(identifier)) for identifier in identifiers]
    # Two may be called alike, as the crane that flies and the one that lifts: then that names neither.
    pairs = zip(own, identifiers, strict=True)
    return tuple(name if own.count(name) == 1 else printable(identifier) for name, identifier in pairs)


def _lines(path: Path) -> list[str]:
    with reading(path):
        return path.read_text(encoding="utf-8").splitlines()
