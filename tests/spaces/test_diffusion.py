"""Diffusion maps against a dense walk in NumPy, and where their coordinates are known in closed form."""

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist

from pmae.config import SpaceConfig
from pmae.spaces import Space, build_space


def fitted(x: np.ndarray, **settings: object) -> Space:
    space = build_space(SpaceConfig("diffusion", **settings), (x.shape[1], 1, 1)).double()
    space.fit([tensor(x)])
    return space


def tensor(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(x)[:, :, None, None]


def circle(angles: np.ndarray) -> np.ndarray:
    return np.stack([np.cos(angles), np.sin(angles)], 1)


def test_coordinates_are_eigenvectors_of_the_walk_times_their_eigenvalues() -> None:
    x = np.random.default_rng(0).normal(size=(80, 6))
    space = fitted(x, gamma=0.1, landmarks=80)
    kernel = np.exp(-0.1 * cdist(x, x, "sqeuclidean"))
    kernel /= np.outer(kernel.sum(0), kernel.sum(0))
    walk = kernel / kernel.sum(1, keepdims=True)
    eigenvalues = np.sort(np.linalg.eigvals(walk).real)[::-1]
    # Coordinates are given about their mean over the images; a constant is an eigenvector of eigenvalue 1.
    z = space.project(tensor(x)).numpy()[:, :10]
    shifted = walk @ z
    for k in range(10):
        slope, _ = np.polyfit(z[:, k], shifted[:, k], 1)
        assert slope == pytest.approx(eigenvalues[k + 1], rel=1e-6)
        np.testing.assert_allclose(shifted[:, k] - shifted[:, k].mean(), slope * z[:, k], atol=1e-9)
    # Under the walk's own distribution an eigenvector has norm 1, so a coordinate has its eigenvalue as deviation.
    resting = kernel.sum(1) / kernel.sum()
    centred = z - resting @ z
    np.testing.assert_allclose(np.sqrt(resting @ centred**2), eigenvalues[1:11], rtol=1e-6)


def test_a_circle_has_its_cosine_and_sine_as_coordinates() -> None:
    space = fitted(circle(np.linspace(0, 2 * np.pi, 200, endpoint=False)), gamma=4.0, landmarks=200)
    new = np.random.default_rng(1).uniform(0, 2 * np.pi, 500)
    z = space.project(tensor(circle(new))).numpy()
    np.testing.assert_allclose(z[:, 0] ** 2 + z[:, 1] ** 2, (z[0, :2] ** 2).sum(), rtol=1e-6)
    turned = np.unwrap(np.arctan2(z[np.argsort(new), 1], z[np.argsort(new), 0]))
    assert np.all(np.abs(np.abs(np.diff(turned)) - np.diff(np.sort(new))) < 1e-6)
    assert float(space.variance_share[0]) == pytest.approx(float(space.variance_share[1]), rel=1e-6)


def test_where_images_lie_counts_and_not_how_many_lie_there() -> None:
    rng = np.random.default_rng(2)
    crowded = np.sort(np.concatenate([rng.uniform(0, 2 * np.pi, 300), rng.normal(1.0, 0.5, 700)]))
    z = fitted(circle(crowded), gamma=20.0, landmarks=1000).project(tensor(circle(crowded))).numpy()[:, :2]
    design = np.column_stack([z, np.ones(len(z))])
    for wanted in (np.cos(crowded), np.sin(crowded)):
        residual = wanted - design @ np.linalg.lstsq(design, wanted, rcond=None)[0]
        assert residual.var() / wanted.var() < 0.02


def test_clusters_that_no_step_joins_are_told_apart_by_the_first_coordinates() -> None:
    rng = np.random.default_rng(3)
    which = np.arange(90) % 3
    x = rng.normal(size=(90, 4)) * 0.1 + np.eye(4)[which] * 50
    z = fitted(x, gamma=1.0, landmarks=90).project(tensor(x)).numpy()
    centres = np.stack([z[which == k, :2].mean(0) for k in range(3)])
    within = max(z[which == k, :2].std(0).max() for k in range(3))
    assert min(np.linalg.norm(centres[a] - centres[b]) for a, b in ((0, 1), (0, 2), (1, 2))) > 100 * within


def test_gradients_are_those_of_the_differences() -> None:
    x = np.random.default_rng(4).normal(size=(50, 6))
    space = fitted(x, landmarks=12, components=5)
    inputs = tensor(x[:2] + 0.1).requires_grad_()
    assert torch.autograd.gradcheck(space.project, (inputs,))
    assert torch.autograd.gradcheck(space.reconstruct, (space.project(inputs).detach().requires_grad_(),))
