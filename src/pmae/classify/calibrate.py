"""How sure to be: one temperature for all logits, the error of what is claimed, and distance to the training features.

Temperature scaling: Guo et al. 2017, On Calibration of Modern Neural Networks. Distance: Lee et al. 2018, A Simple
Unified Framework for Detecting Out-of-Distribution Samples, with one Gaussian and Ledoit and Wolf's shrinkage.
"""

from typing import NamedTuple

import numpy as np

RANGE = (-4.0, 4.0)
"""Of the logarithm of a temperature."""
BINS = 15
QUANTILE = 0.99
"""Share of unseen images of the same kind that are not flagged."""


def probabilities(logits: np.ndarray, multi_label: bool) -> np.ndarray:
    """(N, C): of one class out of all, or of each class by itself."""
    from scipy.special import expit, softmax  # most of a second to import, which every command would wait for

    return expit(logits) if multi_label else softmax(logits, axis=1)


def nll(logits: np.ndarray, targets: np.ndarray, smoothing: float = 0.0) -> float:
    """Mean negative log-likelihood of an image's labels, of which a share may be spread over all answers."""
    from scipy.special import log_expit, log_softmax

    if targets.ndim == 2:
        soft = targets * (1 - smoothing) + smoothing / 2
        return float(-(soft * log_expit(logits) + (1 - soft) * log_expit(-logits)).sum(1).mean())
    logs = log_softmax(logits, axis=1)
    own = logs[np.arange(len(targets)), targets]
    return float(-((1 - smoothing) * own + smoothing * logs.mean(1)).mean())


def fit_temperature(logits: np.ndarray, targets: np.ndarray) -> float:
    """What logits are divided by for the likeliest probabilities on images that were not trained on.

    As in Platt 1999 the labels are trusted to 1 - 1 / (N + 2) only: else a few images, all answered right, would make
    every answer certain.
    """
    from scipy.optimize import minimize_scalar  # a second to import, and needed here alone

    smoothing = 1 / (len(targets) + 2)
    found = minimize_scalar(lambda log: nll(logits / np.exp(log), targets, smoothing), bounds=RANGE, method="bounded")
    return float(np.exp(found.x))


class Bin(NamedTuple):
    """Answers of about the same probability: its mean, how often they are right, and how many they are."""

    claimed: float
    right: float
    images: int


def judged(claimed: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The probability of every answer, and 1 where it is right: the likeliest class, or each class by itself."""
    if targets.ndim == 2:
        return claimed.ravel(), targets.ravel().astype(float)
    return claimed.max(1), (claimed.argmax(1) == targets).astype(float)


def reliability(claimed: np.ndarray, targets: np.ndarray) -> list[Bin]:
    """The reliability diagram: answers in 15 bins of their probability, those that are empty left out."""
    sure, right = judged(claimed, targets)
    place = np.minimum((sure * BINS).astype(int), BINS - 1)
    counts = np.bincount(place, minlength=BINS)
    means = [np.bincount(place, values, BINS) / np.maximum(counts, 1) for values in (sure, right)]
    return [Bin(float(means[0][i]), float(means[1][i]), int(counts[i])) for i in np.flatnonzero(counts)]


def calibration_error(bins: list[Bin]) -> float:
    """Expected calibration error: how far the probability of an answer is from how often it is right."""
    return sum(b.images * abs(b.right - b.claimed) for b in bins) / sum(b.images for b in bins)


class Reference(NamedTuple):
    """The training features as one Gaussian: distances are Mahalanobis, flagged beyond `threshold`."""

    mean: np.ndarray
    whitening: np.ndarray
    threshold: float

    def distances(self, features: np.ndarray) -> np.ndarray:
        """How far each image is from those that were trained on, in standard deviations."""
        whitened = (features.astype(np.float64) - self.mean) @ self.whitening
        return np.sqrt(np.square(whitened).sum(1))


def fit_reference(train: np.ndarray, held_out: np.ndarray) -> Reference:
    """Fitted to training features, with the threshold that 1% of the held-out images pass."""
    from sklearn.covariance import LedoitWolf

    fitted = LedoitWolf().fit(train.astype(np.float64))
    values, axes = np.linalg.eigh(fitted.covariance_)
    # A direction in which training features do not vary at all must not divide by zero.
    floor = max(values.max(), np.finfo(np.float64).tiny) * 1e-10
    reference = Reference(fitted.location_, axes / np.sqrt(np.maximum(values, floor)), 1.0)
    return reference._replace(threshold=float(np.quantile(reference.distances(held_out), QUANTILE)))
