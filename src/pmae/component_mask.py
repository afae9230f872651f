"""Masked components as a view of an image, for any method that learns from views: a torchvision transform."""

from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from pmae import masking
from pmae.config import Layout, SpaceConfig
from pmae.data.arrays import from_arrays
from pmae.data.augment import Standardize
from pmae.data.batches import Batches, Standardized, fit_standardize
from pmae.data.images import DTYPES
from pmae.errors import require
from pmae.runs import Run
from pmae.spaces import Space, build_space
from pmae.train.checkpoint import load_space, load_standardize

Share = float | tuple[float, float]


class ComponentMask(v2.Transform):  # type: ignore[misc]
    """Hides a random set of components that holds a share of the data's variance, and gives back the visible image.

    Takes what torchvision's transforms take, one image or a batch of them (a mask each): PIL images, tensors of whole
    numbers, and floats in the units of the data it was fitted on, 0 to 1 where those were whole numbers. Type and dtype
    are kept; whole numbers are rounded and clipped, floats may leave the range. Boxes, masks and labels pass through.

    With `complementary` it gives back two views, (visible, hidden), with visible + hidden = image + mean image.

    Where `masked_variance` is a range, every image draws its own share. Masks follow `torch.manual_seed`, which reaches
    the workers of a DataLoader too; `hide` takes a generator. On single images the two GEMMs of a large space are slow:
    prefer whole batches, on the device that `.to(device)` moved it to.
    """

    _transformed_types = (F.is_pure_tensor, tv_tensors.Image, Image.Image)
    prefix: Literal["closest", "shorter"] = "closest"
    """Of the components in their order that is hidden; that of a run which the mask is from."""

    def __init__(
        self,
        space: Space,
        masked_variance: Share = 0.2,
        complementary: bool = False,
        standardize: Standardize | None = None,
    ) -> None:
        """`standardize` goes from the images' units, whole numbers as 0 to 1, to those the space was fitted in."""
        super().__init__()
        low, high = masked_variance if isinstance(masked_variance, tuple) else (masked_variance, masked_variance)
        rule = "a share between 0 and 1, or two of them, the lower first"
        require(0 < low <= high < 1, "masked_variance", rule, masked_variance)
        self.masked_variance, self.complementary = (low, high), complementary
        self.space, self.standardize = space, standardize or Standardize(torch.zeros(1, 1, 1), torch.ones(1, 1, 1))

    @classmethod
    def fit(
        cls,
        images: np.ndarray | Tensor,
        masked_variance: Share = 0.2,
        space: str | SpaceConfig = "pca",
        complementary: bool = False,
        layout: Layout = "auto",
    ) -> "ComponentMask":
        """Fit the space on an array of images: (N, H, W), (N, H, W, C) or (N, C, H, W), of any dtype."""
        data = from_arrays(images, layout=layout)
        fitted = build_space(SpaceConfig(space) if isinstance(space, str) else space, data.shape)
        batches = Batches(data.images, torch.device("cpu"))
        standardize = fit_standardize(batches, "channel")
        fitted.fit(Standardized(batches, standardize))
        return cls(fitted, masked_variance, complementary, _from_unit_range(standardize, data.images.dtype.name))

    @classmethod
    def from_run(
        cls, run: Path | str, masked_variance: Share | None = None, complementary: bool = False
    ) -> "ComponentMask":
        """The space and the masks of a pretraining run, with its own share of hidden variance if none is given."""
        found = Run(run)
        settings = found.config.masking
        rule = "given for a run that hides patches, as MAE, or nothing, as SimCLR"
        has_share = found.config.method == "pmae" and settings.enabled
        require(has_share or masked_variance is not None, "masked_variance", rule, masked_variance)
        own = settings.ratio_range if settings.ratio_schedule == "uniform" else masking.nominal_ratio(settings)
        share = own if masked_variance is None else masked_variance
        standardize = _from_unit_range(load_standardize(found), found.environment["data"]["dtype"])
        made = cls(load_space(found), share, complementary, standardize)
        made.prefix = settings.prefix
        return made

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        """The visible view of an image or a batch, or both views."""
        image = F.pil_to_tensor(inpt) if isinstance(inpt, Image.Image) else inpt.as_subclass(Tensor)
        known = str(image.dtype).removeprefix("torch.")
        require(known in DTYPES, "images", f"of a dtype among {', '.join(DTYPES)}", known)
        views = tuple(_like(view, image.dtype, inpt) for view in self.hide(image))
        return views if self.complementary else views[0]

    @torch.no_grad()
    def hide(self, images: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """The visible and the hidden view of images (..., C, H, W), as float32; whole numbers become 0 to 1."""
        shape, space, (low, high) = tuple(images.shape[-3:]), self.space, self.masked_variance
        require(shape == space.shape, "images", f"of the shape that was fitted, {space.shape}", shape)
        x = self.standardize((images.float() / _largest(images.dtype)).reshape(-1, *shape))
        noise = torch.rand(len(x), space.mask_group_count + 1, generator=generator, device=x.device)
        ratio = low + (high - low) * noise[:, -1:]
        masked = space.expand_mask(masking.hide_components(noise[:, :-1], space.mask_group_share, ratio, self.prefix))
        z, visible = space.hide(x, masked)
        hidden = x - visible + space.reconstruct(torch.zeros_like(z[:1]))
        first, second = (self.standardize.invert(view).reshape(images.shape) for view in (visible, hidden))
        return first, second


def _largest(dtype: torch.dtype) -> int:
    return 1 if dtype.is_floating_point else torch.iinfo(dtype).max


def _from_unit_range(standardize: Standardize, dtype: str) -> Standardize:
    """The same statistics for images whose whole numbers have become 0 to 1."""
    largest = _largest(getattr(torch, dtype))
    return Standardize(standardize.mean / largest, standardize.std / largest)


def _like(view: Tensor, dtype: torch.dtype, given: Any) -> Any:
    """The view in the dtype and as the kind of image that was given."""
    if not dtype.is_floating_point:
        view = (view * _largest(dtype)).round().clamp(torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    view = view.to(dtype)
    if isinstance(given, Image.Image):
        # torchvision makes no 16-bit pictures; Pillow does.
        return Image.fromarray(view[0].numpy()) if len(view) == 1 else F.to_pil_image(view, given.mode)
    return tv_tensors.wrap(view, like=given) if isinstance(given, tv_tensors.Image) else view
