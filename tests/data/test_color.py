"""Color augmentations against torchvision's, given the same strengths, and SimCLR, which needs them."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import circvar
from torchvision.transforms import functional as reference

from pmae.api import pretrain
from pmae.cli import main
from pmae.config import AugmentConfig, Config, DataConfig, replace
from pmae.config_file import to_dict
from pmae.contrastive import nt_xent
from pmae.data.augment import Standardize, build_augmentations
from pmae.data.color import Blur, ColorJitter, Grayscale, Solarize, hue_concentration, hues_of, turn_hue
from pmae.data.images import ImageSet
from pmae.data.ondemand import OnDemand
from pmae.data.sets import load
from pmae.derive import resolve
from pmae.files import read_tensors, write_json
from pmae.flops import flops_per_image
from pmae.method import build_method
from pmae.paper.recipes import recipe
from pmae.runs import Run
from pmae.sweep.find import RunIndex

SHAPE = (3, 16, 16)


@pytest.fixture
def images() -> torch.Tensor:
    """Noise, with a grey and a black image, which have no hue."""
    x = torch.rand(6, *SHAPE, generator=torch.Generator().manual_seed(0))
    x[0], x[1] = x[0, :1], 0.0
    return x


def test_jitter_is_torchvisions_with_the_same_factors(images: torch.Tensor) -> None:
    noise = torch.rand(6, 5, generator=torch.Generator().manual_seed(1))
    noise[:, 4] = torch.tensor([0.0, 0.1, 0.2, 0.3, 0.4, 0.9])
    found = ColorJitter(brightness=0.4, contrast=0.5, saturation=0.6, hue=0.2)(images, noise)
    for x, n, y in zip(images, noise.tolist(), found, strict=True):
        expected = reference.adjust_brightness(x, 1 + 0.4 * (2 * n[0] - 1))
        expected = reference.adjust_contrast(expected, 1 + 0.5 * (2 * n[1] - 1))
        expected = reference.adjust_saturation(expected, 1 + 0.6 * (2 * n[2] - 1))
        expected = reference.adjust_hue(expected, 0.2 * (2 * n[3] - 1))
        torch.testing.assert_close(y, expected if n[4] < 0.8 else x, atol=2e-5, rtol=0)


def test_a_whole_turn_of_the_hue_changes_nothing(images: torch.Tensor) -> None:
    torch.testing.assert_close(turn_hue(images, torch.ones(6, 1, 1, 1)), images, atol=1e-5, rtol=0)


def test_grayscale_is_torchvisions_for_a_share_of_the_images(images: torch.Tensor) -> None:
    noise = torch.linspace(0, 1, 6)[:, None]
    found = Grayscale(p=0.5)(images, noise)
    torch.testing.assert_close(found[:3], reference.rgb_to_grayscale(images[:3], 3))
    assert torch.equal(found[3:], images[3:])


def test_blur_is_torchvisions_with_the_same_sigma(images: torch.Tensor) -> None:
    noise = torch.stack([torch.linspace(0, 1, 6), torch.tensor([0.0, 0.1, 0.2, 0.3, 0.4, 0.9])], 1)
    found = Blur(sigma=(0.2, 3.0), kernel=7, p=0.8)(images, noise)
    for x, n, y in zip(images, noise.tolist(), found, strict=True):
        expected = reference.gaussian_blur(x, [7, 7], [0.2 + 2.8 * n[0]] * 2) if n[1] < 0.8 else x
        torch.testing.assert_close(y, expected, atol=1e-6, rtol=0)


def test_solarize_is_torchvisions_for_a_share_of_the_images(images: torch.Tensor) -> None:
    found = Solarize(p=0.5)(images, torch.linspace(0, 1, 6)[:, None])
    torch.testing.assert_close(found[:3], reference.solarize(images[:3], 0.5))
    assert torch.equal(found[3:], images[3:])


def test_simclr_is_the_contrastive_loss_of_whole_images(images: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"width": 24, "depth": 1, "heads": 2}
    small = {f"{part}__{key}": size for part in ("encoder", "decoder") for key, size in sizes.items()}
    config, _ = resolve(replace(recipe("simclr"), encoder__patch_size=8, train__batch_size=3, **small), 64, SHAPE)
    torch.manual_seed(0)
    model = build_method(config, SHAPE).train()
    with monkeypatch.context() as without:
        for name in ("project", "reconstruct"):  # nothing is hidden, so no component is needed
            without.delattr(f"pmae.spaces.PCA.{name}")
        outcome = model(images, model.draw(6, 0.2, torch.Generator().manual_seed(0)))
    assert model.contrastive is not None
    features = model.encoder(images)[1].mean(1)
    z = super(type(model.contrastive.module), model.contrastive.module).forward(features)
    torch.testing.assert_close(outcome.loss, nt_xent(z, 0.2))
    outcome.loss.backward()
    assert all(p.grad is None or not p.grad.any() for n, p in model.decoder.named_parameters() if "projector" not in n)
    masked = replace(config, masking__enabled=True)
    predicting = replace(masked, objective__reconstruction_weight=1.0)
    assert flops_per_image(masked, SHAPE) < flops_per_image(predicting, SHAPE)


@pytest.mark.usefixtures("no_figures")
def test_simclr_trains_from_the_command_line_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = tmp_path / "x.npy", tmp_path / "run"
    np.save(data, np.random.default_rng(0).integers(0, 256, (40, 16, 16, 3), np.uint8))
    common = ["pretrain", "--data", str(data), "--recipe", "simclr", "--epochs", "1", "--batch-size", "16"]
    sizes = {"width": 24, "depth": 1, "heads": 2}
    common += [f"--{part}.{key}={size}" for part in ("encoder", "decoder") for key, size in sizes.items()]
    assert main([*common, "--out", str(out)]) == 0
    said = capsys.readouterr().out.partition("nothing was to be predicted, so there is no R2")
    assert said[1]
    assert "R2" not in said[0]
    assert "masked_variance" not in said[0]
    assert Run(out).config.augment.extra == ("color_jitter", "grayscale")
    assert all(line["loss"] > 0 for line in Run(out).metrics() if "loss" in line)
    assert not [key for line in Run(out).metrics() for key in line if "r2" in key or "masked" in key]
    assert {"original", "variance"} <= (kept := read_tensors(out / "samples.safetensors").keys())
    assert not kept & {"visible", "hidden", "prediction", "target"}
    assert main(["report", str(out), "-o", str(tmp_path / "report.html")]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "Reconstructions" not in page
    assert "is hidden" not in page
    # Runs of older versions noted a share, and go on.
    noted = json.loads((out / "config.json").read_text())
    noted["masking"]["masked_variance"] = 0.2
    (out / "config.json").write_text(json.dumps(noted))
    (out / "samples.safetensors").unlink()
    assert main(["pretrain", "--out", str(out), "--resume"]) == 0
    assert Run(out).config.masking.masked_variance is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--augment.extra", "color_jitter(hue=0.7)"], "color_jitter.hue must be in [0, 0.5], got 0.7"),
        (["--augment.extra", "grayscale(p=2)"], "grayscale.p must be in [0, 1], got 2"),
        (["--augment.extra", "blur(kernel=4)"], "blur.kernel must be an odd number, got 4"),
        (
            ["--augment.extra", "blur(sigma=(2, 1))"],
            "blur.sigma must be two increasing numbers above 0, got (2.0, 1.0)",
        ),
        (["--masking.no-enabled"], "masking.enabled must be true unless objective.reconstruction_weight is 0"),
        (["--objective.reconstruction-weight", "0"], "--objective.reconstruction-weight must be above 0 where"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "x.npy"
    np.save(data, np.random.default_rng(0).integers(0, 256, (40, 16, 16, 3), np.uint8))
    given = ["--data", str(data), "--epochs", "1", "--out", str(tmp_path / "run"), *options]
    assert main(["pretrain", *given]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_grey_images_change_as_torchvisions_do_and_keep_what_color_alone_would_change() -> None:
    x = torch.rand(4, 1, 16, 16, generator=torch.Generator().manual_seed(2))
    noise = torch.rand(4, 5, generator=torch.Generator().manual_seed(1))
    jitter = {"brightness": 0.4, "contrast": 0.5, "saturation": 0.6, "hue": 0.2}
    for one, n, y in zip(x, noise.tolist(), ColorJitter(**jitter, p=1)(x, noise), strict=True):
        expected = one
        for (name, strength), drawn in zip(jitter.items(), n, strict=False):
            centre = 0 if name == "hue" else 1
            expected = getattr(reference, f"adjust_{name}")(expected, centre + strength * (2 * drawn - 1))
        torch.testing.assert_close(y, expected, atol=2e-5, rtol=0)
    assert torch.equal(Grayscale(p=1)(x, noise[:, :1]), x)


def test_simclr_trains_on_grey_images(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.random.default_rng(0).integers(0, 256, (40, 16, 16), np.uint8))
    common = [
        "pretrain",
        "--data",
        str(tmp_path / "x.npy"),
        "--recipe",
        "simclr",
        "--epochs",
        "1",
        "--batch-size",
        "16",
    ]
    sizes = {"width": 24, "depth": 1, "heads": 2}
    common += [f"--{part}.{key}={size}" for part in ("encoder", "decoder") for key, size in sizes.items()]
    assert main([*common, "--out", str(tmp_path / "run")]) == 0
    assert Run(tmp_path / "run").config.augment.extra == ("color_jitter", "grayscale")


def test_colors_of_other_channels_are_refused_and_what_needs_none_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "x.npy"
    np.save(data, np.random.default_rng(0).integers(0, 256, (40, 16, 16, 5), np.uint8))
    given = ["--data", str(data), "--epochs", "1", "--out", str(tmp_path / "run"), "--augment.extra", "grayscale"]
    assert main(["pretrain", *given]) == 2
    said = capsys.readouterr().err
    assert "images in color or grey (without a name it adds nothing), got 'uint8 images with 5 channels'" in said
    grey = Standardize(torch.full((1, 1, 1), 100.0), torch.full((1, 1, 1), 50.0))
    blur, solarize = build_augmentations(AugmentConfig(extra=("blur(p=1)", "solarize(p=1)")), grey, "uint8")
    x = torch.randint(0, 256, (2, 1, 8, 8), generator=torch.Generator().manual_seed(0)).float()
    expected = reference.solarize(x / 255, 0.5) * 255
    torch.testing.assert_close(grey.invert(solarize(grey(x), torch.zeros(2, 1))), expected, atol=1e-3, rtol=0)
    expected = reference.gaussian_blur(x, [9, 9], [0.1, 0.1])
    torch.testing.assert_close(grey.invert(blur(grey(x), torch.zeros(2, 2))), expected, atol=1e-3, rtol=0)


def plain(*colors: tuple[int, int, int]) -> np.ndarray:
    """Images (N, 3, 8, 8) of one color each, brighter on one side."""
    light = np.linspace(0.5, 1, 8)
    return (np.array(colors)[:, :, None, None] * light).repeat(8, 2).astype(np.uint8)


RED, YELLOW, GREEN, CYAN, BLUE = (200, 0, 0), (200, 200, 0), (0, 200, 0), (0, 200, 200), (0, 0, 200)


@pytest.mark.parametrize(
    ("colors", "degrees"),
    [([RED] * 3, [0]), ([RED, CYAN], [0, 180]), ([RED, GREEN], [0, 120]), ([YELLOW, BLUE, RED, RED], [60, 240, 0, 0])],
)
def test_hues_are_concentrated_as_scipy_says(colors: list[tuple[int, int, int]], degrees: list[int]) -> None:
    expected = 1 - circvar(np.deg2rad(degrees))
    assert hue_concentration(np.array(colors)) == pytest.approx(expected, abs=1e-9)
    assert hues_of(ImageSet(plain(*colors))) == pytest.approx(expected, abs=1e-9)
    assert hues_of(ImageSet(plain(*colors).astype(np.uint16) * 256)) == pytest.approx(expected, abs=1e-9)


def test_hues_are_those_of_images_spread_over_a_set() -> None:
    assert hues_of(ImageSet(plain(*[RED] * 500, *[CYAN] * 500))) == pytest.approx(0, abs=1e-9)
    assert hues_of(ImageSet(plain(RED))) == pytest.approx(1)
    assert hues_of(ImageSet(plain(RED, CYAN).astype(np.float32))) is None
    assert hues_of(ImageSet(plain(RED, CYAN)[:, :1])) is None


@pytest.mark.filterwarnings("ignore:skipped an unreadable")
def test_a_broken_image_of_a_shard_does_not_hide_the_hues_of_others(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "shard.tar", "w") as shard:
        for number, image in enumerate([*plain(RED, CYAN, RED, CYAN), None]):
            file = io.BytesIO(b"no picture" if image is None else b"")
            if image is not None:
                Image.fromarray(image.transpose(1, 2, 0)).save(file, "png")
            entry = tarfile.TarInfo(f"{number}.png")
            entry.size = len(file.getvalue())
            shard.addfile(entry, io.BytesIO(file.getvalue()))
    train = load(DataConfig(str(tmp_path / "shard.tar"))).train
    assert isinstance(train.images, OnDemand)
    assert hues_of(train) == pytest.approx(0.2, abs=1e-9)  # the first takes the place of the broken one


def test_a_run_keeps_the_hues_and_is_found_again_by_open_settings(tmp_path: Path, tiny: Config) -> None:
    noise = np.random.default_rng(0).integers(0, 40, (64, 3, 8, 8), np.uint8)
    np.save(tmp_path / "images.npy", plain(*[RED, CYAN] * 32) + noise)
    wanted = replace(tiny, data__source=str(tmp_path / "images.npy"), objective__contrastive_weight=1.0)
    run = pretrain(wanted, out=tmp_path / "runs" / "one", quiet=True, figures=False)
    assert run.environment["data"]["hues"] == pytest.approx(0, abs=0.3)
    # As if it had been made on a GPU, where colors of such images are distorted.
    environment = json.loads((run.path / "environment.json").read_text())
    write_json(run.path / "environment.json", {**environment, "device": "some GPU"})
    settled, _ = resolve(wanted, 58, (3, 8, 8), gpu=True, hues=environment["data"]["hues"])
    assert settled.augment.extra == ("color_jitter", "grayscale")
    write_json(run.path / "config.json", to_dict(settled))
    again = RunIndex([tmp_path / "runs"]).first(wanted)
    assert again is not None
    assert again.path == run.path
