"""Signals without labels: how much of the hidden variance is predicted on some images, in total and by band."""

from itertools import pairwise

import torch
from safetensors.torch import save_file

from pmae import masking
from pmae.data.augment import Standardize
from pmae.data.batches import Batches
from pmae.method import PMAE, Draw, MaskedAutoencoder, draw_mask
from pmae.runs import Run, write_whole

BANDS = (0.0, 0.5, 0.8, 0.95, 1.0)
MOST_IMAGES = 2048


@torch.no_grad()
def hidden_r2(
    model: MaskedAutoencoder, standardize: Standardize, batches: Batches, seed: int, name: str = "held_out_r2"
) -> dict[str, float]:
    """R2 on up to 2,048 plain images under masks that depend on the seed alone: in total, as `name`, and one per band.

    A band is named by the cumulated variance it spans: `r2_band_50_80` holds the components, or what is hidden as one,
    between 50% and 80%, the largest first.
    """
    device = standardize.mean.device
    generator = torch.Generator(device).manual_seed(seed)
    ratio = masking.nominal_ratio(model.config.masking)
    count = min(len(batches), MOST_IMAGES)
    error, energy = torch.zeros((), device=device), torch.zeros((), device=device)
    by_component = torch.zeros(2, model.units, device=device)
    for start in range(0, count, 256):
        x = standardize(batches.take(torch.arange(start, min(start + 256, count), device=device)))
        draw = draw_mask(model, len(x), ratio, generator)
        outcome = model(x, draw)
        error, energy = error + outcome.error.sum(), energy + outcome.energy.sum()
        if isinstance(model, PMAE):
            by_component += torch.stack(model.component_errors(x, draw))
    values = {name: float(1 - error / energy)}
    return values | (_bands(model.space.share_before, *by_component) if isinstance(model, PMAE) else {})


def _bands(before: torch.Tensor, error: torch.Tensor, energy: torch.Tensor) -> dict[str, float]:
    """R2 within each band of the spectrum; a band of which nothing was hidden is left out."""
    values = {}
    for low, high in pairwise(BANDS):
        inside = (before >= low) & (before < high)
        if float(energy[inside].sum()) > 0:
            values[f"r2_band_{low * 100:.0f}_{high * 100:.0f}"] = float(1 - error[inside].sum() / energy[inside].sum())
    return values


# A few pictures and the spectrum, kept in the run folder so that figures need neither the data nor the model.

PICTURES = 8
THIRDS = {"top": (0.0, 0.8), "middle": (0.8, 0.95), "bottom": (0.95, 1.01)}


@torch.no_grad()
def save_samples(run: Run, model: MaskedAutoencoder, standardize: Standardize, batches: Batches, seed: int) -> None:
    """Write samples.safetensors: original, visible, prediction and target; the parts of the spectrum; the variances
    of what is hidden as one, largest first, and what the masks of the pictures hide of it.

    Images are in the data's units, except target, prediction and all but the top of the spectrum, which are
    differences and centred at 0 in standardized units.
    """
    device = standardize.mean.device
    chosen = torch.linspace(0, len(batches) - 1, min(PICTURES, len(batches)), device=device).long()
    original = batches.take(chosen)
    x = standardize(original)
    ratio = masking.nominal_ratio(model.config.masking)
    draw = draw_mask(model, len(x), ratio, torch.Generator(device).manual_seed(seed))
    pictures = model.pictures(x, draw)
    tensors = {"original": original.float(), "visible": standardize.invert(pictures.visible)}
    tensors |= {"prediction": pictures.prediction, "target": pictures.target}
    if isinstance(model, PMAE):
        tensors |= {**_spectrum(model, draw, len(x)), **_parts_of_spectrum(model, x)}
    path = run.path / "samples.safetensors"
    write_whole(path, lambda temporary: save_file({k: v.contiguous().cpu() for k, v in tensors.items()}, temporary))


def _spectrum(model: PMAE, draw: Draw, count: int) -> dict[str, torch.Tensor]:
    """The variance of what is hidden as one, largest first, and in the same order what each mask hides (B, units)."""
    variance, hidden = model.space.sum_by_mask_group(model.space.variance), model.hidden_units(draw)
    order = variance.argsort(descending=True, stable=True)
    return {"variance": variance[order], "hidden": hidden[:, order].expand(count, -1)}


def _parts_of_spectrum(model: PMAE, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The images that the components between two shares of cumulated variance make on their own."""
    z, before = model.space.project(x), model.space.share_before
    nothing = model.space.reconstruct(torch.zeros_like(z))
    parts = {}
    for name, (low, high) in THIRDS.items():
        inside = (before >= low) & (before < high)
        parts[name] = model.space.reconstruct(z * model.space.expand_mask(inside[None])) - nothing
    return parts
