"""Many image files as the splits of one data set, whole or in chunks: decoded in threads, broken ones skipped."""

import os
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pmae.config import DataConfig
from pmae.data.images import DTYPES, ImageSet, Splits
from pmae.data.readers.decode import SUFFIXES, decode, require_room
from pmae.errors import UserError

SPLITS = ("train", "val", "test")
SHOWN = 5


@dataclass(frozen=True)
class ImageFile:
    """A file, the name it goes by, and where it belongs."""

    path: Path
    name: str
    split: str = "train"
    label: int | None = None


def read_files(
    name: str, files: Sequence[ImageFile], classes: tuple[str, ...], config: DataConfig, notes: tuple[str, ...] = ()
) -> Splits:
    """Decode the files into one array and hand out its parts, split by split."""
    files = sorted(files, key=lambda file: SPLITS.index(file.split))
    images, failures = _decode_all(files, config)
    if failures:
        kept = [i for i in range(len(files)) if i not in failures]
        # Moved up in place: a second array might be more than memory holds.
        for new, old in enumerate(kept):
            images[new] = images[old]
        images, files = images[: len(kept)], [files[i] for i in kept]
        notes = (*notes, _warn_of(list(failures.values())))
    sets = {split: _part(split, files, images, classes) for split in SPLITS}
    if sets["train"] is None:
        raise UserError(f"data.source {name!r} must have at least one readable training image, got none")
    return Splits(name, sets["train"], sets["val"], sets["test"], notes)


def stream_files(
    files: Iterable[ImageFile], classes: tuple[str, ...], config: DataConfig, size: int
) -> Iterator[tuple[str, ImageSet]]:
    """The same images as `read_files`, in order of the files, in chunks of one split; at most three are in memory."""
    failures: list[str] = []
    first: tuple[str, np.ndarray] | None = None
    chunk: list[tuple[ImageFile, np.ndarray]] = []
    for file, pixels in _decoded_ahead(files, config, 2 * size):
        if isinstance(pixels, str):
            failures.append(pixels)
            refuse_too_many(failures, config)
            continue
        first = first or (file.name, pixels)
        require_alike(*first, file.name, pixels)
        if chunk and (len(chunk) == size or chunk[-1][0].split != file.split):
            yield _joined(chunk, classes)
            chunk = []
        chunk.append((file, pixels))
    if not chunk:
        raise UserError(f"data.source must have at least one readable image, got none: {listed(failures)}")
    yield _joined(chunk, classes)
    if failures:
        _warn_of(failures)


def _decoded_ahead(
    files: Iterable[ImageFile], config: DataConfig, ahead: int
) -> Iterator[tuple[ImageFile, np.ndarray | str]]:
    """Each file with its pixels or what is wrong with it, in order, so many being decoded before they are asked for."""
    waiting: deque[tuple[ImageFile, Future[np.ndarray | str]]] = deque()
    with ThreadPoolExecutor() as pool:
        for file in files:
            waiting.append((file, pool.submit(_try_decode, file, config)))
            if len(waiting) > ahead:
                done, pixels = waiting.popleft()
                yield done, pixels.result()
        yield from ((done, pixels.result()) for done, pixels in waiting)


def _joined(chunk: list[tuple[ImageFile, np.ndarray]], classes: tuple[str, ...]) -> tuple[str, ImageSet]:
    labels = [file.label for file, _ in chunk if file.label is not None]
    images, names = np.stack([pixels for _, pixels in chunk]), tuple(file.name for file, _ in chunk)
    return chunk[0][0].split, ImageSet(images, np.array(labels, np.int64) if labels else None, classes, names)


def _part(split: str, files: Sequence[ImageFile], images: np.ndarray, classes: tuple[str, ...]) -> ImageSet | None:
    here = [i for i, file in enumerate(files) if file.split == split]
    if not here:
        return None
    # Files are sorted by split, so a slice (a view, not a copy) holds exactly this one.
    part, pixels = files[here[0] : here[-1] + 1], images[here[0] : here[-1] + 1]
    labels = [file.label for file in part if file.label is not None]
    return ImageSet(pixels, np.array(labels, np.int64) if labels else None, classes, tuple(file.name for file in part))


def _decode_all(files: Sequence[ImageFile], config: DataConfig) -> tuple[np.ndarray, dict[int, str]]:
    """All images in file order, and the files that could not be read, by position; their rows hold nothing."""
    first, reference = _first_readable(files, config)
    size = f"{len(files):,} images of {_size(reference)} pixels"
    require_room(len(files) * reference.nbytes, size)
    images = np.zeros((len(files), *reference.shape), reference.dtype)

    def fill(position: int) -> str | None:
        pixels = _try_decode(files[position], config)
        if isinstance(pixels, str):
            return pixels
        require_alike(first.name, reference, files[position].name, pixels)
        images[position] = pixels
        return None

    failures: dict[int, str] = {}
    with ThreadPoolExecutor() as pool:
        for position, failure in enumerate(pool.map(fill, range(len(files)))):
            if failure is not None:
                failures[position] = failure
                refuse_too_many(list(failures.values()), config)
    return images, failures


def _first_readable(files: Sequence[ImageFile], config: DataConfig) -> tuple[ImageFile, np.ndarray]:
    failures: list[str] = []
    for file in files:
        pixels = _try_decode(file, config)
        if not isinstance(pixels, str):
            return file, pixels
        failures.append(pixels)
        refuse_too_many(failures, config)
    raise UserError(f"data.source must have at least one readable image, got none: {listed(failures)}")


def _try_decode(file: ImageFile, config: DataConfig) -> np.ndarray | str:
    """The pixels, or the file's name and what is wrong with it."""
    try:
        pixels = decode(file.path, config)
        return pixels if pixels.dtype.name in DTYPES else f"{file.name!r} (unsupported depth {pixels.dtype})"
    # Pillow's decoders raise whatever a broken file trips over (OSError, SyntaxError, struct.error, ...), so all
    # of them count; a decompression bomb is among them.
    except Exception as error:
        return f"{file.name!r} ({type(error).__name__}: {_one_line(error, file)})"


def _one_line(error: Exception, file: ImageFile) -> str:
    return " ".join(str(error).replace(repr(str(file.path)), "the file").split())


def require_alike(first_name: str, first: np.ndarray, name: str, pixels: np.ndarray) -> None:
    """Name two files that differ, and the setting that would make them alike."""
    if first.shape == pixels.shape and first.dtype == pixels.dtype:
        return
    if first.shape[1:] != pixels.shape[1:]:
        setting, one, other = "data.resize must be given when sizes differ", _size(first), _size(pixels)
    elif first.shape[0] != pixels.shape[0]:
        setting = "data.channels must be given when channels differ"
        one, other = f"{first.shape[0]}-channel", f"{pixels.shape[0]}-channel"
    else:
        setting, one, other = "images must be saved in one depth", str(first.dtype), str(pixels.dtype)
    raise UserError(f"{setting}: {first_name!r} is {one} and {name!r} is {other}")


def _size(pixels: np.ndarray) -> str:
    return f"{pixels.shape[2]}x{pixels.shape[1]}"


def refuse_too_many(failures: list[str], config: DataConfig) -> None:
    if len(failures) > config.max_unreadable:
        cap = config.max_unreadable
        raise UserError(f"data.max_unreadable is {cap}, and more files than that cannot be read: {listed(failures)}")


def _warn_of(failures: list[str]) -> str:
    warnings.warn(f"skipped {len(failures)} unreadable files: {listed(failures)}", stacklevel=3)
    return f"skipped {len(failures)} unreadable files: {', '.join(failures)}"


def listed(failures: list[str]) -> str:
    return ", ".join(failures[:SHOWN]) + (", ..." if len(failures) > SHOWN else "")


# A folder of image files, flat or nested; subfolders are classes only when the settings say so.


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
