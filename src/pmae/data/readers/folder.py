"""A folder of image files, flat or nested; subfolders are classes only when the settings say so."""

import os
from collections.abc import Iterator
from pathlib import Path

from pmae.config import DataConfig
from pmae.data.images import Splits
from pmae.data.readers.decode import SUFFIXES
from pmae.data.readers.files import SPLITS, ImageFile, read_files
from pmae.errors import UserError


def read_folder(folder: Path, config: DataConfig) -> Splits:
    """All images under the folder; its train/ and val/ or test/ subfolders are honoured as splits."""
    roots = split_folders(folder)
    classes = folder_classes(roots, config)
    files = list(folder_files(folder, roots, classes))
    if not files:
        raise UserError(f"data.source: the folder {folder} holds no images ({', '.join(SUFFIXES)})")
    return read_files(folder.resolve().name, files, classes, config, _notes(folder, roots, len(files)))


def folder_classes(roots: dict[str, Path], config: DataConfig) -> tuple[str, ...]:
    """The subfolders that hold images, sorted, where the settings say that they are classes."""
    if config.labels != "folders":
        return ()
    return tuple(sorted({_class_of(path, root) for root in roots.values() for path in walk_images(root)}))


def folder_files(folder: Path, roots: dict[str, Path], classes: tuple[str, ...]) -> Iterator[ImageFile]:
    """The images of each split in order, found while they are asked for."""
    number = {name: index for index, name in enumerate(classes)}
    for split, root in roots.items():
        for path in walk_images(root):
            label = number[_class_of(path, root)] if classes else None
            yield ImageFile(path, printable(path.relative_to(folder)), split, label)


def split_folders(folder: Path) -> dict[str, Path]:
    """train/ with val/ or test/ where they exist; otherwise the folder is all training images."""
    roots = {split: folder / split for split in SPLITS if (folder / split).is_dir()}
    return roots if "train" in roots and len(roots) > 1 else {"train": folder}


def list_images(folder: Path) -> list[Path]:
    """All that `walk_images` finds."""
    return list(walk_images(folder))


def walk_images(folder: Path) -> Iterator[Path]:
    """Image files below a folder in sorted order, with no more in memory than the names in one folder a level.

    Hidden ones are skipped, links to folders (which may loop) not followed.
    """
    try:
        with os.scandir(folder) as entries:
            folders = {entry.name for entry in entries if entry.is_dir(follow_symlinks=False)}
        names = sorted(name for name in os.listdir(folder) if name in folders or _is_image_name(name))
    except OSError as error:
        raise UserError(f"data.source: the folder {folder} cannot be listed: {error.strerror}") from error
    for name in names:
        if name in folders and not name.startswith((".", "__MACOSX")):
            yield from walk_images(folder / name)
        elif name not in folders and os.path.isfile(folder / name):
            yield folder / name


def _is_image_name(name: str) -> bool:
    return name.lower().endswith(SUFFIXES) and not name.startswith(".")


def printable(path: Path) -> str:
    """A name with forward slashes; bytes that are not UTF-8 are escaped, so that it can be printed and saved."""
    return os.fsencode(path.as_posix()).decode("utf-8", "backslashreplace")


def _class_of(path: Path, root: Path) -> str:
    parts = path.relative_to(root).parts
    if len(parts) < 2:
        raise UserError(f"data.labels 'folders' needs every image in a class folder; {printable(path)!r} is in none")
    return printable(Path(parts[0]))


def _notes(folder: Path, roots: dict[str, Path], used: int) -> tuple[str, ...]:
    """What was left out, in words."""
    notes = [] if len(roots) > 1 else ["no held-out images: the folder has no train/ and test/ (or val/)"]
    outside = len(list_images(folder)) - used if len(roots) > 1 else 0
    if outside:
        notes.append(f"{outside} images outside {', '.join(f'{split}/' for split in roots)} were left out")
    linked = sum(os.path.islink(os.path.join(parent, name)) for parent, names, _ in os.walk(folder) for name in names)
    if linked:
        notes.append(f"{linked} linked folders were not followed")
    return tuple(notes)
