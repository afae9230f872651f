"""Signals (N, C, L) and vectors (N, D) as images of one row, against closed forms and other libraries."""

from pathlib import Path

import numpy as np
import pytest
import pywt
import torch
from safetensors.numpy import load_file
from sklearn.decomposition import PCA as Reference
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import resized_crop

from pmae import api
from pmae.cli import main
from pmae.config import AugmentConfig, Config, DataConfig, EncoderConfig, SpaceConfig, replace
from pmae.data.arrays import from_arrays
from pmae.data.augment import crop, draw_boxes
from pmae.data.images import Splits
from pmae.data.sets import load, with_held_out
from pmae.derive import patch_for, resolve
from pmae.errors import UserError
from pmae.evaluate.protocols import preset, without_augmentation
from pmae.masking import nominal_ratio
from pmae.method import build_method
from pmae.models import Encoder, build_encoder, patchify, unpatchify
from pmae.runs import Run
from pmae.spaces import PCA, build_space

CPU = torch.device("cpu")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def encoder_for(shape: tuple[int, int, int], patch: int) -> Encoder:
    return build_encoder(EncoderConfig(patch_size=patch, width=32, depth=1, heads=4), shape).eval()


def test_patches_of_a_signal_are_its_pieces() -> None:
    x = normal(2, 3, 1, 12)
    pieces = x.numpy().reshape(2, 3, 3, 4).transpose(0, 2, 3, 1).reshape(2, 3, 12)
    np.testing.assert_array_equal(patchify(x, 4).numpy(), pieces)
    assert torch.equal(unpatchify(patchify(x, 4), 4, (3, 1, 12)), x)


def test_the_patch_embedding_is_a_strided_convolution_in_one_dimension() -> None:
    embed, x = encoder_for((2, 1, 24), 6).net.patch_embed, normal(5, 2, 1, 24)
    weight, bias = embed.proj.weight, embed.proj.bias
    expected = torch.nn.functional.conv1d(x[:, :, 0], weight[:, :, 0], bias, stride=6).transpose(1, 2)
    torch.testing.assert_close(embed(x), expected)
    # In bfloat16 it is one product of patches instead.
    product = embed.bfloat16()(x.bfloat16())
    torch.testing.assert_close(product.float(), expected, atol=0.1, rtol=0.05)


def test_positions_on_one_row_are_waves_of_the_column() -> None:
    found = encoder_for((1, 1, 40), 4).net.pos_embed[0].numpy()
    angle = np.arange(10)[:, None] * 10000.0 ** (-np.arange(8) / 8)
    row = np.concatenate([np.zeros((10, 8)), np.ones((10, 8))], 1)
    expected = np.concatenate([np.sin(angle), np.cos(angle), row], 1)
    np.testing.assert_allclose(found[1:], expected, atol=1e-6)
    assert not found[0].any()


@pytest.mark.parametrize(("length", "patch"), [(64, 4), (1000, 100), (30, 3), (13, 1), (2, 1), (784, 56)])
def test_a_patch_leaves_about_twelve_tokens(length: int, patch: int) -> None:
    assert patch_for(1, length) == patch


def test_lengths_and_patches_that_do_not_fit_are_refused_with_some_that_do() -> None:
    with pytest.raises(UserError, match=r"no divisor of 997 leaves 4 to 64 tokens: cut or pad .* \(to 996 or 1000"):
        patch_for(1, 997)
    with pytest.raises(UserError, match=r"a divisor of the signal's length \(12: 1, 2, 3, 4, 6\), got 5"):
        encoder_for((1, 1, 12), 5)
    with pytest.raises(UserError, match="at most the image's side"):
        encoder_for((1, 1, 12), 16)


def test_what_is_meant_for_images_is_off_for_signals_and_vectors() -> None:
    signal, reasons = resolve(Config(), 100, (2, 1, 64))
    assert (signal.augment.crop, signal.augment.flip, signal.data.standardize) == (True, False, "channel")
    assert reasons["encoder.patch_size"] == "1x16 tokens of 1x64"
    vector, reasons = resolve(Config(), 100, (1, 1, 30), vectors=True)
    assert (vector.augment.crop, vector.augment.flip, vector.data.standardize) == (False, False, "pixel")
    assert "neither an order" in reasons["data.standardize"]
    assert resolve(vector, 100, (1, 1, 30), vectors=True) == (vector, {})
    single, _ = resolve(replace(Config(), encoder__patch_size=1), 100, (1, 1, 30))
    assert not single.objective.normalize_patches
    plain = without_augmentation(preset("paper"))
    assert (plain.probe.augment, plain.finetune.augment) == (None, None)  # type: ignore[union-attr]


def test_boxes_of_a_signal_have_uniform_lengths_and_no_mirror() -> None:
    boxes = draw_boxes(4000, 1, 200, AugmentConfig(crop_scale=(0.3, 0.8)), torch.Generator().manual_seed(0), CPU)
    assert bool((boxes.top == 0).all() and (boxes.height == 1).all() and not boxes.flip.any())
    assert bool((boxes.left >= 0).all() and (boxes.left + boxes.width <= 200).all())
    lengths = boxes.width.numpy()
    assert (lengths.min(), lengths.max()) == (60, 160)
    np.testing.assert_allclose(np.quantile(lengths, (0.25, 0.5, 0.75)), (85, 110, 135), atol=4)


def test_a_crop_of_a_signal_equals_torchvision() -> None:
    x = normal(6, 2, 1, 50)
    boxes = draw_boxes(6, 1, 50, AugmentConfig(), torch.Generator().manual_seed(1), CPU)
    found = crop(x, boxes)
    for i in range(6):
        left, length = int(boxes.left[i]), int(boxes.width[i])
        expected = resized_crop(x[i], 0, left, 1, length, [1, 50], InterpolationMode.BICUBIC, antialias=True)
        torch.testing.assert_close(found[i], expected, atol=1e-4, rtol=1e-4)


def test_layouts_of_signals_and_vectors() -> None:
    values = normal(6, 3, 8).numpy()
    signals, grey = (from_arrays(values, layout=layout) for layout in ("NCL", "NCHW"))
    vectors = from_arrays(values[:, 0])
    np.testing.assert_array_equal(signals.images, values[:, :, None])
    np.testing.assert_array_equal(grey.images, values[:, None])
    np.testing.assert_array_equal(vectors.images, values[:, :1, None])
    assert (signals.vectors, grey.vectors, vectors.vectors) == (False, False, True)
    assert vectors.take(np.arange(2)).vectors
    assert from_arrays(values[:, 0].astype(np.int16), layout="ND").shape == (1, 1, 8)
    with pytest.raises(UserError, match=r"of 3 axes for data\.layout NCL, got \(6, 8\)"):
        from_arrays(values[:, 0], layout="NCL")
    with pytest.raises(UserError, match=r"of 2 axes for data\.layout ND, got \(6, 3, 8\)"):
        from_arrays(values, layout="ND")
    with pytest.raises(UserError, match=r"data\.layout must be ND for int16 vectors of shape \(6, 8\), got auto"):
        from_arrays(values[:, 0].astype(np.int16))


def test_files_of_signals_and_vectors(tmp_path: Path) -> None:
    values, labels = normal(6, 3, 8).numpy(), np.arange(6) % 2
    np.save(tmp_path / "vectors.npy", values[:, 0])
    np.savez(tmp_path / "signals.npz", images=values, labels=labels, test_images=values[:2], test_labels=labels[:2])
    vectors = load(DataConfig(str(tmp_path / "vectors.npy"))).train
    assert isinstance(vectors.images, np.memmap)
    assert (vectors.shape, vectors.vectors) == ((1, 1, 8), True)
    signals = load(DataConfig(str(tmp_path / "signals.npz"), layout="NCL"))
    assert signals.train.shape == (3, 1, 8)
    assert signals.test is not None
    np.testing.assert_array_equal(signals.test.images, values[:2, :, None])


def test_components_of_vectors_equal_scikit_learn() -> None:
    x = normal(200, 12).double() @ normal(12, 12, seed=1).double() + 3
    space = PCA((1, 1, 12)).double()
    space.fit(x[:, None, None].split(50))
    reference = Reference().fit(x.numpy())
    signs = np.sign((space.components.numpy() * reference.components_).sum(1))
    np.testing.assert_allclose(space.variance, reference.explained_variance_, rtol=1e-9)
    np.testing.assert_allclose(space.project(x[:, None, None]), reference.transform(x.numpy()) * signs, atol=1e-8)


@pytest.mark.filterwarnings("ignore:Level value")
def test_wavelets_of_signals_equal_pywavelets() -> None:
    x = normal(3, 1, 1, 24)
    space = build_space(SpaceConfig("wavelet", wavelet="db3"), (1, 1, 24))
    expected = np.concatenate(pywt.wavedec(x[:, 0, 0].numpy(), "db3", mode="periodization", level=3), -1)
    np.testing.assert_allclose(space.project(x).numpy(), expected, atol=1e-5)
    assert build_space(SpaceConfig("wavelet", grouped=True), (1, 1, 24)).mask_group_count == 4


def test_straight_lines_are_predicted_where_patches_are_hidden(tiny: Config) -> None:
    ends = normal(2000, 2)
    lines = ends[:, :1] + (ends[:, 1:] - ends[:, :1]) * torch.linspace(0, 1, 16)
    config = replace(tiny, space__name="pixels", masking__masked_patches=0.5, objective__normalize_patches=False)
    assert learned_r2(config, lines) > 0.8


def test_what_a_shift_ties_together_is_predicted_where_components_are_hidden(tiny: Config) -> None:
    # The components of a shifted wave are uncorrelated, so no linear map predicts them, but the shift decides them all.
    angle = 2 * np.pi * (torch.arange(16) / 16 - torch.rand(2000, 1, generator=torch.Generator().manual_seed(0)))
    waves = angle.cos() + 0.8 * (2 * angle).cos()
    assert learned_r2(replace(tiny, masking__masked_variance=0.2), waves) > 0.5


def learned_r2(config: Config, signals: torch.Tensor) -> float:
    """The share of what is hidden that is predicted on the last 200 signals, after 200 steps on the others."""
    x, generator = (signals / signals.std())[:, None, None], torch.Generator().manual_seed(1)
    config, _ = resolve(replace(config, encoder__patch_size=2, encoder__depth=1), len(x), (1, 1, 16))
    space = build_space(config.space, (1, 1, 16))
    space.fit(x.split(500))
    torch.manual_seed(0)
    model, ratio = build_method(config, (1, 1, 16), space), nominal_ratio(config.masking)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for _ in range(200):
        batch = x[torch.randint(len(x) - 200, (64,), generator=generator)]
        model(batch, model.draw(64, ratio, generator)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        found = model(x[-200:], model.draw(200, ratio, generator))
    return float(1 - found.error.sum() / found.energy.sum())


@pytest.mark.parametrize("space", ["pca", "pixels"])
def test_the_command_line_trains_on_a_file_of_signals_and_draws_lines(space: str, tiny: Config, tmp_path: Path) -> None:
    values = normal(48, 4, 32).numpy().cumsum(-1)
    np.savez(tmp_path / "x.npz", images=values, labels=np.arange(48) % 2)
    small = "--encoder.width 16 --encoder.depth 1 --encoder.heads 2 --decoder.width 16 --decoder.depth 1"
    flags = f"--epochs 1 --device cpu --space {space} {small} --decoder.heads 2 --data.layout NCL".split()
    assert main(["pretrain", "--data", str(tmp_path / "x.npz"), "--out", str(tmp_path / "run"), *flags]) == 0
    run = Run(tmp_path / "run")
    assert run.config.encoder.patch_size == 2
    assert load_file(run.path / "samples.safetensors")["visible"].shape == (5, 4, 1, 32)  # the tenth held out
    drawn = {path.stem for path in (run.path / "figures").iterdir()}
    assert {"masks", "reconstructions"} <= drawn
    assert ("spectrum-parts" in drawn) == (space == "pca")
    assert main(["report", str(run.path), "-o", str(tmp_path / "report.html")]) == 0
    assert "could not be drawn" not in (tmp_path / "report.html").read_text()


@pytest.mark.usefixtures("no_figures")
def test_vectors_in_memory_are_embedded_after_training(tiny: Config, tmp_path: Path) -> None:
    table = (normal(64, 12) * torch.logspace(-2, 3, 12) + 5).numpy()
    run = api.pretrain(
        replace(tiny, encoder__patch_size=None, train__epochs=1), table, out=tmp_path / "run", quiet=True
    )
    assert (run.config.encoder.patch_size, run.config.data.standardize) == (1, "pixel")
    seen = with_held_out(Splits("table", from_arrays(table, layout="ND"))).train.images
    np.testing.assert_allclose(load_file(run.path / "fitted.safetensors")["standardize.std"], seen.std(0), rtol=1e-4)
    np.save(tmp_path / "table.npy", table)
    assert main(["embed", str(run.path), "--data", str(tmp_path / "table.npy"), "-o", str(tmp_path / "f.npz")]) == 0
    assert np.load(tmp_path / "f.npz")["features"].shape == (64, 32)
