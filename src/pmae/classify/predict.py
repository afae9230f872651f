"""`pmae predict`: labels and probabilities of any number of images, streamed to a .csv or .parquet file."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pmae.classify.fit import Say
from pmae.classify.model import ImageClassifier, load_classifier
from pmae.config import DataConfig
from pmae.data.images import ImageSet
from pmae.data.sets import read_chunks, read_like
from pmae.embed import fitting, write_streamed
from pmae.errors import UserError, require
from pmae.feature_files import Rows, writer_for
from pmae.train.distributed import World, local_device
from pmae.train.environment import pick_device

DIGITS = 6
"""Of probabilities and distances in a table."""
ANY = 2**31
"""Unreadable files are passed over, however many, and named."""


class Predicted(NamedTuple):
    """How many images were classified, how many of them are unlike the training images, and which were unreadable."""

    images: int
    drifted: int
    unreadable: tuple[str, ...]


def predict(
    classifier: ImageClassifier | Path | str,
    data: DataConfig | Path | str,
    out: Path | str,
    top_k: int = 1,
    split: str = "all",
    device: str = "auto",
    batch_size: int | None = None,
    say: Say = lambda message: None,
    probabilities: bool = False,
) -> Predicted:
    """Write file, label, probability, distance and whether it drifted for every image of a source.

    With `top_k` the next likeliest labels follow, with `probabilities` a column for every class, which images that may
    have several labels get anyway.
    Processes that `torchrun` started divide the images, and the first one writes.
    """
    where, out = local_device(pick_device(device)), Path(out).expanduser()
    if not isinstance(classifier, ImageClassifier):
        classifier = load_classifier(classifier, str(where), batch_size)
    own, card = classifier, classifier.card
    require(1 <= top_k <= len(card.classes), "top_k", f"from 1 to the number of classes ({len(card.classes)})", top_k)
    rule = "1 where images may have several labels, each of which has its probability"
    require(top_k == 1 or not card.multi_label, "top_k", rule, top_k)
    if out.suffix.lower() not in (".csv", ".parquet"):
        raise UserError(f"out must end in .csv or .parquet, got {str(out)!r}")
    reading = data if isinstance(data, DataConfig) else reading_for(own, str(data))
    write, drifted, unreadable = writer_for(out, flat=True), list[int](), list[str]()

    def rows(world: World) -> Iterator[Rows]:
        source = read_chunks(reading, own.embedder.batch_size, split, world.part)
        for (name, part), features in own.embedder.ahead(fitting(source.chunks, card.shape, card.dtype)):
            told = name if len(source.splits) > 1 else None
            yield table(own, part, features, top_k, probabilities, told) if len(part) else Rows(features, {})
        unreadable.extend(source.unreadable.found if source.unreadable else ())

    def look(part: Rows) -> None:
        drifted.append(int(part.columns["drifted"].sum()))

    count = write_streamed(out, rows, [], write, where, say, look)
    return Predicted(count, sum(drifted), tuple(unreadable))


def reading_for(classifier: ImageClassifier, source: str) -> DataConfig:
    """A source read as the classifier's training images were."""
    card = classifier.card
    return read_like(DataConfig(source, max_unreadable=ANY, **card.reading), card.shape)


def table(
    classifier: ImageClassifier,
    part: ImageSet,
    features: np.ndarray,
    top_k: int,
    probabilities: bool = False,
    split: str | None = None,
) -> Rows:
    """The answers for some images, by column; images of an array have no `file`, but a split, and come in its order."""
    found, distances = classifier.answer_of(features)
    columns = {"file": np.array(part.names)} if part.names else {"split": np.full(len(part), split)} if split else {}
    if classifier.card.multi_label:
        columns["label"] = np.array(classifier.names(found))
    else:
        columns |= _likeliest(found, classifier.classes, top_k)
    if classifier.card.multi_label or probabilities:
        columns |= {f"p_{name}": found[:, i].round(DIGITS) for i, name in enumerate(classifier.classes)}
    columns["distance"] = distances.round(DIGITS)
    columns["drifted"] = (distances > classifier.reference.threshold).astype(int)
    return Rows(np.empty((len(part), 0), np.float32), columns)


def _likeliest(found: np.ndarray, classes: tuple[str, ...], top_k: int) -> dict[str, np.ndarray]:
    order = np.argsort(-found, axis=1, kind="stable")[:, :top_k]
    columns: dict[str, np.ndarray] = {}
    for rank in range(top_k):
        suffix = f"_{rank + 1}" if rank else ""
        columns[f"label{suffix}"] = np.array(classes)[order[:, rank]]
        columns[f"probability{suffix}"] = np.take_along_axis(found, order[:, rank : rank + 1], 1)[:, 0].round(DIGITS)
    return columns
