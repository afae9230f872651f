"""The scikit-learn front door of classifiers: `PMAEClassifier("runs/a", method="linear").fit(X, y).predict(X_new)`."""

import math
import warnings
from pathlib import Path
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, clone
from sklearn.frozen import FrozenEstimator
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import check_consistent_length, check_is_fitted, column_or_1d

from pmae.classify import FinetuneConfig
from pmae.classify.fit import fit
from pmae.classify.labels import Labelled, LabelledData, with_validation
from pmae.classify.model import CHANCE
from pmae.config import DataConfig, Layout
from pmae.data.images import ImageSet
from pmae.embed import require_pooling
from pmae.errors import UserError, require
from pmae.estimator import PMAE
from pmae.estimator_inputs import is_flat, read_images
from pmae.runs import Run
from pmae.train.given import Start
from pmae.train.start import load_start, trained_on

SETTINGS = ("method", "class_weights", "epochs", "lr", "augment", "validation", "patience")


class PMAEClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Images to classes: a pretrained encoder with a head, fine-tuned on labels and calibrated.

    >>> model = PMAEClassifier("runs/a", method="linear").fit(images, labels)
    >>> model.predict(others), model.predict_proba(others)

    X is as for `PMAE`. A y of 0 and 1 with a column for each class is multi-label.

    Parameters
    ----------
    encoder : a run folder, weights of timm or Hugging Face, a `PMAE` that is fitted to X first, or
        `sklearn.frozen.FrozenEstimator(pmae)` for one that is fitted already; None is a `PMAE` of default settings.
    method : "linear" (a head on frozen features), "full" or "lora".
    pooling : what the head sees, the "mean" of the patch tokens or the "cls" token; None is as the `PMAE` that is given
        has it, and else "mean".
    class_weights : "none", or "balanced" for rare classes to count as much as common ones.
    image_shape : (H, W), (H, W, C) or (C, H, W) of the rows of a flat X.
    validation : share of the images that stops training and calibrates.
    epochs, lr, augment, patience : as `pmae finetune` has them, for `method` "full" and "lora".
    random_state : an int, the seed of the validation part and of training.
    device : "auto", "cpu", "cuda" or "cuda:N".

    Attributes
    ----------
    classes_ : the labels, in the order of the probabilities.
    classifier_ : the `ImageClassifier`, which saves itself; `pmae.load_classifier` loads it.
    image_shape_ : (C, H, W) of the images.
    n_features_in_ : C x H x W.
    feature_names_in_ : names of the columns, for a data frame.
    """

    def __init__(
        self,
        encoder: PMAE | FrozenEstimator | Run | str | Path | None = None,
        *,
        method: str = "linear",
        pooling: str | None = None,
        class_weights: str = "none",
        image_shape: tuple[int, ...] | None = None,
        validation: float = 0.15,
        epochs: int | None = None,
        lr: float | None = None,
        augment: str = "strong",
        patience: int | None = None,
        random_state: int = 0,
        device: str = "auto",
    ) -> None:
        self.encoder = encoder
        self.method = method
        self.pooling = pooling
        self.class_weights = class_weights
        self.image_shape = image_shape
        self.validation = validation
        self.epochs = epochs
        self.lr = lr
        self.augment = augment
        self.patience = patience
        self.random_state = random_state
        self.device = device

    def fit(self, X: Any, y: Any, groups: Any = None) -> Self:
        """Fine-tune on images and labels; those of one of the `groups`, such as a patient, are held out together."""
        given: dict[str, Any] = {name: getattr(self, name) for name in SETTINGS}
        config = FinetuneConfig(**given, pooling=self._pooling(), seed=self.random_state)  # type: ignore[arg-type]
        reading = DataConfig(layout=self._layout())
        shape, own = self.image_shape, self._given.image_shape if self._given else None
        # The rows are read here, not by the encoder.
        require(not is_flat(X) or own in (None, shape), "image_shape", f"that of the encoder, {own}", shape)
        array = read_images(self, X, fitting=True, layout=reading.layout)
        images = ImageSet(array, vectors=is_flat(X) and self.image_shape is None, groups=_numbered(groups, len(array)))
        data = with_validation(self._labelled(images, y), config.validation, config.seed)
        start = self._start(X, images)
        require_pooling(config.pooling, start.encoder)
        self.classifier_, _ = fit(start, data, config, self.device, reading=reading)
        self.image_shape_, self.n_features_in_ = images.shape, math.prod(images.shape)
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """Calibrated probabilities (N, C) of the classes; of several labels an image, each by itself."""
        check_is_fitted(self)
        images = read_images(self, X, fitting=False, layout=self.classifier_.card.layout)
        return self.classifier_.answer(images).probabilities

    def predict(self, X: Any) -> np.ndarray:
        """The likeliest class of every image; of several labels an image, 0 or 1 for each (N, C)."""
        found = self.predict_proba(X)
        if self.classifier_.card.multi_label:
            return (found >= CHANCE).astype(int)
        return self.classes_[found.argmax(1)]

    @property
    def _given(self) -> PMAE | None:
        """The estimator that is given, to be fitted or fitted already."""
        encoder = self.encoder.estimator if isinstance(self.encoder, FrozenEstimator) else self.encoder
        return encoder if isinstance(encoder, PMAE) else None

    def _pooling(self) -> str:
        pooling = self.pooling or (self._given.pooling if self._given else "mean")
        require(pooling in ("mean", "cls"), "pooling", "mean or cls for a classifier", pooling)
        return pooling

    def _layout(self) -> Layout:
        """That of the images that the encoder was or is to be trained on."""
        if isinstance(self.encoder, Run | str | Path):
            return trained_on(self.encoder).data.layout
        config = self._given and self._given.config
        return config.data.layout if config else "auto"

    def _labelled(self, images: ImageSet, y: Any) -> LabelledData:
        """Images and y as a labelled set; y is checked as scikit-learn does."""
        try:
            check_classification_targets(y)
        except TypeError as error:  # None or NaN among text, say
            kinds = sorted({type(label).__name__ for label in y})
            raise UserError(f"y must be labels of one kind for all images, got {' and '.join(kinds)}") from error
        if type_of_target(y) == "multilabel-indicator":
            targets = np.asarray(y, np.float32)
            self.classes_ = np.arange(targets.shape[1])
        else:
            self.classes_, numbers = np.unique(column_or_1d(y, warn=True), return_inverse=True)
            targets = numbers.astype(np.int64)
            require(len(self.classes_) > 1, "y", "of two classes or more", self.classes_.tolist())
        check_consistent_length(images.images, targets)
        return LabelledData("array", tuple(map(str, self.classes_)), Labelled(images, targets))

    def _start(self, X: Any, images: ImageSet) -> Start:
        """The encoder to begin with, pretrained on X if need be."""
        if isinstance(self.encoder, Run | str | Path):
            return load_start(self.encoder, images)
        if isinstance(self.encoder, FrozenEstimator):
            check_is_fitted(self.encoder)
            fitted = self.encoder.estimator.fitted_
        else:
            model = PMAE(device=self.device, random_state=self.random_state) if self.encoder is None else self.encoder
            if hasattr(model, "fitted_"):
                told = "encoder is fitted already, and is fitted anew"
                warnings.warn(f"{told}; sklearn.frozen.FrozenEstimator(encoder) keeps what it learned", stacklevel=3)
            fitted = clone(model).set_params(image_shape=self.image_shape).fit(X).fitted_
        rule = f"of images of the shape that the encoder was trained on, {fitted.shape}"
        require(images.shape == fitted.shape, "X", rule, images.shape)
        return Start(fitted.model.encoder, fitted.config.encoder, fitted.standardize)

    def __getstate__(self) -> dict[str, Any]:
        """With its weights on the CPU, to be loaded on any machine."""
        state: dict[str, Any] = super().__getstate__()
        if "classifier_" in state:
            state = {**state, "classifier_": state["classifier_"].to("cpu")}
        return state

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "classifier_")

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        tags.classifier_tags.multi_label = True
        return tags


def _numbered(groups: Any, count: int) -> np.ndarray | None:
    """A number for the group of each image."""
    if groups is None:
        return None
    numbers = np.unique(column_or_1d(groups), return_inverse=True)[1]
    require(len(numbers) == count, "groups", f"one for each of {count} images", len(numbers))
    return numbers
