"""Kernel PCA against scikit-learn: exact with as many landmarks as images, Nystroem's with fewer."""

import numpy as np
import pytest
import torch
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


@pytest.mark.parametrize("choice", ["random", "kmeans++"])
def test_fewer_landmarks_are_principal_components_of_nystroem_features(choice: str) -> None:
    x, new = data(400), data(40, seed=1)
    space = fitted(x, landmarks=60, components=20, landmark_choice=choice)
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
