"""The estimator: scikit-learn's own checks, the same features as a run folder's encoder, and every kind of X."""

import multiprocessing
import pickle
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import estimator_checks_generator

import pmae
from pmae import PMAE, Config
from pmae.cli import main
from pmae.config import DecoderConfig, EncoderConfig, OptimConfig, SpaceConfig, replace
from pmae.errors import Interrupted, UserError
from pmae.pretraining import in_memory
from pmae.runs import Run
from pmae.train import loop

TINY = Config(
    encoder=EncoderConfig(width=8, depth=1, heads=2),
    decoder=DecoderConfig("small", width=8, depth=1, heads=2),
    optim=OptimConfig(base_lr=1e-2),
)


def small(**parameters: Any) -> PMAE:
    return PMAE(**{"config": TINY, "epochs": 1, "device": "cpu", "random_state": 0, **parameters})


def pictures(count: int = 40, *shape: int, seed: int = 0) -> np.ndarray:
    """uint8 images of smooth and fine structure, (8, 12, 3) if no shape is given."""
    rng = np.random.default_rng(seed)
    shape = shape or (8, 12, 3)
    level = rng.normal(128, 40, (count, *(1 for _ in shape)))
    return (level + rng.normal(0, 10, (count, *shape))).clip(0, 255).astype(np.uint8)


CHECKS = list(estimator_checks_generator(PMAE(epochs=1, random_state=0)))
"""All of scikit-learn's `check_estimator`, with the default network; none is expected to fail."""


@pytest.mark.parametrize(("estimator", "check"), CHECKS, ids=[check.func.__name__ for _, check in CHECKS])
def test_scikit_learn_checks(estimator: PMAE, check: Callable[[PMAE], None]) -> None:
    check(estimator)
    assert estimator.get_params()["epochs"] == 1


def test_features_are_those_of_the_run_folder(tmp_path: Path) -> None:
    images = pictures()
    # Some CPUs train in bfloat16, where the training's own kernels round otherwise.
    config = replace(TINY, train__precision="float32")
    model = small(config=config, out=tmp_path / "run", pooling="both", epochs=2).fit(images)
    _, encoder, standardize = pmae.load_encoder(Run(tmp_path / "run"))
    with torch.no_grad():
        found = encoder.features(standardize(torch.from_numpy(images.transpose(0, 3, 1, 2))))
    expected = torch.cat([found["cls"], found["mean"]], 1).numpy()
    np.testing.assert_allclose(model.transform(images), expected, atol=1e-6)
    assert list(model.get_feature_names_out()) == [f"pmae{i}" for i in range(16)]
    assert model.score(images) == pytest.approx(Run(tmp_path / "run").results["pretrain"]["train_r2"], abs=1e-6)
    assert (tmp_path / "run" / "figures" / "reconstructions.png").exists()


def test_without_out_nothing_stays_on_the_disk_and_the_weights_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pmae.estimator.save_figures", lambda run: [])  # not looked at here
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    images = pictures()
    model = small(epochs=2).fit(images)
    assert not list((tmp_path / "tmp").iterdir())
    kept = small(epochs=2, out=tmp_path / "run").fit(images)
    np.testing.assert_array_equal(model.transform(images), kept.transform(images))


def test_what_is_saved_is_loaded_and_known_to_the_commands(tmp_path: Path) -> None:
    images = pictures()
    model = small(epochs=2).fit(images)
    model.save(tmp_path / "run")
    again = PMAE.load(tmp_path / "run", device="cpu")
    np.testing.assert_array_equal(again.transform(images), model.transform(images))
    assert again.score(images) == model.score(images)
    np.save(tmp_path / "in.npy", images)
    arguments = ["--data", str(tmp_path / "in.npy"), "-o", str(tmp_path / "out.npz"), "--device", "cpu"]
    assert main(["embed", str(tmp_path / "run"), *arguments]) == 0
    np.testing.assert_array_equal(np.load(tmp_path / "out.npz")["features"], model.transform(images))
    # The saved run is a finished one: resuming it trains nothing.
    before = Run(tmp_path / "run").metrics()
    loop.pretrain(Run(tmp_path / "run").config, in_memory(images, TINY.data), tmp_path / "run", True, True)
    assert Run(tmp_path / "run").metrics() == before
    with pytest.raises(UserError, match="path must be a folder that does not exist yet"):
        model.save(tmp_path / "run")
    weights = Run(tmp_path / "run").checkpoint() / "encoder.safetensors"
    damaged = bytearray(weights.read_bytes())
    damaged[-3] ^= 64
    weights.write_bytes(damaged)
    with pytest.raises(UserError, match="checkpoint must be whole"):
        PMAE.load(tmp_path / "run")


def test_every_layout_of_the_same_images_gives_the_same_features() -> None:
    images = pictures()
    channels_first = np.ascontiguousarray(images.transpose(0, 3, 1, 2))
    expected = small().fit(images).transform(images)
    forms: list[tuple[Any, tuple[int, ...] | None]] = [
        (channels_first, None),
        (torch.from_numpy(channels_first), None),
        (torch.from_numpy(images), None),
        (images.astype(np.int64), None),
        (images.astype(np.float64), None),
        (images.reshape(40, -1), (8, 12, 3)),
        (channels_first.reshape(40, -1), (3, 8, 12)),
    ]
    for X, shape in forms:
        model = small(image_shape=shape).fit(X)
        assert model.image_shape_ == (3, 8, 12)
        assert model.n_features_in_ == 288
        np.testing.assert_allclose(model.transform(X), expected, atol=1e-5)
    grey = small().fit(images[..., 0])
    np.testing.assert_array_equal(grey.transform(images[..., :1].reshape(40, -1)), grey.transform(images[..., 0]))


def test_any_range_of_floats_gives_the_same_features() -> None:
    """Statistics come from the data, so a change of units changes nothing."""
    images = pictures().astype(np.float64)
    moved = images / 1024 - 8
    before, after = (small().fit(X).transform(X) for X in (images, moved))
    assert moved.max() < 0
    # Rounding differs, and training magnifies it.
    np.testing.assert_allclose(after, before, atol=0.02)
    assert before.std() > 0.2


def test_a_table_is_columns_with_their_own_units() -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 2)) @ rng.normal(size=(2, 6)) * 10.0 ** np.arange(6) + 5
    model = small(epochs=3).fit(X)
    config = model.fitted_.config
    assert (config.encoder.patch_size, config.augment.crop, config.augment.flip) == (1, False, False)
    np.testing.assert_allclose(model.fitted_.standardize.mean.flatten(), X.mean(0), rtol=1e-4)
    np.testing.assert_allclose(model.fitted_.standardize.std.flatten(), X.std(0), rtol=1e-4)
    reference = PCA().fit((X - X.mean(0)) / X.std(0)).explained_variance_
    np.testing.assert_allclose(model.fitted_.model.space.variance, reference, atol=1e-3)
    assert model.transform(X).shape == (60, 8)


def test_the_seed_decides_everything() -> None:
    images = pictures()
    first, second, other = (small(random_state=seed).fit_transform(images) for seed in (3, np.int64(3), 4))
    np.testing.assert_array_equal(first, second)
    assert np.abs(first - other).max() > 1e-2
    streams = [small(random_state=np.random.RandomState(7)) for _ in range(2)]
    drawn = [[model.fit(images).fitted_.config.train.seed for _ in range(2)] for model in streams]
    assert drawn[0] == drawn[1]
    assert drawn[0][0] != drawn[0][1]
    np.random.seed(0)
    assert small(random_state=None).fit(images).fitted_.config.train.seed == np.random.RandomState(0).randint(2**31 - 1)
    state = torch.random.get_rng_state()
    small().fit(images).transform(images)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_warm_start_trains_on() -> None:
    images, others = pictures(), pictures(30, seed=1) // 2
    model = small(warm_start=True, epochs=2).fit(images)
    before, mean = model.transform(images), model.fitted_.standardize.mean.clone()
    model.set_params(base_lr=1e-12).fit(others)
    np.testing.assert_allclose(model.transform(images), before, atol=1e-5)
    assert torch.equal(model.fitted_.standardize.mean, mean)
    r2 = model.score(images)
    model.set_params(base_lr=1e-2, epochs=10).fit(images)
    assert model.score(images) > r2
    assert (small(warm_start=False).fit(others).fitted_.standardize.mean - mean).abs().max() > 10
    with pytest.raises(UserError, match=r"X must have images of shape \(3, 8, 12\) for warm_start"):
        model.fit(images[:, :4])
    with pytest.raises(UserError, match="encoder settings must be those of the first fit"):
        model.set_params(patch_size=4).fit(images)


def test_a_warm_start_has_no_first_stage(tmp_path: Path) -> None:
    images = pictures(40, 16, 16, 3)
    config = replace(TINY, encoder__first_patch_size=8)
    model = small(config=config, patch_size=4, warm_start=True, out=tmp_path / "a").fit(images)
    assert (tmp_path / "a/first").is_dir()
    before = model.transform(images)
    for name in ("b", "c"):
        model.set_params(base_lr=1e-12, out=tmp_path / name).fit(images)
        assert not (tmp_path / name / "first").exists()
        np.testing.assert_allclose(model.transform(images), before, atol=1e-5)


def test_a_pickled_estimator_is_whole(tmp_path: Path) -> None:
    images = pictures()
    model = small(pooling="cls").fit(images)
    joblib.dump(model, tmp_path / "model.joblib")
    for copy in (joblib.load(tmp_path / "model.joblib"), pickle.loads(pickle.dumps(model))):
        np.testing.assert_array_equal(copy.transform(images), model.transform(images))
        assert copy.score(images) == model.score(images)
    with pytest.raises(NotFittedError):
        clone(model).transform(images)


def test_a_search_over_a_pipeline_in_two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    # Forked from a server that has imported what they need: joblib's own processes would import torch twice.
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["pmae.estimator", "pmae.train.loop"])
    monkeypatch.setattr(joblib.parallel, "DEFAULT_MP_CONTEXT", server)
    X, y = load_digits(return_X_y=True)
    pipeline = make_pipeline(small(image_shape=(8, 8), patch_size=4), LogisticRegression(max_iter=200))
    grid = {"pmae__masked_variance": np.array([0.2, 0.4])}
    with joblib.parallel_config("multiprocessing", n_jobs=2):
        search = GridSearchCV(pipeline, grid, cv=2, error_score="raise").fit(X[:200], y[:200])
    alone = GridSearchCV(pipeline, grid, cv=2, error_score="raise", refit=False).fit(X[:200], y[:200])
    scores = (found.cv_results_["mean_test_score"] for found in (search, alone))
    np.testing.assert_allclose(*scores, atol=0.02)
    # Far above the tenth that guessing gets: the features carry what the images show.
    assert search.score(X[200:400], y[200:400]) > 0.3


def test_patches_can_be_hidden_instead() -> None:
    model = small(space="pixels", masked_patches=0.5).fit(pictures())
    assert model.fitted_.config.objective.target == "patches"
    assert np.isfinite(model.score(pictures(seed=1)))
    with pytest.raises(UserError, match="masked_variance must be left unset where"):
        small(space="pixels", masked_variance=0.2).fit(pictures())


def test_settings_come_from_the_config_unless_a_parameter_says_otherwise() -> None:
    config = replace(TINY, train__epochs=2, space__components=5, train__seed=9)
    used = PMAE(config=config, device="cpu", batch_size=np.int64(8), augment=False).fit(pictures()).fitted_.config
    assert (used.train.epochs, used.train.batch_size) == (2, 8)
    assert used.space == SpaceConfig("pca", components=5)
    assert not used.augment.crop


@pytest.mark.parametrize(
    ("parameters", "shape", "message"),
    [
        ({}, (784,), r"image_shape must be given for a flat X of more than 256 columns.*784"),
        ({"image_shape": (9, 9)}, (64,), r"image_shape must be of as many numbers as X has columns, 64"),
        ({"image_shape": (64,)}, (64,), r"image_shape must be \(H, W\)"),
        ({"image_shape": (8, 8)}, (8, 12, 3), r"image_shape must be None, or that of the images in X, \(8, 12, 3\)"),
        ({}, (8, 8, 8), r"data.layout must be NHWC or NCHW"),
        ({}, (2, 8, 8, 3), r"images must be of shape"),
        ({"pooling": "patches"}, (8, 12, 3), r"pooling: unknown name 'patches'"),
        ({"epochs": "many"}, (8, 12, 3), r"train.epochs must be a whole number, got 'many'"),
        ({"masked_variance": 2}, (8, 12, 3), r"masking.masked_variance must be a share"),
        ({"space": "nowhere"}, (8, 12, 3), r"space.name: unknown name 'nowhere'"),
        ({"pooling": "last_4"}, (8, 12, 3), r"pooling must be another one for what is no ViT of 4 blocks or more"),
        ({"batch_size": 100}, (8, 12, 3), r"train.batch_size must be at most the number of training images"),
    ],
)
def test_mistakes_name_the_parameter(parameters: dict[str, Any], shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        small(**parameters).fit(pictures(20, *shape))


def test_other_images_than_in_fit_are_refused() -> None:
    model = small().fit(pictures())
    with pytest.raises(UserError, match=r"X must have images of shape \(3, 8, 12\), as in fit, got \(1, 8, 12\)"):
        model.transform(pictures(4, 8, 12))
    with pytest.raises(ValueError, match="X has 100 features, but PMAE is expecting 288"):
        model.transform(pictures(4, 100))
    with pytest.raises(UserError, match="image_shape must be given for a flat X of 3 channels"):
        model.transform(pictures(4, 288))
    with pytest.raises(ValueError, match="NaN"):
        model.transform(np.full((2, 8, 12, 3), np.nan))


@pytest.mark.parametrize(
    ("X", "message"),
    [
        ("scans/", r"^X must be images, got the path 'scans/'; `pmae\.pretrain` is what reads files"),
        (Path("scans"), r"^X must be images, got the path 'scans'"),
        (
            [np.zeros((8, 8, 3)), np.zeros((8, 9, 3))],
            r"^X must be images of one shape, got \[\(8, 8, 3\), \(8, 9, 3\)\]",
        ),
        (torch.zeros(20, 3, 8, 8).bfloat16(), r"^arrays must be of a kind that NumPy holds, got torch\.bfloat16"),
        (np.zeros((48, 64, 3)), r"one image in color \(then give array\[None\]\)"),
        (np.zeros((20, 23, 29)), r"23x29 have no common divisor from 2 to 16: crop or resize them"),
    ],
)
def test_what_is_no_array_of_images_is_told_in_words(X: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        PMAE(epochs=1, device="cpu").fit(X)


def test_narrow_grey_images_are_those_that_two_sides_name() -> None:
    X = pictures(20, 8, 8).reshape(20, 4, -1)
    with pytest.raises(UserError, match="signals"):
        small().fit(X)
    assert small(image_shape=X.shape[1:]).fit(X).image_shape_ == (1, *X.shape[1:])


def test_other_units_than_in_fit_are_warned_of() -> None:
    X = pictures(20, 8, 8)
    model = small().fit(X)
    with pytest.warns(UserWarning, match="the images are float64 of at most 1, and those trained on were uint8"):
        model.transform(X / 255)
    with warnings.catch_warnings(action="error"):
        model.transform(X.astype(float))


def test_a_fit_that_taught_hardly_anything_is_warned_of() -> None:
    """As scikit-learn's own estimators that end too early; one that learned says nothing."""
    with pytest.warns(ConvergenceWarning, match=r"R2 of what is hidden is -?\d.* after 1 epoch of 40 images, where 0"):
        small().fit(pictures())
    even = np.broadcast_to(pictures(200, 1, 1), (200, 8, 8))  # any patch of which tells all others
    plain = replace(TINY, objective__normalize_patches=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        assert small(config=plain, space="pixels", epochs=10, base_lr=0.05, augment=False).fit(even).score(even) > 0.5


def test_one_image_in_color_is_not_quietly_three_grey_ones() -> None:
    three = pictures(3, 16, 16)
    with pytest.warns(UserWarning, match="taken for 3 grey images of 16x16; if it is one image with 3 channels, give"):
        small().fit(three)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.simplefilter("ignore", ConvergenceWarning)
        small().fit(pictures(3, 16, 16, 3))


def test_an_interrupted_fit_is_a_keyboard_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise Interrupted("somewhere", 2)

    monkeypatch.setattr(loop, "pretrain", stop)
    with pytest.raises(KeyboardInterrupt):
        small().fit(pictures())
