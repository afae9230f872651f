"""The explorer's page of a classifier: drop an image; see its label, how sure that is, its neighbours, and why."""

import html
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pmae.app.explorer import QUIET, explore, gradio
from pmae.app.material import BANK, decoded, read_upload, spread
from pmae.app.panels import NEIGHBOURS, pictures, words
from pmae.classify.labels import Labelled, read_labelled
from pmae.classify.model import ImageClassifier, load_classifier
from pmae.classify.predict import reading_for
from pmae.classify.table import Columns
from pmae.config import DataConfig
from pmae.data.images import as_tensor
from pmae.data.sets import read_like
from pmae.errors import UserError
from pmae.evaluate.probes import nearest
from pmae.files import read_object
from pmae.models.maps import attention_maps, token_maps
from pmae.report.pictures import View, lit, view_of

SHOWN = 5  # likeliest classes
STARTING = "starting: 1 of 2, the page's library (10 to 30 s the first time)"


class Explained:
    """A classifier, and the labelled images among which neighbours are looked for, where they are known."""

    def __init__(self, classifier: ImageClassifier, labelled: Labelled | None = None) -> None:
        self.classifier, self.shape = classifier, classifier.card.shape
        self.dtype = np.dtype(classifier.card.dtype)
        self.labelled = labelled.take(spread(len(labelled.targets), BANK)) if labelled else None
        images = None if self.labelled is None else self.labelled.images.images
        self.view = None if images is None else self._view(images[: 2 * NEIGHBOURS])
        self.bank = None if images is None else torch.from_numpy(classifier.embedder(images))

    def _view(self, images: np.ndarray) -> View:
        return view_of(np.asarray(images, np.float64), self.dtype.name)

    def pictures(self, images: np.ndarray) -> np.ndarray:
        """(N, H, W, 3) colours, in the range of the labelled images or, without them, in their own."""
        return (self.view or self._view(images)).pictures(np.asarray(images, np.float64))

    def read(self, path: Path) -> np.ndarray:
        """A dropped file as `pmae predict` would read it; one of another size or depth is converted."""
        pixels = decoded(path, reading_for(self.classifier, str(path)))
        if pixels.shape == self.shape and pixels.dtype == self.dtype:
            return pixels
        whole = self.dtype.kind != "f"
        low, high = (0.0, float(np.iinfo(self.dtype).max)) if whole else (0.0, 1.0)
        if self.view is not None and self.dtype != np.uint8:
            low, high = float(np.min(self.view.low)), float(np.max(self.view.high))
        return read_upload(path, self.shape, self.dtype, low, high)

    @torch.no_grad()
    def looked(self, image: np.ndarray, label: int) -> tuple[np.ndarray, str]:
        """Where an answer comes from (rows, columns), and what that means."""
        own = self.classifier
        x = own.embedder.standardize(as_tensor(image[None]).to(own.embedder.device))
        if own.card.pooling == "cls":
            seen = attention_maps(own.encoder, x)
            assert seen is not None
            return seen.mean(1)[0].cpu().numpy(), "the brighter, the more [CLS], which answers, attends to a patch"
        return evidence(own, token_maps(own.encoder, x), label), "the brighter, the more a patch speaks for this label"


def evidence(classifier: ImageClassifier, maps: Tensor, label: int) -> np.ndarray:
    """What each patch adds to a label's logit (rows, columns), against the mean of all labels where only one is right.

    Exact, not an approximation: the head is linear and sees the mean of the tokens (class activation maps, Zhou et al.
    2016).
    """
    weight = classifier.head[0].to(maps)
    own = weight[label] if classifier.card.multi_label else weight[label] - weight.mean(0)
    return torch.einsum("w,wrc->rc", own, maps[0]).cpu().numpy()


def answer(material: Explained, path: str | None) -> str:
    if not path:
        return words("Drop an image to see what it is taken for.")
    try:
        image = material.read(Path(path))
    except UserError as error:
        return words(str(error), kind="problem")
    own = material.classifier
    (found,), (distance,) = own.answer(image[None])
    order = np.argsort(-found, kind="stable")[:SHOWN]
    looked, meaning = material.looked(image, int(order[0]))
    picture = material.pictures(image[None])
    shown = {"image": picture[0], f"why {own.classes[order[0]]}": lit(picture, looked[None])[0]}
    label = own.names(found[None])[0] or "none of the labels"
    said = words(f"{label}: {found[order[0]]:.1%}", kind="score") + bars(own, found, order) + _drift(own, distance)
    beside = f'<div class="beside">{pictures(shown.items())}<div>{said}</div></div>'
    return beside + words(f"In the second picture, {meaning}.") + neighbours(material, image)


def bars(classifier: ImageClassifier, found: np.ndarray, order: np.ndarray) -> str:
    """The likeliest labels with a bar each, as long as its probability."""
    rows = [(html.escape(classifier.classes[i]), 100 * found[i]) for i in order.tolist()]
    lines = [f'<tr><th>{n}</th><td><i style="width:{p:.1f}%"></i></td><td>{p:.1f}%</td></tr>' for n, p in rows]
    return f'<table class="bars">{"".join(lines)}</table>'


def _drift(classifier: ImageClassifier, distance: float) -> str:
    threshold = classifier.reference.threshold
    if distance <= threshold:
        return words(f"It is like the training images: distance {distance:.1f}, of {threshold:.1f} that are usual.")
    told = f"It is unlike the training images (distance {distance:.1f}, {threshold:.1f} are usual)"
    return words(f"{told}: check the answer yourself.", kind="problem")


def neighbours(material: Explained, image: np.ndarray) -> str:
    """The labelled images whose features are most like the image's, with their labels."""
    if material.labelled is None or material.bank is None:
        return words("Give the labelled images with --data to see the nearest of them.")
    query = torch.from_numpy(material.classifier.embedder(image[None]))
    places = nearest(material.bank, query, min(NEIGHBOURS, len(material.bank)))[0]
    like = torch.cosine_similarity(material.bank[places], query).tolist()
    targets = material.labelled.targets[places.numpy()]
    several = targets if targets.ndim == 2 else np.eye(len(material.classifier.classes))[targets]
    names = material.classifier.names(several)
    found = material.pictures(material.labelled.images.images[places.numpy()])
    captions = [f"{near:.2f} {name}" for near, name in zip(like, names, strict=True)]
    heading = f"The nearest of {len(material.bank):,} labelled images, by the cosine of their features"
    return words(heading, kind="score") + pictures(zip(captions, found, strict=True), "small")


def explore_classifier(
    path: str, data: str | None, port: int | None, browser: bool, say: Callable[[str], None]
) -> None:
    """Serve the page of a classifier until Ctrl-C; `data` is where its labelled images are, if not where they were."""
    say(STARTING)
    gradio()
    say("starting: 2 of 2, reading the classifier and its labelled images")
    classifier = load_classifier(path)
    explore(Explained(classifier, labelled_images(path, classifier, data, say)), port, browser, say, build)


def labelled_images(
    path: str, classifier: ImageClassifier, data: str | None, say: Callable[[str], None]
) -> Labelled | None:
    """The training images of a classifier, from `data` or from where fine-tuning found them, if they are there."""
    results = Path(path).expanduser() / "results.json"
    known = read_object(results).get("data", {}) if results.is_file() else {}
    source = data or known.get("source")
    if not source:
        return None
    card = classifier.card
    root = {"root": known["root"]} if "root" in known else {}
    columns = Columns.named({} if data else known.get("columns", {}))
    reading = read_like(DataConfig(str(source), **root, **card.reading), card.shape)
    try:
        _, found = read_labelled(reading, None if data else known.get("labels"), columns)
    except UserError as error:
        if data:
            raise
        say(f"no neighbours: {error}")
        return None
    if found.classes != classifier.classes or found.train.images.shape != classifier.card.shape:
        raise UserError(f"data must be images of the classifier's classes and shape, got {str(source)!r}")
    return found.train


def build(material: Explained) -> Any:
    """The page, not yet served: a place to drop an image, and what the classifier says of it."""
    gr, classes = gradio(), material.classifier.classes
    about = f"{len(classes)} classes: {', '.join(classes[:12])}{', ...' if len(classes) > 12 else ''}"
    with gr.Blocks(title="pmae classifier", analytics_enabled=False, fill_width=True) as page:
        gr.HTML(f"<h1>What is it?</h1>{words(about)}", elem_id="heading")
        file = gr.File(label="Drop an image here", type="filepath", height=120, elem_id="drop")
        shown = gr.HTML(answer(material, None), elem_id="answer")
        file.change(partial(answer, material), file, shown, **QUIET)
    return page
