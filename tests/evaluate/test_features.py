import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA

from pmae.config import AugmentConfig
from pmae.data.augment import Standardize
from pmae.data.batches import Batches
from pmae.data.images import Splits
from pmae.evaluate import baselines, features
from pmae.evaluate.baselines import RawPixels, fit_pca, random_weights
from pmae.evaluate.features import Extractor, effective_rank, extract
from pmae.models.encoder import Encoder

CPU = torch.device("cpu")


def test_extract_is_the_encoder_in_evaluation_mode(
    encoder: Encoder, splits: Splits, standardize: Standardize, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "CHUNK", {"cpu": 37})
    batches = Batches(splits.train.images, CPU)
    found = extract(encoder.train(), batches, standardize)
    assert encoder.training
    assert set(found) == {"cls", "mean"}
    with torch.no_grad():
        direct = encoder.eval().features(standardize(torch.from_numpy(splits.train.images)))
    for name, value in direct.items():
        assert torch.allclose(found[name], value, atol=1e-5)
    again = extract(encoder, batches, standardize)
    assert all(torch.equal(found[name], again[name]) for name in found)
    assert not found["cls"].requires_grad


def test_crops_are_a_function_of_the_key(encoder: Encoder, splits: Splits, standardize: Standardize) -> None:
    batches, extractor = Batches(splits.train.images, CPU), Extractor(encoder, standardize, CPU)
    one, same, other = (extractor(batches, AugmentConfig(), key)["mean"] for key in ((0, 1), (0, 1), (0, 2)))
    assert torch.equal(one, same)
    assert not torch.allclose(one, other)
    still = extractor(batches, AugmentConfig(crop=False, flip=False), (0, 1))["mean"]
    assert torch.allclose(still, extractor(batches)["mean"], atol=1e-4)


def test_effective_rank_of_known_spectra() -> None:
    basis = torch.linalg.qr(torch.randn(50, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))).Q
    assert effective_rank(basis) == pytest.approx(8, abs=1e-3)
    assert effective_rank(basis[:, :1].repeat(1, 8)) == pytest.approx(1, abs=1e-3)
    shares = np.array([0.7, 0.2, 0.1])
    uneven = basis[:, :3] * torch.from_numpy(shares)
    assert effective_rank(uneven) == pytest.approx(np.exp(-(shares * np.log(shares)).sum()), abs=1e-3)
    assert effective_rank(uneven.T) == pytest.approx(effective_rank(uneven), abs=1e-3)
    assert effective_rank(torch.zeros(5, 3)) == 0.0


@pytest.mark.parametrize("exact", [4096, 10])
def test_pca_features_equal_scikit_learn(
    exact: int, splits: Splits, standardize: Standardize, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(baselines, "EXACT", exact)
    batches = Batches(splits.train.images, CPU)
    pixels = standardize(torch.from_numpy(splits.train.images)).flatten(1).numpy()
    # A few strong directions, so that the leading ones are well defined.
    model = fit_pca(batches, standardize, splits.train.shape, 2)
    found = extract(model, batches, standardize)["pca"].numpy()
    reference = PCA(2, svd_solver="full").fit_transform(pixels.astype(np.float64))
    tolerance = 1e-3 if exact == 4096 else 0.3
    assert np.abs(found[:, 0]) == pytest.approx(np.abs(reference[:, 0]), abs=tolerance)
    kept = (found**2).sum() / (reference**2).sum()
    assert kept == pytest.approx(1, abs=1e-2)


def test_pca_has_as_many_dimensions_as_the_encoder_or_as_the_data_allow(
    splits: Splits, standardize: Standardize
) -> None:
    batches = Batches(splits.train.images, CPU)
    assert extract(fit_pca(batches, standardize, (2, 8, 12), 16), batches, standardize)["pca"].shape == (160, 16)
    assert extract(fit_pca(batches, standardize, (2, 8, 12), 500), batches, standardize)["pca"].shape == (160, 159)


def test_raw_pixels_shrink_only_when_huge() -> None:
    small = RawPixels((3, 64, 64), 8)
    assert small.features(torch.ones(2, 3, 64, 64))["pixels"].shape == (2, 3 * 64 * 64)
    assert not small.notes
    large = RawPixels((3, 100, 200), 8)
    assert large.size == (52, 104)
    assert "averaged" in large.notes[0]
    vector = large.features(torch.ones(2, 3, 100, 200))["pixels"]
    assert vector.shape[1] <= 16_384
    assert torch.allclose(vector, torch.ones_like(vector))
    for shape in ((1, 1, 65_536), (3, 2, 40_000)):
        assert RawPixels(shape, 8).features(torch.ones(1, *shape))["pixels"].shape[1] <= 16_384


def test_random_weights_follow_their_seed_and_leave_the_global_stream_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    one, same, other = (random_weights(lambda: torch.nn.Linear(4, 4), seed).weight for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(torch.rand(1), expected)
