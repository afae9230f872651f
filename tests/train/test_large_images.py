"""Images of 150,528 numbers (224x224 in colour): what cannot be fitted is refused with the bytes, the rest trains."""

from pathlib import Path

import numpy as np
import pytest
import torch

from pmae.cli import main
from pmae.config import Config, DecoderConfig, EncoderConfig, SpaceConfig, TrainConfig
from pmae.data.images import ImageSet, Splits
from pmae.derive import resolve
from pmae.errors import UserError
from pmae.spaces import build_space
from pmae.train import setup as forecast
from pmae.train.loop import pretrain
from pmae.train.setup import expected_fit

SHAPE = (3, 224, 224)
CPU = torch.device("cpu")


def pictures(count: int) -> np.ndarray:
    """Coarse noise blown up, so that a few directions hold most of the variance."""
    coarse = np.random.default_rng(0).integers(0, 255, (count, 3, 14, 14), dtype=np.uint8)
    return coarse.repeat(16, 2).repeat(16, 3)


@pytest.mark.parametrize(
    ("space", "units"),
    [
        (SpaceConfig("pca", components=6), 7),
        (SpaceConfig("cosine", grouped=True), 72),
        (SpaceConfig("patch_pca", grouped=True), 768),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_an_epoch_of_large_images(tmp_path: Path, space: SpaceConfig, units: int) -> None:
    config = Config(
        space=space,
        encoder=EncoderConfig(patch_size=16, width=16, depth=1, heads=2),
        decoder=DecoderConfig("small", width=16, depth=1, heads=2),
        train=TrainConfig(epochs=1, batch_size=4, device="cpu"),
    )
    images = ImageSet(pictures(8))
    config = resolve(config, 8, SHAPE)[0]
    run = pretrain(config, Splits("large", images, None, ImageSet(pictures(4))), tmp_path / "run", quiet=True)
    lines = [line for line in run.metrics() if "loss" in line]
    assert len(lines) == 2
    assert all(np.isfinite(line["loss"]) for line in lines)
    assert all(0 < line["masked_share"] < 1 for line in lines)
    assert build_space(space, SHAPE).mask_group_count == units


def test_all_components_of_large_images_are_refused_with_the_bytes_and_the_ways_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("large.npy", pictures(4))
    asked = ["--space", "pca", "--space.components", "150528"]
    assert main(["pretrain", "--data", "large.npy", *asked, "--out", "run", "--device", "cpu"]) == 2
    said = capsys.readouterr().err.strip()
    assert said.count("\n") == 0
    assert f"150528 components of 150528 pixels need {4 * 8 * 150528**2:,} bytes for the fit" in said
    for way in ("space.components", "patch_pca", "cosine", "data.resize"):
        assert way in said
    assert not Path("run").exists()


def test_a_fit_that_memory_is_too_small_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast, "available_bytes", lambda: 10**9)
    with torch.device("meta"):
        space = build_space(SpaceConfig("pca", components=512), SHAPE)
        need = 6 * 8 * 150528 * (512 + 32)
        with pytest.raises(UserError, match=f"needs {need:,} bytes, and 1,000,000,000 are free on cpu; lower space"):
            expected_fit(space, 1000, CPU)
        # What has no basis as large as the images needs next to nothing.
        assert expected_fit(build_space(SpaceConfig("cosine"), SHAPE), 1000, CPU) == []
        assert build_space(SpaceConfig("patch_pca"), SHAPE).fit_cost(1000).bytes == 4 * 8 * 768**2


def test_a_long_fit_is_announced() -> None:
    with torch.device("meta"):
        space = build_space(SpaceConfig("pca"), (3, 32, 32))
    # Half of 2 N D^2 multiplications, and 25 D^3 for the axes, at 10^11 a second.
    seconds = (50_000 * 3072**2 + 25 * 3072**3) / 1e11
    assert expected_fit(space, 50_000, CPU) == [
        f"the fit of space 'pca' to 50,000 images takes about {seconds:.0f} s and 0.3 GB on cpu"
    ]
    assert "takes about 8 minutes" in expected_fit(space, 5_000_000, CPU)[0]
    assert expected_fit(space, 1_000, CPU) == []
