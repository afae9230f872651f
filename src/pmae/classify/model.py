"""The classifier that is kept: encoder, linear head, class names and what tells how sure it is, in two files.

classifier.json          classes, how images are read, settings      classifier.safetensors  every number
"""

import copy
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pmae.classify.calibrate import Reference, probabilities
from pmae.classify.table import SEPARATOR
from pmae.config import CropMode, EncoderConfig, Interpolation, Layout
from pmae.data.arrays import channels_first
from pmae.data.augment import Standardize
from pmae.data.images import warn_of_units
from pmae.embed import Embedder
from pmae.errors import UserError, require
from pmae.files import disk_errors, folder_path, read_object, read_tensors, write_json, write_tensors
from pmae.models import Encoder, build_encoder
from pmae.runs import CLASSIFIER, SHAPE, is_classifier
from pmae.train.checkpoint import load_into
from pmae.train.environment import pick_device
from pmae.validation import Count, NonNegative, Positive, Proportion, Rule, coerced

TENSORS = "classifier.safetensors"
REFERENCE = ("mean", "whitening")
READING = ("layout", "resize", "channels", "crop_mode", "crop_pct", "interpolation")
"""What a card keeps of `DataConfig`: how new images are to be read."""
CHANCE = 0.5
"""From which probability on an image that may have several labels has one."""
Classes = Annotated[tuple[str, ...], Rule("one class or more, no two alike", lambda c: 0 < len(set(c)) == len(c))]


@dataclass(frozen=True)
class Card:
    """classifier.json: all of a classifier but its numbers."""

    classes: Classes
    multi_label: bool
    pooling: str
    shape: Annotated[tuple[Count, Count, Count], SHAPE]
    dtype: str
    encoder: dict[str, Any]
    """As `EncoderConfig`."""
    layout: Layout = "auto"
    resize: Count | None = None
    channels: Literal[1, 3] | None = None
    crop_mode: CropMode = "squash"
    """Files were squashed before there was another way."""
    crop_pct: Proportion = 1.0
    interpolation: Interpolation = "bicubic"
    threshold: NonNegative = math.inf
    """Distance from the training features beyond which an image is flagged."""
    temperature: Positive = 1.0
    """What the logits were divided by; the head is already."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Of the fine-tuning."""
    format: Annotated[int, Rule("1, the format that this version reads", lambda n: n == 1)] = 1

    @property
    def reading(self) -> dict[str, Any]:
        """The settings of `DataConfig` with which new images are to be read."""
        return {name: getattr(self, name) for name in READING}


class Answers(NamedTuple):
    """What a classifier says of images: probabilities (N, C), and distances from the training features (N,)."""

    probabilities: np.ndarray
    distances: np.ndarray


class ImageClassifier:
    """Images to labels, with calibrated probabilities.

    >>> classifier = pmae.load_classifier("clf")
    >>> classifier.predict(images), classifier.predict_proba(images)
    """

    def __init__(
        self,
        card: Card,
        encoder: Encoder,
        standardize: Standardize,
        head: tuple[Tensor, Tensor],
        reference: Reference,
        device: str | torch.device = "cpu",
        batch_size: int | None = None,
    ) -> None:
        self.card, self.head, self.reference = card, head, reference
        self.embedder = Embedder(encoder, standardize, card.pooling, torch.device(device), batch_size)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the probabilities."""
        return self.card.classes

    @property
    def encoder(self) -> Encoder:
        """The fine-tuned encoder; `encoder.net` is a plain timm model."""
        return self.embedder.encoder

    def to(self, device: str | torch.device) -> "ImageClassifier":
        """The same classifier on another device; this one stays where it is."""
        parts = copy.deepcopy((self.encoder, self.embedder.standardize))
        return ImageClassifier(self.card, *parts, self.head, self.reference, device)

    def answer(self, images: np.ndarray) -> Answers:
        """Probabilities and distances of images (N, C, H, W), from one pass of the encoder."""
        warn_of_units(images, self.card.dtype, stacklevel=4)
        return self.answer_of(self.embedder(images))

    def answer_of(self, features: np.ndarray) -> Answers:
        """The same, of images that the embedder has seen."""
        return Answers(probabilities(self.logits(features), self.card.multi_label), self.reference.distances(features))

    def logits(self, features: np.ndarray) -> np.ndarray:
        """Calibrated logits (N, C) of features."""
        weight, bias = (part.numpy().astype(np.float64) for part in self.head)
        return features.astype(np.float64) @ weight.T + bias

    def predict_proba(self, images: Any) -> np.ndarray:
        """Probabilities (N, C) of images in any layout that pretraining takes."""
        return self.answer(self._as_images(images)).probabilities

    def predict(self, images: Any) -> list[str]:
        """The label of every image; several are joined by `;`, and may be none."""
        return self.names(self.predict_proba(images))

    def names(self, found: np.ndarray) -> list[str]:
        """The labels that probabilities (N, C) stand for."""
        if not self.card.multi_label:
            return [self.classes[i] for i in found.argmax(1)]
        return [SEPARATOR.join(c for c, p in zip(self.classes, row, strict=True) if p >= CHANCE) for row in found]

    def save(self, folder: Path | str) -> Path:
        """Write the two files into a folder that holds no classifier; the first of them last."""
        path = folder_path(folder, "path")
        require(not (path / CLASSIFIER).exists(), "path", "a folder without a classifier", str(path))
        with disk_errors(path):
            path.mkdir(parents=True, exist_ok=True)
        tensors = {f"encoder.{name}": value.cpu() for name, value in self.encoder.net.state_dict().items()}
        tensors |= {"head.weight": self.head[0], "head.bias": self.head[1]}
        statistics = self.embedder.standardize.state_dict()
        tensors |= {f"standardize.{name}": value.cpu() for name, value in statistics.items()}
        tensors |= {f"reference.{name}": torch.from_numpy(getattr(self.reference, name)) for name in REFERENCE}
        write_tensors(path / TENSORS, tensors)
        write_json(path / CLASSIFIER, asdict(self.card))
        return path

    def _as_images(self, images: Any) -> np.ndarray:
        array = images.detach().cpu().numpy() if isinstance(images, Tensor) else np.asarray(images)
        shape, layout = self.card.shape, self.card.layout
        # Of a shape as these only a cube can be meant otherwise.
        known = array.ndim == 4 and array.shape[1:] == shape and (layout == "auto" or len(set(shape)) > 1)
        array = array if known and len(array) else channels_first(array, layout)
        require(array.shape[1:] == shape, "images", f"of shape {shape} (channels, height, width)", array.shape[1:])
        return array


def load_classifier(path: Path | str, device: str = "auto", batch_size: int | None = None) -> ImageClassifier:
    """The classifier that `pmae finetune` or `ImageClassifier.save` wrote into a folder."""
    folder = Path(path).expanduser()
    if not is_classifier(folder):
        rule = f"a folder that `pmae finetune` wrote (with a {CLASSIFIER})"
        raise UserError(f"classifier must be {rule}, got {str(folder)!r}")
    card: Card = coerced(read_object(folder / CLASSIFIER), Card, str(folder / CLASSIFIER))
    encoder = build_encoder(EncoderConfig(**card.encoder), card.shape)
    load_into(encoder.net, folder / TENSORS, "encoder.")
    tensors = read_tensors(folder / TENSORS)
    expected = {"head.weight": (len(card.classes), encoder.width), "head.bias": (len(card.classes),)}
    expected |= {"reference.mean": (encoder.width,), "reference.whitening": (encoder.width,) * 2}
    for name, shape in expected.items():
        found = tuple(tensors[name].shape) if name in tensors else "nothing"
        require(found == shape, f"{name} in {folder / TENSORS}", f"of shape {shape}", found)
    standardize = Standardize(tensors["standardize.mean"], tensors["standardize.std"])
    mean, whitening = (tensors[f"reference.{name}"].numpy() for name in REFERENCE)
    head, reference = (tensors["head.weight"], tensors["head.bias"]), Reference(mean, whitening, card.threshold)
    return ImageClassifier(card, encoder.eval(), standardize, head, reference, pick_device(device), batch_size)
