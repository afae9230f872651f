"""What kernel PCA and diffusion maps share: landmarks, the kernel's width, pre-images, refusals and training."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.spatial.distance import pdist
from sklearn.linear_model import Ridge

from pmae import api
from pmae.config import Config, SpaceConfig, replace
from pmae.data.images import Splits
from pmae.derive import resolve
from pmae.errors import UserError
from pmae.method import PrincipalMAE, build_method
from pmae.spaces import Space, build_space
from pmae.spaces.moments import sample
from pmae.train.monitor import visualize

NAMES = ["diffusion", "kernel_pca"]
SHAPE = (3, 4, 4)


def images(count: int, seed: int = 0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    mixing = np.random.default_rng(7).normal(size=(48, 48)) * np.geomspace(1, 0.05, 48)
    return torch.from_numpy(np.tanh(rng.normal(size=(count, 48)) @ mixing / 4) + 0.2).unflatten(1, SHAPE)


def fitted(name: str, x: torch.Tensor, **settings: object) -> Space:
    space = build_space(SpaceConfig(name, **settings), SHAPE).double()
    space.fit([x])
    return space


def test_landmarks_are_different_images_however_they_are_batched() -> None:
    x = images(500).flatten(1)
    chosen = [sample(x.split(size), 40) for size in (1, 7, 64, 500)]
    assert all(torch.equal(part, chosen[0]) for part in chosen)
    matches = (chosen[0][:, None] == x).all(2)
    assert matches.sum(1).tolist() == [1] * 40
    assert int(matches.any(0).sum()) == 40


def test_random_landmarks_come_evenly_from_the_whole_set() -> None:
    numbers = torch.arange(4000.0)[:, None]
    chosen = sample(numbers.split(100), 1000)[:, 0]
    quarters = torch.histc(chosen, 4, 0, 4000)
    assert float((quarters - 250).abs().max()) < 60


@pytest.mark.parametrize("name", NAMES)
def test_streamed_fit_equals_full_fit_with_fewer_landmarks_than_images(name: str) -> None:
    x, settings = images(300), SpaceConfig(name, landmarks=30)
    streamed, whole = build_space(settings, SHAPE), build_space(settings, SHAPE)
    streamed.fit(x.split(64))
    whole.fit([x])
    for key, value in whole.state_dict().items():
        torch.testing.assert_close(streamed.state_dict()[key], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_places_left_over_change_nothing(name: str) -> None:
    x, new = images(40), images(10, seed=1)
    tight, roomy = fitted(name, x, landmarks=40), fitted(name, x, landmarks=64)
    z, padded = tight.project(new), roomy.project(new)
    assert padded.shape == (10, 64)
    torch.testing.assert_close(padded[:, :40], z)
    assert not padded[:, 40:].any()
    torch.testing.assert_close(roomy.reconstruct(padded), tight.reconstruct(z))
    # A second fit with other images leaves nothing of the first.
    roomy.fit([images(20, seed=2)])
    torch.testing.assert_close(roomy.project(new)[:, :20], fitted(name, images(20, seed=2), landmarks=20).project(new))


def test_without_gamma_the_kernel_of_images_at_the_median_distance_is_1_over_e() -> None:
    x = images(90)
    space = fitted("kernel_pca", x)
    assert space.measured()["gamma"] == pytest.approx(
        1 / np.median(pdist(x.flatten(1).numpy(), "sqeuclidean")), rel=1e-3
    )


@pytest.mark.parametrize("name", NAMES)
def test_pre_images_are_a_ridge_regression_whose_error_is_told(name: str) -> None:
    x, new = images(600), images(600, seed=1)
    space = fitted(name, x, landmarks=50)
    z = space.project(x)
    errors = [float((space.reconstruct(space.project(part)) - part).norm() / part.norm()) for part in (x, new)]
    told = space.measured()
    assert told["preimage_error"] == pytest.approx(errors[0], rel=1e-6)
    assert told["preimage_error_unseen"] == pytest.approx(errors[1], rel=0.05)
    # The ridge that was chosen follows from one row of the normal equations; all rows must then agree with it.
    centred, flat = z - z.mean(0), x.flatten(1) - x.flatten(1).mean(0)
    left = (centred.T @ (flat - centred @ space.preimage))[0] @ space.preimage[0]
    alpha = float(left / space.preimage[0].square().sum())
    reference = Ridge(alpha=alpha).fit(z.numpy(), x.flatten(1).numpy())
    np.testing.assert_allclose(space.preimage, reference.coef_.T, rtol=1e-4, atol=1e-6 * np.abs(reference.coef_).max())


@pytest.mark.parametrize("name", NAMES)
def test_a_ridge_that_generalizes_is_chosen(name: str) -> None:
    x, new = images(150), images(500, seed=1)
    space = fitted(name, x)
    z, unseen = space.project(x).numpy(), space.project(new).numpy()
    ours = float((space.reconstruct(torch.from_numpy(unseen)) - new).norm())
    for alpha in np.geomspace(1e-8, 1, 9) * float(space.variance[0]) * 150:
        other = Ridge(alpha=alpha).fit(z, x.flatten(1).numpy()).predict(unseen)
        assert ours < 1.1 * np.linalg.norm(other - new.flatten(1).numpy())


@pytest.mark.parametrize("name", NAMES)
def test_the_same_images_give_the_same_bits(name: str) -> None:
    first, again = (fitted(name, images(80), landmarks=30).state_dict() for _ in range(2))
    assert all(torch.equal(value, again[key]) for key, value in first.items())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("gamma", "words"), [(1e-7, "constant: all"), (1e3, "the identity: each")])
def test_a_gamma_that_tells_nothing_apart_is_refused_with_numbers(name: str, gamma: float, words: str) -> None:
    with pytest.raises(UserError, match=rf"space.gamma must .* got {gamma:g}: .* 100 landmarks is [\d.e-]+, .*{words}"):
        fitted(name, images(100), gamma=gamma)


@pytest.mark.parametrize("name", NAMES)
def test_bad_input_is_refused_with_numbers(name: str) -> None:
    with pytest.raises(UserError, match=r"space.components must be at most the number of landmarks, 20, got 21"):
        build_space(SpaceConfig(name, landmarks=20, components=21), SHAPE)
    with pytest.raises(UserError, match=r"space.components must be .*here all 15 images, got 18"):
        fitted(name, images(15), components=18)
    with pytest.raises(UserError, match="data must differ: the median squared distance between 9 landmarks is 0"):
        fitted(name, images(1).expand(9, -1, -1, -1))
    with pytest.raises(UserError, match=r"200000 landmarks of 48 pixels need 2,\d+,\d+,\d+,\d+ bytes"):
        build_space(SpaceConfig(name, landmarks=200_000), SHAPE)
    with pytest.raises(UserError, match="fit takes a list, not an iterator"):
        build_space(SpaceConfig(name), SHAPE).fit(iter([images(10)]))
    for settings in ({"gamma": 0.0}, {"gamma": float("nan")}, {"landmarks": 0}, {"components": 0}):
        with pytest.raises(UserError, match="space"):
            SpaceConfig(name, **settings)
    with pytest.raises(UserError, match=r"space.gamma must be left unset unless .*'kernel_pca'"):
        SpaceConfig("pca", gamma=0.1)


@pytest.fixture
def config(tiny: Config) -> Config:
    return replace(tiny, space__name="kernel_pca", space__landmarks=48, train__epochs=2)


def model_of(config: Config, toy: Splits, space: Space | None = None) -> PrincipalMAE:
    model = build_method(resolve(config, len(toy.train), toy.train.shape)[0], toy.train.shape, space)
    assert isinstance(model, PrincipalMAE)
    return model


def standardized(toy: Splits) -> torch.Tensor:
    return (torch.from_numpy(toy.train.images).float() - 128) / 30


@pytest.mark.parametrize("name", NAMES)
def test_the_rest_makes_the_round_trip_exact(name: str, config: Config, toy: Splits) -> None:
    model, x = model_of(replace(config, space__name=name, objective__target="pixels"), toy), standardized(toy)
    model.space.fit([x])
    draw = model.draw(len(x), 0.3, torch.Generator().manual_seed(0))
    z, hidden, visible = model.hide(x, draw)
    torch.testing.assert_close(visible + visualize(model, x, draw).target, x, atol=1e-5, rtol=0)
    # The visible coefficients make up the visible image, apart from what no coefficient can express.
    shown = model.space.reconstruct(z.masked_fill(hidden, 0.0))
    torch.testing.assert_close(visible - shown, x - model.space.reconstruct(z), atol=1e-5, rtol=0)
    outcome = model(x, draw)
    assert 0.1 < outcome.loss.item() < 10


def test_pixels_as_target_need_an_inverse_or_the_rest(config: Config, toy: Splits) -> None:
    wrong = replace(config, space__keep_rest=False, objective__target="pixels")
    space = build_space(wrong.space, toy.train.shape)
    with pytest.warns(UserWarning, match=r"'kernel_pca' has no exact inverse: its pre-images miss [\d.]+% of"):
        space.fit([standardized(toy)])
    error = f"{space.measured()['preimage_error']:.4f}"
    with pytest.raises(UserError, match=f"objective.target 'pixels' must .*'kernel_pca' has none, .* error of {error}"):
        model_of(wrong, toy, space)


@pytest.mark.filterwarnings("ignore:space 'kernel_pca' has no exact inverse")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"space__gamma": 1e-9}, r"left unset it would be 0\.00[0-9]+"),
        ({"space__keep_rest": False, "objective__target": "pixels"}, r"relative error of 0\.[0-9]+"),
    ],
    ids=str,
)
def test_what_the_fit_refuses_leaves_no_run(
    config: Config, toy: Splits, tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "notes.txt").write_text("mine")
    for folder in ("new", "kept"):
        with pytest.raises(UserError, match=words):
            api.pretrain(replace(config, **changes), toy, tmp_path / folder, quiet=True)
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()] == ["kept/notes.txt"]
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", NAMES)
def test_hidden_coefficients_can_be_learnt(name: str, config: Config, toy: Splits) -> None:
    torch.manual_seed(0)
    model, x = model_of(replace(config, space__name=name), toy), standardized(toy)
    model.space.fit([x])
    draw = model.draw(32, 0.3, torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = model(x[:32], draw).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


def test_it_trains_resumes_and_reports(config: Config, toy: Splits, tmp_path: Path) -> None:
    run = api.pretrain(config, toy, tmp_path / "run", quiet=True)
    assert run.metrics()[-1]["step"] == 8
    found = run.results["pretrain"]
    assert 0 < found["preimage_error"] < found["preimage_error_unseen"] < 1
    assert found["gamma"] > 0
    assert np.isfinite(found["held_out_r2"])
    whole = (run.checkpoint() / "encoder.safetensors").read_bytes()
    shutil.rmtree(run.checkpoint())
    lines = (run.path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run.path / "metrics.jsonl").write_text("".join(line for line in lines if json.loads(line)["step"] <= 4))
    again = api.pretrain(config, toy, run.path, resume=True, quiet=True, figures=False)
    assert (again.checkpoint() / "encoder.safetensors").read_bytes() == whole
    assert again.results["pretrain"] == found


def test_the_number_of_landmarks_follows_from_the_data(config: Config, toy: Splits) -> None:
    def settled(count: int) -> Iterator[object]:
        whole, reasons = resolve(replace(config, space__landmarks=None), count, toy.train.shape)
        return iter((whole.space.landmarks, reasons["space.landmarks"]))

    assert next(settled(128)) == 128
    assert list(settled(50_000)) == [2048, "2,048, or all of 50,000 images"]
