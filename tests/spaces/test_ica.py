"""Independent components: sources against scikit-learn's, energies that keep their meaning, and the bounded sample."""

import numpy as np
import pytest
import torch
from sklearn.decomposition import FastICA

from pmae.config import SpaceConfig
from pmae.errors import UserError
from pmae.spaces import ICA, recombined

SHAPE = (1, 2, 4)


def sources(count: int, seed: int = 0) -> np.ndarray:
    """(N, 8) independent and not Gaussian: three Laplace, three uniform, two of rare spikes."""
    rng = np.random.default_rng(seed)
    laplace, flat = rng.laplace(size=(count, 3)), rng.uniform(-1, 1, size=(count, 3))
    return np.hstack([laplace, flat, rng.normal(size=(count, 2)) ** 5])


def mixture(count: int = 6000) -> tuple[torch.Tensor, np.ndarray]:
    hidden = sources(count)
    mixing = np.random.default_rng(1).normal(size=(8, 8)) * np.geomspace(1, 0.3, 8)
    return torch.from_numpy(hidden @ mixing + 0.5).float().unflatten(1, SHAPE), hidden


def fitted(x: torch.Tensor, components: int | None = 8, batch: int = 500) -> ICA:
    space = ICA(SHAPE, SpaceConfig("ica", components=components))
    space.fit(x.split(batch))
    return space


def matched(found: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Largest absolute correlation of each reference source with a found one; every found one is used once."""
    size = reference.shape[1]
    correlation = np.abs(np.corrcoef(found.T, reference.T)[:size, size:])
    assert len(set(correlation.argmax(0))) == size
    return correlation.max(0)


def test_recovers_a_known_mixture_as_scikit_learn_does() -> None:
    x, hidden = mixture()
    z = fitted(x).project(x).numpy()
    reference = FastICA(whiten="unit-variance", fun="logcosh", tol=1e-8, max_iter=1000, random_state=0)
    theirs = reference.fit_transform(x.flatten(1).double().numpy())
    assert matched(z, hidden).min() > 0.97
    assert matched(z, theirs).min() > 0.9999


def test_energies_of_sources_add_up_to_the_variance_of_the_hidden_part() -> None:
    x, _ = mixture()
    space = fitted(x)
    z = space.project(x)
    assert float(space.variance.sum()) == pytest.approx(float(x.flatten(1).var(0).sum()), rel=1e-4)
    nothing = space.reconstruct(torch.zeros_like(z))
    for hidden in ([0], [1, 4], [0, 2, 3, 7]):
        part = space.reconstruct(z * torch.isin(torch.arange(8), torch.tensor(hidden))) - nothing
        assert float(part.flatten(1).var(0).sum()) == pytest.approx(float(space.variance[hidden].sum()), rel=2e-3)


def test_sources_are_white_and_their_directions_have_unit_length() -> None:
    x, _ = mixture()
    space = fitted(x)
    z = space.project(x)
    torch.testing.assert_close(torch.corrcoef(z.T), torch.eye(8), atol=2e-3, rtol=0)
    axes = space.reconstruct(torch.eye(8)) - space.reconstruct(torch.zeros(1, 8))
    torch.testing.assert_close(axes.flatten(1).norm(dim=1), torch.ones(8))
    assert bool((space.variance.diff() <= 0).all())


def test_by_default_the_components_of_nine_tenths_of_the_variance_are_unmixed() -> None:
    x = torch.randn(2000, 8, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [4.0, 3, 2, 0.9, 0.5, 0.4, 0.3, 0.2]
    )
    space = fitted(x.unflatten(1, SHAPE), components=None)
    # 16 + 9 of 30.4 is too little, 16 + 9 + 4 is enough.
    assert torch.equal(space.unmixing[3:, 3:], torch.eye(5))
    assert not torch.equal(space.unmixing[:3, :3], torch.eye(3))
    torch.testing.assert_close(space.variance[3:], space.pca.variance[3:])


def test_components_that_do_not_vary_stay_out() -> None:
    x, _ = mixture(300)
    x[:, :, 1] = 0
    space = fitted(x)
    torch.testing.assert_close(space.reconstruct(space.project(x)), x, atol=1e-4, rtol=1e-5)
    assert torch.equal(space.unmixing[4:, 4:], torch.eye(4))


def test_a_bounded_sample_finds_the_sources_whatever_the_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    x, hidden = mixture(6000)
    monkeypatch.setattr(recombined, "IMAGES", 3000)
    whole = fitted(x, batch=6000)
    assert matched(whole.project(x).numpy(), hidden).min() > 0.95
    assert matched(fitted(x, batch=70).project(x).numpy(), whole.project(x).numpy()).min() > 0.999


def test_more_pixels_than_a_basis_can_have_leave_one_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recombined, "WHOLE", 4)
    x, _ = mixture()
    space = fitted(x, components=3)
    assert space.mask_group_count == 4
    assert float(space.mask_group_share.sum()) == pytest.approx(1, abs=1e-5)
    torch.testing.assert_close(space.reconstruct(space.project(x)), x, atol=1e-4, rtol=1e-5)


def test_one_pass_is_refused_and_so_are_more_components_than_pixels() -> None:
    x, _ = mixture(100)
    with pytest.raises(UserError, match="fit takes a list, not an iterator"):
        ICA(SHAPE).fit(part for part in x.split(50))
    with pytest.raises(UserError, match=r"space\.components must be at most the number of pixels, 8, got 9"):
        ICA(SHAPE, SpaceConfig("ica", components=9))
