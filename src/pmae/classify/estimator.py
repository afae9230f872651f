"""The scikit-learn front door of classifiers: `PMAEClassifier("runs/a", method="linear").fit(X, y).predict(X_new)`."""

import copy
from pathlib import Path
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, clone
from sklearn.frozen import FrozenEstimator
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import check_is_fitted

from pmae.classify.fit import FinetuneConfig, fit
from pmae.classify.labels import Labelled, LabelledData, with_validation
from pmae.classify.model import ImageClassifier
from pmae.classify.start import Start, load_start
from pmae.config import EncoderConfig
from pmae.data.images import ImageSet
from pmae.errors import UserError, require
from pmae.estimator import PMAE
from pmae.evaluate.features import hold_out
from pmae.runs import Run


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
    class_weight : None, or "balanced" for rare classes to count as much as common ones.
    epochs, lr, augment, validation, patience : as `pmae finetune` has them, for `method` "full" and "lora".
    random_state : an int, the seed of the validation part and of training.
    device : "auto", "cpu", "cuda" or "cuda:N".

    Attributes
    ----------
    classes_ : the labels, in the order of the probabilities.
    classifier_ : the `ImageClassifier`, which saves itself; `pmae.load_classifier` loads it.
    """

    def __init__(
        self,
        encoder: PMAE | FrozenEstimator | Run | str | Path | None = None,
        *,
        method: str = "linear",
        class_weight: str | None = None,
        epochs: int | None = None,
        lr: float | None = None,
        augment: str = "strong",
        validation: float = 0.15,
        patience: int | None = None,
        random_state: int = 0,
        device: str = "auto",
    ) -> None:
        self.encoder = encoder
        self.method = method
        self.class_weight = class_weight
        self.epochs = epochs
        self.lr = lr
        self.augment = augment
        self.validation = validation
        self.patience = patience
        self.random_state = random_state
        self.device = device

    def fit(self, X: Any, y: Any) -> Self:
        """Fine-tune on images and labels, part of which stops training and calibrates."""
        require(self.class_weight in (None, "balanced"), "class_weight", "None or 'balanced'", self.class_weight)
        settings = {name: getattr(self, name) for name in ("method", "epochs", "lr", "augment", "validation", "patience")}
        config = FinetuneConfig(**settings, class_weights=self.class_weight or "none", seed=self.random_state)
        # Reads X too: of a run, as PMAE would.
        self.reader_ = self._reader(X)
        images = ImageSet(self.reader_._read(X, fitting=not hasattr(self.reader_, "fitted_")))
        data = self._data(images, y)
        start = self._start(X, images)
        data = with_validation(data, config.validation, config.seed) if self._splits(data) else data._replace(val=data.train)
        self.classifier_ = fit(start, data, config, self.device).classifier
        self.n_features_in_ = self.reader_.n_features_in_
        return self
