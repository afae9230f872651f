"""A few pictures and the spectrum, kept in the run folder so that figures need neither the data nor the model."""

import torch
from safetensors.torch import save_file

from pmae import masking
from pmae.data.augment import Standardize
from pmae.data.batches import Batches
from pmae.method import PMAE, Draw, MaskedAutoencoder, draw_mask
from pmae.runs import Run, write_whole

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
    variance, hidden = model.space.by_unit(model.space.variance), model.hidden_units(draw)
    order = variance.argsort(descending=True, stable=True)
    return {"variance": variance[order], "hidden": hidden[:, order].expand(count, -1)}


def _parts_of_spectrum(model: PMAE, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The images that the components between two shares of cumulated variance make on their own."""
    z, before = model.space.project(x), model.space.before
    nothing = model.space.reconstruct(torch.zeros_like(z))
    parts = {}
    for name, (low, high) in THIRDS.items():
        inside = (before >= low) & (before < high)
        parts[name] = model.space.reconstruct(z * model.space.spread(inside[None])) - nothing
    return parts
