"""Looks at a model while and after it trains, without labels: R2 of what is hidden, by bands, and pictures."""

from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pmae import masking
from pmae.data.augment import Standardize
from pmae.data.batches import Batches
from pmae.errors import UserError
from pmae.files import read_tensors, write_tensors
from pmae.masking import Draw
from pmae.method import MaskedAutoencoder, PrincipalMAE
from pmae.models import Encoder, patchify, unpatchify
from pmae.models.maps import attention_maps, colours, token_maps
from pmae.runs import PARTS, Run
from pmae.train.checkpoint import what_is_saved
from pmae.train.distributed import is_main
from pmae.train.step import Inputs

OnlineProbe = Callable[[Encoder, Standardize, torch.device], dict[str, float]]
"""Scores an encoder while it trains; its labels are used for this alone."""
BANDS = (0.0, 0.5, 0.8, 0.95, 1.0)
MOST_IMAGES = 2048
PICTURES = 8
FRAME, FRAMES = 4, 8
"""Images of which predictions are kept over the epochs, and of how many epochs at most."""


class Visualization(NamedTuple):
    """The input that the encoder saw, the prediction and the target, as images."""

    visible: Tensor
    prediction: Tensor
    target: Tensor


def visualize(model: MaskedAutoencoder, x: Tensor, draw: Draw) -> Visualization:
    """What a model sees, predicts and is to predict of a batch under a mask, as standardized images."""
    if not isinstance(model, PrincipalMAE):
        return _visualize_patches(model, x, draw)
    z, hidden, visible = model.hide(x, draw)
    y = unpatchify(model.predict(visible)[0], model.patch, model.encoder.shape)

    def image_of(z: Tensor) -> Tensor:  # what the hidden coefficients add to the image of the others
        return model.space.reconstruct(z) - model.space.reconstruct(z.masked_fill(hidden, 0.0))

    return Visualization(visible, y if model.on_pixels else image_of(model.space.project(y)), image_of(z))


def _visualize_patches(model: MaskedAutoencoder, x: Tensor, draw: Draw) -> Visualization:
    """The image without its hidden patches, and the predicted patches in their gaps, in the image's own units."""
    mask = masking.hide_patches(draw.noise.expand(len(x), -1), draw.visible)
    patches, hidden = patchify(x, model.patch), mask.hidden[..., None]
    at = mask.drop[..., None].expand(-1, -1, patches.shape[2])
    y = torch.zeros_like(patches).scatter(1, at, model.predict(x, mask)[0])
    if model.config.objective.normalize_patches:
        y = y * (patches.var(2, keepdim=True) + 1e-6).sqrt() + patches.mean(2, keepdim=True)
    shown = (patches * ~hidden, y * hidden, patches * hidden)
    return Visualization(*(unpatchify(p, model.patch, model.encoder.shape) for p in shown))


def hidden_parts(model: MaskedAutoencoder, draw: Draw) -> Tensor:
    """Booleans (B, K) of components or (B, N) of patches: what a draw hides."""
    if isinstance(model, PrincipalMAE):
        return model.space.expand_mask(model.hidden_groups(draw))
    return masking.hide_patches(draw.noise, draw.visible).hidden


def not_finite(
    run: Run, model: MaskedAutoencoder, standardize: Standardize, step: int, epoch: int, index: Tensor, inputs: Inputs
) -> UserError:
    """What is wrong with the first step whose loss was not finite: its images and mask are saved for inspection."""
    finite = standardize(inputs.images).flatten(1).isfinite().all(1)
    path, hidden = run.path / f"failure_step_{step:08d}.safetensors", hidden_parts(model, inputs.draw)
    tensors = {"images": inputs.images, "index": index, "hidden": hidden, "finite_images": finite}
    if is_main():
        write_tensors(path, {name: value.cpu() for name, value in tensors.items()})
    cause = f"{int((~finite).sum())} of its images are not finite" if not finite.all() else "its images are finite"
    told = f"loss must be finite, got NaN or infinity at step {step} (epoch {epoch}); {cause}"
    saved = f"batch and mask are in {str(path)!r}; {what_is_saved(run)}"
    return UserError(f"{told}; {saved}; a lower optim.base_lr or an optim.clip_norm may help")


def component_errors(model: PrincipalMAE, x: Tensor, draw: Draw) -> tuple[Tensor, Tensor]:
    """(G,) squared error and energy of each mask group, summed over the images in which it was hidden."""
    z, hidden, visible = model.hide(x, draw)
    y = unpatchify(model.predict(visible)[0], model.patch, model.encoder.shape)
    predicted = model.space.project(y + visible if model.on_pixels else y)
    error, energy = ((predicted - z).square() * hidden).sum(0), (z.square() * hidden).sum(0)
    return model.space.sum_by_mask_group(error), model.space.sum_by_mask_group(energy)


@torch.no_grad()
def hidden_r2(
    model: MaskedAutoencoder, standardize: Standardize, batches: Batches, seed: int, name: str = "held_out_r2"
) -> dict[str, float]:
    """R2 on up to 2,048 plain images under masks that depend on the seed alone: in total, as `name`, and one per band.

    A band is named by the cumulated variance it spans: `r2_band_50_80` holds the mask groups between 50% and 80%, the
    largest first; the last has also those without variance in the training images, where these are fewer than the
    components. A band of which nothing was hidden is left out.
    """
    device = standardize.mean.device
    generator = torch.Generator(device).manual_seed(seed)
    ratio, count = masking.nominal_ratio(model.config.masking), min(len(batches), MOST_IMAGES)
    total, by_group = torch.zeros(2, device=device), torch.zeros(2, model.mask_group_count, device=device)
    for start in range(0, count, 256):
        x = standardize(batches.take(torch.arange(start, min(start + 256, count), device=device)))
        draw = model.draw(len(x), ratio, generator)
        outcome = model(x, draw)
        total += torch.stack([outcome.error.sum(), outcome.energy.sum()])
        if isinstance(model, PrincipalMAE):
            by_group += torch.stack(component_errors(model, x, draw))
    values = {name: float(1 - total[0] / total[1])}
    if isinstance(model, PrincipalMAE):
        for low, high in pairwise(BANDS):
            error, energy = by_group[:, model.space.band(low, high)].sum(1)
            if float(energy) > 0:
                values[f"r2_band_{low * 100:.0f}_{high * 100:.0f}"] = float(1 - error / energy)
    return values


@torch.no_grad()
def save_samples(
    run: Run, model: MaskedAutoencoder, standardize: Standardize, batches: Batches, seed: int, epoch: int
) -> None:
    """Write samples.safetensors, so that figures need neither the data nor the model.

    It holds original, visible, prediction and target of a few images; the parts of the spectrum; the variances of the
    mask groups, largest first, and which of them the masks hide; maps of the patch tokens. Images are in the data's
    units, except target, prediction and all but the top of the spectrum, which are differences and centred at 0 in
    standardized units. What was predicted at some earlier epochs stays, as `epoch_10`. Where nothing is hidden, what is
    about masks is left out.
    """
    path = run.path / "samples.safetensors"
    device = standardize.mean.device
    chosen = torch.linspace(0, len(batches) - 1, min(PICTURES, len(batches)), device=device).long()
    original = batches.take(chosen)
    x = standardize(original)
    draw = model.draw(len(x), masking.nominal_ratio(model.config.masking), torch.Generator(device).manual_seed(seed))
    tensors = {"original": original.float()}
    if model.config.masking.enabled:
        shown = visualize(model, x, draw)
        tensors |= {"visible": standardize.invert(shown.visible)}
        tensors |= {"prediction": shown.prediction, "target": shown.target}
        tensors |= earlier_predictions(path, epoch) | {f"epoch_{epoch}": shown.prediction[:FRAME].clone()}
    if isinstance(model, PrincipalMAE):
        tensors |= _spectrum(model, x, draw)
    tensors |= _tokens(model.encoder, x)
    write_tensors(path, {name: value.cpu() for name, value in tensors.items()})


def earlier_predictions(path: Path, epoch: int) -> dict[str, Tensor]:
    """Those of epochs before this one; where there are many, every other goes, the first stays."""
    kept: dict[int, Tensor] = {}
    with suppress(UserError):  # a damaged file is written anew
        found = read_tensors(path, "epoch_") if path.exists() else {}
        kept = {int(name): value for name, value in found.items() if name.isdecimal() and int(name) < epoch}
    order = sorted(kept)
    return {f"epoch_{number}": kept[number] for number in (order if len(order) < FRAMES else order[::2])}


def _tokens(encoder: Encoder, x: Tensor) -> dict[str, Tensor]:
    """Patch tokens as colours (B, rows, columns, 3), and the attention of [CLS], of encoders that have them."""
    if x.shape[2] == 1:  # signals are drawn as lines
        return {}
    with suppress(UserError):
        attention = attention_maps(encoder, x)
        looked = {} if attention is None else {"attention": attention.float().mean(1)}
        return {"token_colours": colours(token_maps(encoder, x)), **looked}
    return {}


def picture_of(run: Run) -> np.ndarray:
    """The samples of a run as one picture (H, W, 3) of bytes: original, visible, prediction and target, a row each."""
    rows = []
    for name in ("original", "visible", "prediction", "target"):
        images = read_tensors(run.path / "samples.safetensors")[name]
        low, high = images.min(), images.max()
        # Three channels of any number, the first alone of fewer.
        images = images[:, :3] if images.shape[1] >= 3 else images[:, :1].expand(-1, 3, -1, -1)
        rows.append(torch.cat(list((images - low) / (high - low).clamp(min=1e-9)), dim=2))
    return (torch.cat(rows, dim=1) * 255).byte().permute(1, 2, 0).numpy()


def _spectrum(model: PrincipalMAE, x: Tensor, draw: Draw) -> dict[str, Tensor]:
    """The variance of the mask groups, what each mask hides (B, G), and the images that parts of the spectrum make."""
    space, z = model.space, model.space.project(x)
    variance, hidden = space.sum_by_mask_group(space.variance), model.hidden_groups(draw)
    order = variance.argsort(descending=True, stable=True)
    found = {"variance": variance[order]}
    if model.config.masking.enabled:
        found["hidden"] = hidden[:, order].expand(len(x), -1)
    nothing = space.reconstruct(torch.zeros_like(z))
    for name, (low, high) in PARTS.items():
        found[name] = space.reconstruct(z * space.expand_mask(space.band(low, high)[None])) - nothing
    return found
