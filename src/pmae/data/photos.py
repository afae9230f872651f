"""`photos`: 32x32 crops of photographs that the scikit-image and scikit-learn wheels carry, labelled by photograph.

It needs no download. Test crops come from the right part of each picture and training crops from the left; the two are
cut apart before anything is resized, so that they share no pixel of the original.

The pictures stay in their packages; the terms that those packages state for them are, in our words:

- astronaut, hubble_deep_field (NASA), rocket (SpaceX), clock_motion (Stefan van der Walt): public domain;
- brick, gravel (CC0 Textures), grass (DeviantArt), camera (Lav Varshney), chelsea (Stefan van der Walt),
  coffee (Rachel Michetti), retina (Wikimedia Commons): CC0;
- coins, ihc (immunohistochemistry of colon tissue): no known restriction of copyright;
- moon, motorcycle_left (Middlebury stereo benchmark of 2014): no statement beyond the package's own licence;
- china, flower (Flickr, scikit-learn): CC BY 2.0, attribution in that package's README.
"""

import importlib.util
from pathlib import Path

import numpy as np
from PIL import Image

from pmae.data.images import ImageSet, Splits
from pmae.errors import UserError

SIDE = 32
SHORTER_SIDE = 160
TEST_PART = 0.3
# Rows x columns of crop positions in a picture.
TRAIN_GRID, TEST_GRID = (17, 18), (16, 5)
FILES = {
    "skimage/data": (
        *("astronaut.png", "brick.png", "camera.png", "chelsea.png", "clock_motion.png", "coffee.png", "coins.png"),
        *("grass.png", "gravel.png", "hubble_deep_field.jpg", "ihc.png", "moon.png", "motorcycle_left.png"),
        *("retina.jpg", "rocket.jpg"),
    ),
    "sklearn/datasets/images": ("china.jpg", "flower.jpg"),
}


def load_photos() -> Splits:
    """About 5,200 training and 1,360 test crops of 17 photographs, the same on every machine."""
    paths = photo_paths()
    halves = [_halves(path) for path in paths]
    classes = tuple(path.stem for path in paths)
    train = _labelled([_crops(left, TRAIN_GRID) for left, _ in halves], classes)
    test = _labelled([_crops(right, TEST_GRID) for _, right in halves], classes)
    return Splits("photos", train, test=test, notes=("crops of 17 photographs, labelled by photograph",))


def photo_paths() -> list[Path]:
    """Where the installed packages keep the pictures; the packages are not imported, so nothing can be downloaded."""
    paths = [_package_folder(folder) / name for folder, names in FILES.items() for name in names]
    for path in paths:
        if not path.is_file():
            raise UserError(f"data.source 'photos' needs {path}, which this version of its package does not carry")
    return paths


def _package_folder(folder: str) -> Path:
    package, _, inside = folder.partition("/")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"data.source 'photos' needs the package {package}, which is not installed")
    return Path(spec.submodule_search_locations[0], inside)


def _halves(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Left part for training and right part for test, each (H, W, 3), scaled so that a crop shows something."""
    with Image.open(path) as image:
        picture = image.convert("RGB")
    cut = round(picture.width * (1 - TEST_PART))
    scale = SHORTER_SIDE / min(picture.size)
    boxes = (0, 0, cut, picture.height), (cut, 0, picture.width, picture.height)
    left, right = (_scaled(picture.crop(box), scale) for box in boxes)
    return left, right


def _scaled(picture: Image.Image, scale: float) -> np.ndarray:
    size = max(SIDE, round(picture.width * scale)), max(SIDE, round(picture.height * scale))
    return np.asarray(picture.resize(size, Image.Resampling.BICUBIC))


def _crops(picture: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """Crops on a regular grid that reaches all four borders, (N, 3, 32, 32)."""
    height, width = picture.shape[:2]
    rows = np.linspace(0, height - SIDE, grid[0]).round().astype(int)
    columns = np.linspace(0, width - SIDE, grid[1]).round().astype(int)
    windows = np.lib.stride_tricks.sliding_window_view(picture, (SIDE, SIDE), axis=(0, 1))
    crops: np.ndarray = windows[rows[:, None], columns[None]].reshape(-1, 3, SIDE, SIDE)
    return crops


def _labelled(crops: list[np.ndarray], classes: tuple[str, ...]) -> ImageSet:
    labels = np.repeat(np.arange(len(crops), dtype=np.int64), [len(c) for c in crops])
    return ImageSet(np.ascontiguousarray(np.concatenate(crops)), labels, classes)
