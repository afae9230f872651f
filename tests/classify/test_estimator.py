"""`PMAEClassifier`: scikit-learn's own checks, and what a user does with a classifier."""

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.utils.estimator_checks import estimator_checks_generator

from pmae import PMAE, Config, PMAEClassifier
from pmae.config import DecoderConfig, EncoderConfig, OptimConfig
from pmae.errors import UserError

TINY = Config(
    encoder=EncoderConfig(width=8, depth=1, heads=2),
    decoder=DecoderConfig("small", width=8, depth=1, heads=2),
    optim=OptimConfig(base_lr=1e-2),
)
ENCODER = PMAE(config=TINY, epochs=1, random_state=0, device="cpu")
CHECKS = list(estimator_checks_generator(PMAEClassifier(ENCODER, device="cpu")))


@pytest.mark.parametrize(("estimator", "check"), CHECKS, ids=[check.func.__name__ for _, check in CHECKS])
def test_scikit_learn_checks(estimator: PMAEClassifier, check: Callable[[PMAEClassifier], None]) -> None:
    check(estimator)
