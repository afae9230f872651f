"""Kernel PCA against scikit-learn, diffusion maps against their definition."""

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist
from sklearn.decomposition import PCA, KernelPCA
from sklearn.kernel_approximation import Nystroem

from pmae.config import SpaceConfig
from pmae.spaces import Space, build_space

SHAPE = (3, 4, 4)
GAMMA = 0.03


def data(count: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    mixing = np.random.default_rng(7).normal(size=(48, 48)) * np.geomspace(1, 0.05, 48)
    return np.tanh(rng.normal(size=(count, 48)) @ mixing / 4) + 0.2


def tensor(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(x).unflatten(1, SHAPE)


def fitted(x: np.ndarray, **settings: object) -> Space:
    space = build_space(SpaceConfig("kernel_pca", gamma=GAMMA, **settings), SHAPE).double()
    space.fit(tensor(x).split(50))
    return space


def assert_equal_up_to_sign(ours: np.ndarray, reference: np.ndarray) -> None:
    signs = np.sign((ours * reference).sum(0))
    np.testing.assert_allclose(ours * signs, reference, atol=1e-7 * np.abs(reference).max())


@pytest.mark.parametrize("landmarks", [120, 200])
def test_equals_scikit_learn_with_as_many_landmarks_as_images(landmarks: int) -> None:
    x, new = data(120), data(40, seed=1)
    reference = KernelPCA(n_components=30, kernel="rbf", gamma=GAMMA, eigen_solver="dense").fit(x)
    space = fitted(x, landmarks=landmarks)
    assert_equal_up_to_sign(space.project(tensor(x)).numpy()[:, :30], reference.transform(x))
    assert_equal_up_to_sign(space.project(tensor(new)).numpy()[:, :30], reference.transform(new))
    np.testing.assert_allclose(space.variance[:30], reference.eigenvalues_ / 119, rtol=1e-8)


def test_fewer_landmarks_are_principal_components_of_nystroem_features() -> None:
    x, new = data(400), data(40, seed=1)
    space = fitted(x, landmarks=60, components=20)
    landmarks = (space.landmarks + space.mean).numpy()
    seen = Nystroem(kernel="rbf", gamma=GAMMA, n_components=60).fit(landmarks)
    reference = PCA(n_components=20, svd_solver="full").fit(seen.transform(x))
    assert_equal_up_to_sign(space.project(tensor(new)).numpy(), reference.transform(seen.transform(new)))
    np.testing.assert_allclose(space.variance, reference.explained_variance_, rtol=1e-8)


def test_more_landmarks_come_closer_to_the_exact_form() -> None:
    x = data(300)
    exact = KernelPCA(n_components=5, kernel="rbf", gamma=GAMMA, eigen_solver="dense").fit_transform(x)
    errors = []
    for landmarks in (20, 60, 180):
        z = fitted(x, landmarks=landmarks, components=5).project(tensor(x)).numpy()
        errors.append(np.linalg.norm(np.abs(z) - np.abs(exact)) / np.linalg.norm(exact))
    assert errors[0] > 2 * errors[1] > 4 * errors[2]


def test_a_narrowing_kernel_turns_into_the_plain_principal_components() -> None:
    # For small gamma, 1 - k is proportional to the squared distance, so kernel PCA becomes PCA.
    x = data(100)
    space = build_space(SpaceConfig("kernel_pca", gamma=1e-3), SHAPE).double()
    space.fit([tensor(x)])
    plain = PCA(n_components=3, svd_solver="full").fit_transform(x)
    z = space.project(tensor(x)).numpy()[:, :3]
    assert np.all(np.abs([np.corrcoef(a, b)[0, 1] for a, b in zip(z.T, plain.T, strict=True)]) > 0.98)


def test_gradients_are_those_of_the_differences() -> None:
    space = fitted(data(60), landmarks=12, components=6)
    x = tensor(data(2, seed=3)).requires_grad_()
    assert torch.autograd.gradcheck(space.project, (x,))
    assert torch.autograd.gradcheck(space.reconstruct, (space.project(x).detach().requires_grad_(),))


def test_doubled_images_do_no_harm() -> None:
    x = data(60)
    space = fitted(np.concatenate([x, x]), landmarks=120)
    reference = KernelPCA(n_components=20, kernel="rbf", gamma=GAMMA, eigen_solver="dense").fit(np.concatenate([x, x]))
    assert_equal_up_to_sign(space.project(tensor(x)).numpy()[:, :20], reference.transform(x))
    assert int((space.variance > 0).sum()) == 59


def diffusion_of(x: np.ndarray, **settings: object) -> Space:
    space = build_space(SpaceConfig("diffusion", **settings), (x.shape[1], 1, 1)).double()
    space.fit([tensor_of(x)])
    return space


def tensor_of(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(x)[:, :, None, None]


def circle(angles: np.ndarray) -> np.ndarray:
    return np.stack([np.cos(angles), np.sin(angles)], 1)


def test_coordinates_are_eigenvectors_of_the_walk_times_their_eigenvalues() -> None:
    x = np.random.default_rng(0).normal(size=(80, 6))
    space = diffusion_of(x, gamma=0.1, landmarks=80)
    kernel = np.exp(-0.1 * cdist(x, x, "sqeuclidean"))
    kernel /= np.outer(kernel.sum(0), kernel.sum(0))
    walk = kernel / kernel.sum(1, keepdims=True)
    eigenvalues = np.sort(np.linalg.eigvals(walk).real)[::-1]
    # Coordinates are given about their mean over the images; a constant is an eigenvector of eigenvalue 1.
    z = space.project(tensor_of(x)).numpy()[:, :10]
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
    space = diffusion_of(circle(np.linspace(0, 2 * np.pi, 200, endpoint=False)), gamma=4.0, landmarks=200)
    new = np.random.default_rng(1).uniform(0, 2 * np.pi, 500)
    z = space.project(tensor_of(circle(new))).numpy()
    np.testing.assert_allclose(z[:, 0] ** 2 + z[:, 1] ** 2, (z[0, :2] ** 2).sum(), rtol=1e-6)
    turned = np.unwrap(np.arctan2(z[np.argsort(new), 1], z[np.argsort(new), 0]))
    assert np.all(np.abs(np.abs(np.diff(turned)) - np.diff(np.sort(new))) < 1e-6)
    assert float(space.variance_share[0]) == pytest.approx(float(space.variance_share[1]), rel=1e-6)


def test_where_images_lie_counts_and_not_how_many_lie_there() -> None:
    rng = np.random.default_rng(2)
    crowded = np.sort(np.concatenate([rng.uniform(0, 2 * np.pi, 300), rng.normal(1.0, 0.5, 700)]))
    z = diffusion_of(circle(crowded), gamma=20.0, landmarks=1000).project(tensor_of(circle(crowded))).numpy()[:, :2]
    design = np.column_stack([z, np.ones(len(z))])
    for wanted in (np.cos(crowded), np.sin(crowded)):
        residual = wanted - design @ np.linalg.lstsq(design, wanted, rcond=None)[0]
        assert residual.var() / wanted.var() < 0.02


def test_clusters_that_no_step_joins_are_told_apart_by_the_first_coordinates() -> None:
    rng = np.random.default_rng(3)
    which = np.arange(90) % 3
    x = rng.normal(size=(90, 4)) * 0.1 + np.eye(4)[which] * 50
    z = diffusion_of(x, gamma=1.0, landmarks=90).project(tensor_of(x)).numpy()
    centres = np.stack([z[which == k, :2].mean(0) for k in range(3)])
    within = max(z[which == k, :2].std(0).max() for k in range(3))
    assert min(np.linalg.norm(centres[a] - centres[b]) for a, b in ((0, 1), (0, 2), (1, 2))) > 100 * within


def test_gradients_of_diffusion_maps_are_those_of_the_differences() -> None:
    x = np.random.default_rng(4).normal(size=(50, 6))
    space = diffusion_of(x, landmarks=12, components=5)
    inputs = tensor_of(x[:2] + 0.1).requires_grad_()
    assert torch.autograd.gradcheck(space.project, (inputs,))
    assert torch.autograd.gradcheck(space.reconstruct, (space.project(inputs).detach().requires_grad_(),))
