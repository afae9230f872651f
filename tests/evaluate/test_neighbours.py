import numpy as np
import pytest
import torch
from sklearn.datasets import make_blobs
from sklearn.neighbors import KNeighborsClassifier

from pmae.errors import UserError
from pmae.evaluate import probes
from pmae.evaluate.probes import nearest, votes

KS = tuple(range(1, 21))


def blobs(count: int, classes: int, width: int, spread: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Gaussian clouds, one per class, with centres that do not depend on the seed."""
    centres = np.random.default_rng(99).normal(size=(classes, width))
    x, labels = make_blobs(count, centers=centres, cluster_std=spread, random_state=seed)
    return x, labels.astype(np.int64)


def test_predictions_and_vote_shares_equal_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "CELLS", 5000)  # several chunks
    bank, labels = blobs(400, 5, 12, 2.5, 0)
    queries, _ = blobs(130, 5, 12, 2.5, 1)
    found = nearest(torch.from_numpy(bank), torch.from_numpy(queries), max(KS))
    shares = votes(torch.from_numpy(labels)[found], 5, KS)
    for k in KS:
        reference = KNeighborsClassifier(k, metric="cosine", algorithm="brute").fit(bank, labels)
        assert (shares[k].argmax(1).numpy() == reference.predict(queries)).all()
        assert shares[k].numpy() == pytest.approx(reference.predict_proba(queries))
    order = reference.kneighbors(queries, return_distance=False)
    assert (found.numpy() == order).all()


def test_ties_go_to_the_lowest_class() -> None:
    shares = votes(torch.tensor([[2, 1, 1, 2]]), 3, (2, 4, 1))
    assert [int(shares[k].argmax(1)) for k in (1, 2, 4)] == [2, 1, 1]


def test_constant_and_zero_features_give_finite_shares() -> None:
    for value in (0.0, 3.0):
        found = nearest(torch.full((5, 4), value), torch.full((3, 4), value), 5)
        share = votes(torch.tensor([0, 0, 0, 1, 1])[found], 2, (5,))[5]
        assert torch.allclose(share, torch.tensor([0.6, 0.4]))


def test_more_neighbours_than_images_are_refused() -> None:
    with pytest.raises(UserError, match=r"k must be between 1 and the number of training images \(2\), got 3"):
        nearest(torch.ones(2, 2), torch.ones(1, 2), 3)


def test_predictions_on_float32_agree_with_float64() -> None:
    bank, _ = blobs(300, 4, 32, 3.0, 0)
    queries, _ = blobs(100, 4, 32, 3.0, 1)
    exact = nearest(torch.from_numpy(bank), torch.from_numpy(queries), 5)
    single = nearest(torch.from_numpy(bank.astype(np.float32)), torch.from_numpy(queries.astype(np.float32)), 5)
    assert (exact == single).float().mean() > 0.99
