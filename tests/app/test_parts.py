"""One image taken apart, against the method, closed forms and scikit-learn."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA as Reference

from pmae.app import panels
from pmae.app.material import LABELS, Material, patch_of_pixel
from pmae.data.images import ImageSet, Splits
from pmae.errors import UserError
from pmae.method import PrincipalMAE
from pmae.models import patchify
from pmae.runs import Run
from pmae.train.monitor import hidden_parts, visualize


@pytest.mark.parametrize("name", LABELS)
def test_visible_and_hidden_make_the_image_and_differ_in_the_hidden_groups_alone(material: Material, name: str) -> None:
    space, x = material.space(name), material.standardized(material.picked.images[3])
    masked = panels.hide(space, x, panels.draw_for(space, 0.3, 5))
    torch.testing.assert_close(masked.outside + masked.inside, x, atol=1e-4, rtol=1e-4)
    assert 0 < masked.units.sum() < space.mask_group_count
    assert float(masked.inside.norm()) > 0.01
    if not space.keeps_rest:
        hidden = space.expand_mask(masked.units[None])[0]
        z, kept = space.project(x)[0], space.project(masked.outside)[0]
        torch.testing.assert_close(kept[~hidden], z[~hidden], atol=1e-3, rtol=1e-3)
        assert float(kept[hidden].abs().max()) < 1e-3


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_the_share_asked_for_is_the_share_hidden(material: Material, share: float) -> None:
    cosine, pixels = material.space("cosine"), material.space("pixels")
    x = material.standardized(material.picked.images[0])
    hidden = panels.hide(cosine, x, panels.draw_for(cosine, share, 0)).units
    assert float(cosine.variance_share[hidden].sum()) == pytest.approx(share, abs=float(cosine.variance_share.max()))
    patches = panels.hide(pixels, x, panels.draw_for(pixels, share, 0)).units
    assert int(patches.sum()) == min(
        pixels.mask_group_count - 1, pixels.mask_group_count - int(pixels.mask_group_count * (1 - share))
    )


def test_a_seed_is_a_mask(material: Material) -> None:
    space, x = material.space("pca"), material.standardized(material.picked.images[0])
    first, again, other = (panels.hide(space, x, panels.draw_for(space, 0.3, seed)).units for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("space", ["pca", "pixels"])
def test_a_run_sees_and_predicts_what_the_method_does(
    make_run: Callable[[str], Run], splits: Splits, space: str
) -> None:
    material = Material(splits, make_run(space))
    model, x = material.model, material.standardized(material.picked.images[1])
    assert model is not None
    assert material.own_space == space
    own = material.space(space)
    draw = panels.draw_for(own, material.masked_share, 7)
    masked, (found, prediction, r2) = panels.hide(own, x, draw), panels.predict(model, x, draw)
    pictures = visualize(model, x, draw)
    torch.testing.assert_close(masked.outside, pictures.visible, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(masked.inside, pictures.target, atol=1e-5, rtol=1e-5)
    assert torch.equal(prediction, pictures.prediction)
    assert torch.equal(found.units, masked.units)
    torch.testing.assert_close(found.outside, masked.outside, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.inside, masked.inside, atol=1e-5, rtol=1e-5)
    marked = model.hidden_groups(draw) if isinstance(model, PrincipalMAE) else hidden_parts(model, draw)
    assert torch.equal(masked.units, marked[0])
    if isinstance(model, PrincipalMAE):
        # The basis is orthonormal, so the error in components is that of the pictures.
        expected = 1 - (prediction - masked.inside).square().sum() / masked.inside.square().sum()
        assert r2 == pytest.approx(float(expected), abs=1e-3)


def test_patches_are_numbered_as_the_model_cuts_them() -> None:
    shape = (2, 8, 12)
    found = patchify(patch_of_pixel(shape, 4).reshape(1, *shape).float(), 4)[0]
    np.testing.assert_array_equal(found.numpy(), np.repeat(np.arange(6.0)[:, None], 2 * 16, 1))


def test_bands_and_basis_are_those_of_scikit_learn(material: Material, splits: Splits) -> None:
    x = material.standardized(material.picked.images[2])
    rows = material.standardize(torch.from_numpy(splits.train.images)).flatten(1).double().numpy()
    reference = Reference().fit(rows)
    before = np.concatenate([[0.0], reference.explained_variance_ratio_.cumsum()[:-1]])
    top = np.flatnonzero(before < 0.5)
    band = panels.take_apart(material.space("pca"), x, material.space("pca").band(0.0, 0.5))
    np.testing.assert_array_equal(np.flatnonzero(band.units.numpy()), top)
    axes, centred = reference.components_[top], x.flatten().double().numpy() - reference.mean_
    np.testing.assert_allclose(band.inside.flatten(), axes.T @ (axes @ centred), atol=2e-3)
    torch.testing.assert_close(band.inside + band.outside, x, atol=1e-4, rtol=1e-4)
    ranks, images = panels.basis_images(material.space("pca"), band.units, 4)
    assert ranks.tolist()[0] == 0
    assert ranks.tolist()[-1] == top[-1]
    scaled = axes * np.sqrt(reference.explained_variance_[top])[:, None]
    np.testing.assert_allclose(np.abs(images[0].flatten().numpy()), np.abs(scaled[0]), atol=2e-3)


def test_three_bands_are_the_whole_image(material: Material) -> None:
    space, x = material.space("wavelet"), material.standardized(material.picked.images[4])
    bands = [panels.take_apart(space, x, space.band(*edges)) for edges in ((0.0, 0.8), (0.8, 0.95), (0.95, 1.0))]
    mean = space.reconstruct(torch.zeros(1, len(space.variance)))
    torch.testing.assert_close(mean + sum(band.inside for band in bands), x, atol=1e-4, rtol=1e-4)
    assert torch.equal(sum(band.units.int() for band in bands), torch.ones(space.mask_group_count, dtype=torch.int32))


@pytest.mark.parametrize(
    ("shape", "dtype", "missing"),
    [((1, 9, 15), "uint16", {"wavelet"}), ((5, 8, 4), "float32", set()), ((2, 7, 11), "int16", None)],
)
def test_any_channels_sizes_and_dtypes_have_their_spaces(
    shape: tuple[int, int, int], dtype: str, missing: set[str] | None
) -> None:
    images = (np.random.default_rng(0).normal(size=(20, *shape)) * 40 + 200).astype(dtype)
    material = Material(Splits("odd", ImageSet(images)))
    expected = {"wavelet", "pixels", "patch_pca"} if missing is None else missing
    assert set(LABELS) - set(material.offered()) == expected
    for name in material.offered():
        space, x = material.space(name), material.standardized(images[0])
        masked = panels.hide(space, x, panels.draw_for(space, 0.4, 0))
        torch.testing.assert_close(masked.outside + masked.inside, x, atol=1e-3, rtol=1e-3)


def test_neighbours_are_the_closest_features_and_not_the_image_itself(trained: Material, splits: Splits) -> None:
    assert trained.model is not None
    places, similarity = trained.neighbours(splits.train.images[5], 6)
    with torch.no_grad():
        features = trained.model.encoder.features(trained.standardize(torch.from_numpy(splits.train.images)))["mean"]
    features = torch.nn.functional.normalize(features, dim=1)
    expected = (features @ features[5]).sort(descending=True)
    np.testing.assert_array_equal(places, expected.indices[1:7])
    np.testing.assert_allclose(similarity, expected.values[1:7], atol=1e-5)


def test_data_must_fit_the_run(run: Run, splits: Splits) -> None:
    smaller = Splits("small", ImageSet(splits.train.images[:, :, :4]))
    with pytest.raises(UserError, match=r"data must be images of the shape .*\(3, 8, 12\)"):
        Material(smaller, run)
    with pytest.raises(UserError, match="dtype that the run was trained on, uint8, got 'float32'"):
        Material(Splits("floats", ImageSet(splits.train.images.astype(np.float32))), run)
    with pytest.raises(UserError, match="run must be given"):
        Material(splits).neighbours(splits.train.images[0], 3)
