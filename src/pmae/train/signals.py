"""Signals without labels: how much of the hidden variance is predicted on some images, in total and by band."""

from itertools import pairwise

import torch

from pmae import masking
from pmae.data.augment import Standardize
from pmae.data.batches import Batches
from pmae.method import PMAE, MaskedAutoencoder, draw_mask

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
    return values | (_bands(model.space.before, *by_component) if isinstance(model, PMAE) else {})


def _bands(before: torch.Tensor, error: torch.Tensor, energy: torch.Tensor) -> dict[str, float]:
    """R2 within each band of the spectrum; a band of which nothing was hidden is left out."""
    values = {}
    for low, high in pairwise(BANDS):
        inside = (before >= low) & (before < high)
        if float(energy[inside].sum()) > 0:
            values[f"r2_band_{low * 100:.0f}_{high * 100:.0f}"] = float(1 - error[inside].sum() / energy[inside].sum())
    return values
