"""`PMAEClassifier`: scikit-learn's own checks, and what a user does with a classifier."""

import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.frozen import FrozenEstimator
from sklearn.metrics import accuracy_score
from sklearn.model_selection import GridSearchCV
from sklearn.utils.estimator_checks import estimator_checks_generator

import pmae
from pmae import PMAE, Config, PMAEClassifier
from pmae.config import DecoderConfig, EncoderConfig, OptimConfig
from pmae.errors import UserError
from pmae.runs import Run

from .conftest import CLASSES, SIDE, stripes

TINY = Config(
    encoder=EncoderConfig(width=8, depth=1, heads=2),
    decoder=DecoderConfig("small", width=8, depth=1, heads=2),
    optim=OptimConfig(base_lr=1e-2),
)


class OncePMAE(PMAE):
    """A PMAE that is trained once for every shape: its own checks are in its own tests."""

    known: dict[Any, Any] = {}  # noqa: RUF012

    def fit(self, X: Any, y: Any = None) -> Self:
        images = self._read(X, fitting=True)
        if images.shape[1:] not in self.known:
            self.known[images.shape[1:]] = PMAE(**self.get_params()).fit(X)
        fitted = vars(self.known[images.shape[1:]])
        vars(self).update({name: value for name, value in fitted.items() if name.endswith("_")})
        return self


ENCODER = OncePMAE(config=TINY, epochs=1, random_state=0, device="cpu")
KNOWN = {check.func.__name__ for _, check in estimator_checks_generator(PMAE())}
"""What PMAE's own tests run through the same reader of X: here it is for the long version of the tests."""
CHECKS = [
    pytest.param(estimator, check, marks=[pytest.mark.slow] * (check.func.__name__ in KNOWN), id=check.func.__name__)
    for estimator, check in estimator_checks_generator(PMAEClassifier(ENCODER, device="cpu"))
]


@pytest.mark.parametrize(("estimator", "check"), CHECKS)
def test_scikit_learn_checks(estimator: PMAEClassifier, check: Callable[[PMAEClassifier], None]) -> None:
    check(estimator)


LABELS = np.repeat(np.arange(3), 15)


def test_it_predicts_names_and_pickles_and_saves(run: Run, tmp_path: Path) -> None:
    names = np.array(CLASSES)[LABELS]
    model = PMAEClassifier(run.path, device="cpu").fit(stripes(LABELS), names)
    others = stripes(LABELS, seed=1)
    found = model.predict(others)
    assert model.score(others, names) == accuracy_score(names, found) > 0.8
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(model)).predict_proba(others), model.predict_proba(others))
    model.classifier_.save(tmp_path / "clf")
    kept = pmae.load_classifier(tmp_path / "clf", "cpu")
    assert kept.predict(others) == found.tolist()
    np.testing.assert_allclose(kept.predict_proba(others), model.predict_proba(others), atol=1e-6)


def test_images_of_a_group_are_held_out_together_or_not_at_all(run: Run) -> None:
    images, model = stripes(LABELS), PMAEClassifier(run.path, device="cpu")
    with pytest.raises(UserError, match="groups"):  # of which each class has one: none can be held out
        model.fit(images, LABELS, groups=np.array(CLASSES)[LABELS])
    with pytest.raises(UserError, match="groups must be one for each of 45 images, got 3"):
        model.fit(images, LABELS, groups=["p1", "p2", "p3"])
    assert model.fit(images, LABELS, groups=np.arange(45) // 5).score(images, LABELS) > 0.8


def test_a_fitted_pmae_is_kept_frozen_while_settings_are_searched() -> None:
    images = stripes(LABELS)
    with pytest.raises(NotFittedError):
        PMAEClassifier(FrozenEstimator(PMAE())).fit(images, LABELS)
    frozen = FrozenEstimator(PMAE(config=TINY, epochs=1, random_state=0, device="cpu").fit(images))
    search = GridSearchCV(PMAEClassifier(frozen, device="cpu"), {"class_weights": ["none", "balanced"]}, cv=2)
    search.fit(images, LABELS)
    best = search.best_estimator_
    encoder, before = best.classifier_.encoder, frozen.estimator.fitted_.model.encoder
    assert all((a == b).all() for a, b in zip(encoder.parameters(), before.parameters(), strict=True))
    assert clone(best).get_params()["class_weights"] == best.class_weights


def test_the_head_sees_the_pooling_of_the_encoder_unless_told_otherwise() -> None:
    images = stripes(LABELS)
    fitted = PMAE(config=TINY, epochs=1, pooling="cls", random_state=0, device="cpu").fit(images)
    frozen = FrozenEstimator(fitted)
    as_given = PMAEClassifier(frozen, device="cpu").fit(images, LABELS).classifier_
    told = PMAEClassifier(frozen, pooling="mean", device="cpu").fit(images, LABELS).classifier_
    assert (as_given.card.pooling, told.card.pooling) == ("cls", "mean")
    np.testing.assert_array_equal(as_given.embedder(images.transpose(0, 3, 1, 2)), fitted.transform(images))
    assert np.abs(told.embedder(images.transpose(0, 3, 1, 2)) - fitted.transform(images)).max() > 1e-3
    several = FrozenEstimator(fitted.set_params(pooling="both"))
    with pytest.raises(UserError, match=r"^pooling must be mean or cls for a classifier, got 'both'$"):
        PMAEClassifier(several, device="cpu").fit(images, LABELS)


def test_images_are_laid_out_as_those_of_the_encoder() -> None:
    images = np.concatenate([stripes(LABELS), stripes(LABELS, seed=1), stripes(LABELS, seed=2)], 3)[..., :SIDE]
    last = pmae.config.replace(TINY, data__layout="NHWC")
    model = PMAEClassifier(PMAE(config=last, epochs=1, random_state=0, device="cpu"), device="cpu")
    assert model.fit(images, LABELS).classifier_.card.layout == "NHWC"
    found = model.predict(images)
    assert (found == LABELS).mean() > 0.8
    first = images.transpose(0, 3, 1, 2)
    np.testing.assert_array_equal(np.array(model.classifier_.predict(images), int), found)
    assert not np.array_equal(model.predict(first), found), "the same numbers read the other way are other images"


def test_flat_rows_are_not_read_as_a_table_where_the_encoder_takes_images() -> None:
    images = stripes(LABELS).mean(3).reshape(len(LABELS), -1)
    encoder = PMAE(config=TINY, image_shape=(SIDE, SIDE), epochs=1, random_state=0, device="cpu")
    with pytest.raises(UserError, match=r"^image_shape must be that of the encoder, \(8, 8\), got None"):
        PMAEClassifier(encoder, device="cpu").fit(images, LABELS)
    found = PMAEClassifier(encoder, image_shape=(SIDE, SIDE), device="cpu").fit(images, LABELS)
    assert found.image_shape_ == (1, SIDE, SIDE)


def test_a_fitted_pmae_that_is_not_frozen_is_warned_of_and_labels_are_of_one_kind(run: Run) -> None:
    images = stripes(LABELS)
    fitted = PMAE(config=TINY, epochs=1, random_state=0, device="cpu").fit(images)
    with pytest.warns(UserWarning, match="encoder is fitted already, and is fitted anew; sklearn.frozen.FrozenEst"):
        PMAEClassifier(fitted, device="cpu").fit(images, LABELS)
    with warnings.catch_warnings(action="error"):
        warnings.simplefilter("ignore", ConvergenceWarning)  # one epoch is few
        PMAEClassifier(clone(fitted), device="cpu").fit(images, LABELS)
    missing = np.array([*(CLASSES[label] for label in LABELS[1:]), None], object)
    with pytest.raises(UserError, match=r"^y must be labels of one kind for all images, got NoneType and str"):
        PMAEClassifier(run.path, device="cpu").fit(images, missing)


def test_full_and_multi_label(run: Run) -> None:
    images = stripes(LABELS)
    full = PMAEClassifier(run.path, method="full", epochs=2, device="cpu").fit(images, LABELS)
    assert full.predict_proba(images).shape == (45, 3)
    several = np.stack([LABELS == 0, LABELS < 2], 1).astype(int)
    model = PMAEClassifier(run.path, device="cpu").fit(images, several)
    assert (model.predict(images) == several).mean() > 0.8
    with pytest.raises(UserError, match="images of the shape"):
        PMAEClassifier(run.path, device="cpu").fit(images[:, :4], LABELS)


def test_names_of_files_are_refused_and_other_units_are_warned_of(run: Run) -> None:
    X = stripes(LABELS)
    model = PMAEClassifier(str(run.path), device="cpu")
    with pytest.raises(UserError, match=r"^X must be images, got names such as 'a.png'"):
        model.fit(["a.png", "b.png"], ["x", "y"])
    model.fit(X, LABELS)
    with pytest.warns(UserWarning, match="the images are float64 of at most 1, .* trained on were uint8"):
        model.predict(X / 255)
    with warnings.catch_warnings(action="error"):
        np.testing.assert_array_equal(model.predict(X.astype(float)), model.predict(X))
