"""A folder of image files, flat or nested; subfolders are classes only when the settings say so."""

import os
from pathlib import Path

from pmae.config import DataConfig
from pmae.data.images import Splits
from pmae.data.readers.decode import SUFFIXES
from pmae.data.readers.files import SPLITS, ImageFile, read_files
from pmae.errors import UserError


def read_folder(folder: Path, config: DataConfig) -> Splits:
    """All images under the folder; its train/ and val/ or test/ subfolders are honoured as splits."""
    roots = split_folders(folder)
    paths = {split: list_images(root) for split, root in roots.items()}
    files = [(split, path) for split, found in paths.items() for path in found]
    if not files:
        raise UserError(f"data.source: the folder {folder} holds no images ({', '.join(SUFFIXES)})")
    owners = [_class_of(path, roots[split]) if config.labels == "folders" else "" for split, path in files]
    classes = tuple(sorted(set(owners))) if config.labels == "folders" else ()
    number = {owner: index for index, owner in enumerate(classes)}
    entries = [
        ImageFile(path, printable(path.relative_to(folder)), split, number.get(owner))
        for (split, path), owner in zip(files, owners, strict=True)
    ]
    return read_files(folder.resolve().name, entries, classes, config, _notes(folder, roots, len(files)))


def split_folders(folder: Path) -> dict[str, Path]:
    """train/ with val/ or test/ where they exist; otherwise the folder is all training images."""
    roots = {split: folder / split for split in SPLITS if (folder / split).is_dir()}
    return roots if "train" in roots and len(roots) > 1 else {"train": folder}


def list_images(folder: Path) -> list[Path]:
    """Image files below a folder, sorted; hidden ones are skipped, links to folders (which may loop) not followed."""
    found = []
    for parent, folders, names in os.walk(folder, followlinks=False):
        folders[:] = [name for name in folders if not name.startswith((".", "__MACOSX"))]
        found += [os.path.join(parent, name) for name in names if _is_image_name(name)]
    return sorted(Path(path) for path in found if os.path.isfile(path))


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
