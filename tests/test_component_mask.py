"""The component mask as a transform: it hides its share, loses nothing, and keeps types, dtypes and its promises."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2

import pmae
from pmae.component_mask import ComponentMask
from pmae.config import Config, SpaceConfig, replace
from pmae.data.images import Splits
from pmae.derive import resolve
from pmae.errors import UserError
from pmae.masking import hide_components
from pmae.spaces import PCA
from pmae.train.checkpoint import load_space
from pmae.train.loop import pretrain

SHAPE = (3, 8, 12)


def photos(count: int = 200, dtype: type = np.uint8, shape: tuple[int, int, int] = SHAPE) -> np.ndarray:
    """Smooth random images far from the ends of the dtype's range, channels first."""
    rng = np.random.default_rng(0)
    coarse = np.kron(rng.normal(size=(count, shape[0], shape[1] // 4, shape[2] // 4)), np.ones((1, 1, 4, 4)))
    unit = 0.5 + 0.06 * coarse + 0.02 * rng.normal(size=(count, *shape))
    return unit.astype(dtype) if np.issubdtype(dtype, np.floating) else (unit * np.iinfo(dtype).max).astype(dtype)


@pytest.fixture(scope="module")
def mask() -> ComponentMask:
    return ComponentMask.fit(photos(), masked_variance=0.3)


def shares(mask: ComponentMask, visible: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """(B,) share of the variance of the components in which a visible image differs from the image."""
    z, seen = (mask.space.project(mask.standardize(part)) for part in (x, visible))
    return (mask.space.variance_share * ((z - seen).abs() > 1e-3)).sum(1)


@pytest.mark.parametrize("ratio", [0.1, 0.5, (0.2, 0.6)])
def test_hides_the_share_of_variance_within_its_largest_component(
    mask: ComponentMask, ratio: float | tuple[float, float]
) -> None:
    x = torch.from_numpy(photos(dtype=np.float32))
    masked = ComponentMask(mask.space, ratio, standardize=mask.standardize)
    found = shares(mask, masked(x), x)
    low, high = ratio if isinstance(ratio, tuple) else (ratio, ratio)
    largest = float(mask.space.variance_share.max())
    assert bool((found >= low - largest).all())
    assert bool((found <= high + largest).all())
    if isinstance(ratio, tuple):
        assert float(found.max() - found.min()) > 0.3
    else:
        assert float(found.mean()) == pytest.approx(ratio, abs=0.02)


@pytest.mark.parametrize("space", ["pca", "ica", "learned", "cosine", "wavelet", "pixels", "kernel_pca"])
def test_visible_and_hidden_make_the_image_in_every_space(space: str) -> None:
    mask = ComponentMask.fit(photos(), 0.3, space=space, complementary=True)
    x = torch.from_numpy(photos(7, np.float32))
    visible, hidden = mask(x)
    mean = mask.standardize.invert(mask.space.reconstruct(torch.zeros(1, len(mask.space.variance)))).detach()
    torch.testing.assert_close(visible + hidden, x + mean, atol=1e-4, rtol=0)
    assert float((visible - x).abs().max()) > 0.01
    assert float((hidden - mean).abs().max()) > 0.01


def test_whole_numbers_are_rounded_and_clipped(mask: ComponentMask) -> None:
    x = torch.from_numpy(photos(9))
    torch.manual_seed(1)
    whole = mask(x)
    torch.manual_seed(1)
    real = mask(x.float() / 255)
    assert whole.dtype == torch.uint8
    torch.testing.assert_close(whole.float(), (real * 255).round().clamp(0, 255))
    harsh = torch.randint(0, 2, (50, *SHAPE), generator=torch.Generator().manual_seed(0), dtype=torch.uint8) * 255
    assert float(mask(harsh / 255).min()) < 0
    assert int(mask(harsh).min()) == 0
    assert int(mask(harsh).max()) == 255


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int16, np.float16, np.float32, np.float64])
def test_every_dtype_is_kept_and_fitted_in_its_own_units(dtype: type) -> None:
    images = photos(60, dtype, (2, 8, 8))
    mask = ComponentMask.fit(images, 0.4, complementary=True, layout="NCHW")
    x = torch.from_numpy(images)
    visible, hidden = mask(x)
    assert visible.dtype == hidden.dtype == x.dtype
    top = 1.0 if x.dtype.is_floating_point else float(torch.iinfo(x.dtype).max)
    mean = x.float().mean(0)
    rounding = 2e-3 if dtype == np.float16 else 1.01 / top + 1e-5
    sums = (visible.float() + hidden.float() - x.float() - mean).abs().max() / top
    assert float(sums) <= rounding
    assert float((visible.float() - x.float()).abs().max()) > 0.01 * top


@pytest.mark.parametrize(("mode", "channels"), [("L", 1), ("RGB", 3), ("RGBA", 4), ("I;16", 1)])
def test_pil_images_stay_what_they_are(mode: str, channels: int) -> None:
    images = photos(40, np.uint16 if mode == "I;16" else np.uint8, (channels, 8, 12))
    picture = Image.fromarray(images[0, 0] if channels == 1 else images[0].transpose(1, 2, 0))
    assert picture.mode == mode
    mask = ComponentMask.fit(images, 0.3, layout="NCHW")
    torch.manual_seed(0)
    view = mask(picture)
    torch.manual_seed(0)
    expected = mask(torch.from_numpy(images[0])).numpy()
    assert (view.mode, view.size) == (mode, (12, 8))
    np.testing.assert_array_equal(np.asarray(view), expected[0] if channels == 1 else expected.transpose(1, 2, 0))


def test_a_sample_keeps_its_labels_boxes_and_masks(mask: ComponentMask) -> None:
    picture = tv_tensors.Image(torch.from_numpy(photos(1)[0]))
    boxes = tv_tensors.BoundingBoxes([[0, 0, 2, 2]], format="XYXY", canvas_size=(8, 12))  # type: ignore[call-overload]
    area = tv_tensors.Mask(torch.ones(8, 12, dtype=torch.bool))
    view, same_boxes, same_area, label, extra = mask((picture, boxes, area, 3, torch.arange(4)))
    assert isinstance(view, tv_tensors.Image)
    assert not torch.equal(view, picture)
    assert torch.equal(same_boxes, boxes)
    assert torch.equal(same_area, area)
    assert label == 3
    assert torch.equal(extra, torch.arange(4))


def test_composes_with_torchvision_and_gives_two_views(mask: ComponentMask) -> None:
    both = ComponentMask(mask.space, 0.3, complementary=True, standardize=mask.standardize)
    chain = v2.Compose([v2.ToImage(), both, v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.2] * 3)])
    views, label = chain((Image.fromarray(photos(1)[0].transpose(1, 2, 0)), 1))
    assert label == 1
    assert [tuple(view.shape) for view in views] == [SHAPE, SHAPE]
    assert not torch.equal(*views)


def test_repeats_with_a_seed_or_a_generator_and_masks_each_image_anew(mask: ComponentMask) -> None:
    x = torch.from_numpy(photos(1)).expand(5, -1, -1, -1)
    torch.manual_seed(3)
    first = mask(x)
    torch.manual_seed(3)
    assert torch.equal(mask(x), first)
    assert not torch.equal(mask(x), first)
    assert not torch.equal(first[0], first[1])
    drawn = [mask.hide(x, torch.Generator().manual_seed(5))[0] for _ in range(2)]
    assert torch.equal(*drawn)


class Masked(Dataset[torch.Tensor]):
    """The same image four times, each time through the transform."""

    def __init__(self, mask: ComponentMask) -> None:
        self.mask, self.image = mask, torch.from_numpy(photos(1)[0])

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        view: torch.Tensor = self.mask(self.image)
        return view


def test_workers_get_it_pickled_and_draw_masks_of_their_own(mask: ComponentMask) -> None:
    copy = pickle.loads(pickle.dumps(mask))
    x = torch.from_numpy(photos(3))
    torch.manual_seed(0)
    first = mask(x)
    torch.manual_seed(0)
    assert torch.equal(copy(x), first)
    loader = DataLoader(Masked(mask), batch_size=1, num_workers=2, multiprocessing_context="fork")
    views = torch.cat(list(loader))
    assert len(torch.unique(views.flatten(1), dim=0)) == 4


@pytest.mark.parametrize(("space", "ratio"), [("pca", "fixed"), ("learned", "uniform")])
def test_a_run_gives_its_space_and_its_share(tiny: Config, toy: Splits, tmp_path: Path, space: str, ratio: str) -> None:
    config = replace(tiny, space__name=space, masking__ratio_schedule=ratio, train__epochs=1)
    run = pretrain(resolve(config, len(toy.train), toy.train.shape)[0], toy, tmp_path / "run", quiet=True)
    mask = pmae.ComponentMask.from_run(run.path)
    assert mask.masked_variance == ((0.2, 0.2) if ratio == "fixed" else (0.1, 0.9))
    x = torch.from_numpy(toy.train.images)
    # Training images come out standardized, in the units of the run.
    standardized = mask.standardize(x.float() / 255)
    torch.testing.assert_close(standardized.mean((0, 2, 3)), torch.zeros(3), atol=1e-4, rtol=0)
    with torch.no_grad():
        z = load_space(run).project(standardized)
        torch.testing.assert_close(mask.space.project(standardized), z)
    assert ComponentMask.from_run(run.path, 0.5).masked_variance == (0.5, 0.5)


def test_masks_of_a_run_are_its_own(tiny: Config, toy: Splits, tmp_path: Path) -> None:
    config, _ = resolve(replace(tiny, masking__prefix="shorter", train__epochs=1), len(toy.train), toy.train.shape)
    run = pretrain(config, toy, tmp_path / "released", quiet=True)
    mask, x = ComponentMask.from_run(run.path), torch.from_numpy(toy.train.images[:64]).float() / 255
    noise = torch.rand(64, mask.space.mask_group_count + 1, generator=torch.Generator().manual_seed(0))
    hidden = hide_components(noise[:, :-1], mask.space.variance_share, 0.2, "shorter")
    visible = mask.standardize.invert(mask.space.hide(mask.standardize(x), hidden)[1])
    torch.testing.assert_close(mask.hide(x, torch.Generator().manual_seed(0))[0], visible)


SIMCLR = {"masking__enabled": False, "objective__reconstruction_weight": 0.0, "objective__contrastive_weight": 1.0}


@pytest.mark.parametrize("changes", [{"space__name": "pixels"}, SIMCLR], ids=["mae", "simclr"])
def test_a_run_without_a_share_of_variance_gives_none(
    tiny: Config, toy: Splits, tmp_path: Path, changes: dict[str, object]
) -> None:
    config, _ = resolve(replace(tiny, train__epochs=1, **changes), len(toy.train), toy.train.shape)
    run = pretrain(config, toy, tmp_path / "run", quiet=True)
    with pytest.raises(UserError, match="masked_variance must be given for a run that hides patches, as MAE, or"):
        ComponentMask.from_run(run.path)
    assert ComponentMask.from_run(run.path, 0.3).masked_variance == (0.3, 0.3)


def test_mistakes_are_named(mask: ComponentMask) -> None:
    with pytest.raises(UserError, match=r"masked_variance must be a share between 0 and 1, .* got \(0\.5, 0\.2\)"):
        ComponentMask(PCA(SHAPE), (0.5, 0.2))
    with pytest.raises(UserError, match=r"images must be of the shape that was fitted, \(3, 8, 12\), got \(3, 8, 8\)"):
        mask(torch.zeros(3, 8, 8))
    with pytest.raises(UserError, match="images must be of a dtype among uint8"):
        mask(torch.zeros(SHAPE, dtype=torch.int64))
    with pytest.raises(UserError, match=r"space\.name: unknown name 'pac'"):
        ComponentMask.fit(photos(), space="pac")
    settings = SpaceConfig("ica", components=5)
    assert ComponentMask.fit(photos(), space=settings).space.config == settings
