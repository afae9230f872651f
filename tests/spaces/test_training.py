"""Grouped spaces and spaces with a rest through a whole run: signals, samples, figures, and a resume in the middle."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.conftest import smooth_images

from pmae import api
from pmae.config import Config, SpaceConfig, replace
from pmae.data.images import ImageSet, Splits
from pmae.paper.recipes import with_patches
from pmae.report import contents, samples
from pmae.runs import Run
from pmae.train.loop import Pretraining

GROUPED = SpaceConfig("cosine", grouped=True)
SPACES = {
    "wavelet": SpaceConfig("wavelet", wavelet="haar"),
    "patch_pca grouped": SpaceConfig("patch_pca", grouped=True, patch=8),
    "pca and rest": SpaceConfig("pca", components=20),
}


@pytest.fixture(scope="module")
def toy() -> Splits:
    """Images with more than one patch of 8 pixels, whose components have groups to share."""
    images = smooth_images(160, (3, 16, 16))
    return Splits("toy", ImageSet(images[:128]), None, ImageSet(images[128:]))


def with_space(config: Config, space: SpaceConfig) -> Config:
    return replace(config, **{f"space__{key}": value for key, value in vars(space).items()}, train__epochs=2)


@pytest.mark.parametrize("name", SPACES)
def test_a_run_makes_signals_samples_and_figures(name: str, tiny: Config, toy: Splits, tmp_path: Path) -> None:
    run = api.pretrain(with_space(tiny, SPACES[name]), toy, tmp_path / "run", quiet=True)
    assert run.results["pretrain"]["epoch"] == 2
    _check(run)


@pytest.mark.usefixtures("no_figures")
def test_r2_is_a_mean_of_its_bands_also_where_images_are_fewer_than_components(
    tiny: Config, toy: Splits, tmp_path: Path
) -> None:
    """Held-out noise lies in directions that 40 smooth images do not have: hidden too, so some band has them."""
    noise = np.random.default_rng(0).integers(0, 255, (32, *toy.train.shape), dtype=np.uint8)
    few = Splits("few", toy.train.take(np.arange(40)), None, ImageSet(noise))
    found = api.pretrain(with_space(tiny, SpaceConfig("pca")), few, tmp_path / "run", quiet=True).results["pretrain"]
    bands = [value for key, value in found.items() if key.startswith("r2_band_")]
    assert min(bands) <= found["held_out_r2"] <= max(bands)


def _check(run: Run) -> None:
    last = [line for line in run.metrics() if "loss" in line][-1]
    assert last["masked_share"] == pytest.approx(0.2, abs=0.1)
    found = run.results["pretrain"]
    assert np.isfinite(found["held_out_r2"])
    assert any(key.startswith("r2_band_") for key in found)
    drawn = {path.stem for path in (run.path / "figures").iterdir()}
    assert {"masks", "spectrum", "spectrum-parts", "reconstructions", "r2-by-band"} <= drawn
    _check_samples(load_file(run.path / "samples.safetensors"), load_file(run.path / "fitted.safetensors"))


def _check_samples(samples: dict[str, np.ndarray], fitted: dict[str, np.ndarray]) -> None:
    """The spectrum is sorted and whole, masks hide about a fifth of it, the parts are the image less its mean."""
    variance, hidden = samples["variance"].astype(float), samples["hidden"]
    assert bool((np.diff(variance) <= 0).all())
    assert variance.sum() == pytest.approx(fitted["space.variance"].sum(), rel=1e-4)
    share = (hidden * variance).sum(1) / variance.sum()
    assert share.mean() == pytest.approx(0.2, abs=0.1)
    x = (samples["original"] - fitted["standardize.mean"]) / fitted["standardize.std"]
    parts = samples["top"] + samples["middle"] + samples["bottom"]
    # All parts leave out the same mean image.
    np.testing.assert_allclose(x - parts, np.broadcast_to((x - parts)[:1], x.shape), atol=1e-3)


def test_a_stopped_run_resumes_bit_for_bit(
    tiny: Config, toy: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = with_space(tiny, GROUPED)
    whole = api.pretrain(config, toy, tmp_path / "whole", quiet=True)
    _check(whole)
    shown = contents.load(whole.path)
    assert "hidden groups" in samples.masks(shown).caption
    assert samples.spectrum(shown).caption.startswith("The first of 63 groups holds")
    original = Pretraining.inputs

    def stop(self: Pretraining, *arguments: object) -> object:
        if self.step == 4:
            raise RuntimeError("power cut")
        return original(self, *arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(Pretraining, "inputs", stop)
        with pytest.raises(RuntimeError, match="power cut"):
            api.pretrain(config, toy, tmp_path / "halves", quiet=True)
    resumed = api.pretrain(config, toy, tmp_path / "halves", resume=True, quiet=True, figures=False)
    assert resumed.results == whole.results
    first, second = (_weights(run) for run in (whole, resumed))
    assert first.keys() == second.keys()
    assert all(np.array_equal(first[key], second[key]) for key in first)


def _weights(run: Run) -> dict[str, np.ndarray]:
    return load_file(run.checkpoint() / "encoder.safetensors")


def test_the_mae_twin_of_a_grouped_run_is_plain_mae(tiny: Config) -> None:
    assert with_patches(with_space(tiny, GROUPED)).space == SpaceConfig("pixels")
