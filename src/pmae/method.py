"""The paper on one screen: project, hide, reconstruct, encode, decode, compare.

PMAE and MAE differ in what is hidden and compared. Shapes: B images (C, H, W), K components, N patches of P numbers.
"""

import math
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn

from pmae import masking, objectives
from pmae.config import Config
from pmae.contrastive import Contrastive
from pmae.errors import UserError, require
from pmae.models import Decoder, Encoder, build_encoder, patchify, require_vit, unpatchify
from pmae.spaces import Space, build_space


class Outcome(NamedTuple):
    """The loss, and per image: squared error and energy of the hidden part, and the share of variance it holds."""

    loss: Tensor
    error: Tensor
    energy: Tensor
    masked_share: Tensor


class MaskedAutoencoder(nn.Module):
    """What PMAE and MAE share: an encoder that is kept, a decoder that is not, and a space in which to hide."""

    ratio: Tensor  # the one that a run aims at; a tensor, so that runs which differ in it alone share a compiled step
    precision = torch.float32

    def __init__(self, config: Config, space: Space, encoder: Encoder) -> None:
        super().__init__()
        self.config, self.space, self.encoder = config, space, encoder
        self.decoder = Decoder(config.decoder, encoder, config.encoder.patch_size)
        self.patch, self.patches = self.decoder.patch, math.prod(self.decoder.grid)
        self.register_buffer("ratio", torch.tensor(masking.nominal_ratio(config.masking)), persistent=False)
        self.objective = objectives.build_loss(config.objective)
        self.contrastive = Contrastive(config.objective, encoder) if config.objective.contrastive_weight else None
        if self.contrastive:
            self.decoder.projector = self.contrastive.module  # saved with the decoder, and thrown away with it

    @property
    def mask_group_count(self) -> int:
        """How many things a mask can hide: components, or groups of them, or patches."""
        return self.space.mask_group_count

    def draw(self, batch: int, ratio: float, generator: Generator) -> masking.Draw:
        """The randomness of one batch's masks, on the generator's device: one row an image or one for all."""
        rows, device = batch if self.config.masking.per == "image" else 1, generator.device
        noise = torch.rand(rows, self.mask_group_count, generator=generator, device=device)
        return masking.Draw(noise, torch.full((), ratio, device=device), masking.visible_patches(self.patches, ratio))

    def predict(self, x: Tensor, mask: masking.PatchMask | None = None) -> tuple[Tensor, Tensor]:
        """Patches (B, N, P), or the hidden ones in a mask's order, and the encoder's patch tokens (B, N, width)."""
        with self._autocast(x):
            prefix, tokens = self.encoder(x) if mask is None else self.encoder(x, mask.keep)
            if not self.config.objective.reconstruction_weight:
                count = self.patches if mask is None else mask.drop.shape[1]
                return x.new_zeros(len(x), count, x[0].numel() // self.patches), tokens
            patches = self.decoder(prefix, tokens, None if mask is None else mask.order)
        return patches.float(), tokens

    def compare(
        self, found: objectives.Comparison, energy: Tensor | float, tokens: Tensor, share: Tensor, x: Tensor
    ) -> Outcome:
        """The scaled loss and, in training, the contrastive one between two views of every image."""
        scale = "hidden" if self.space.learns else self.config.objective.scale
        loss = self.config.objective.reconstruction_weight * objectives.scaled(found, scale, self.ratio * energy)
        return Outcome(loss + self.between_views(tokens, x), found.error, found.energy, share)

    def between_views(self, tokens: Tensor, x: Tensor) -> Tensor:
        """In training, the contrastive loss between two views of every image, where there is one; else 0."""
        if not (self.contrastive and self.training):
            return x.new_zeros(())
        with self._autocast(x):
            return self.contrastive(tokens, x)

    def _autocast(self, x: Tensor) -> torch.autocast:
        return torch.autocast(x.device.type, torch.bfloat16, enabled=self.precision == torch.bfloat16)


class PrincipalMAE(MaskedAutoencoder):
    """PMAE: hide components of an image; predict them from the image that the others make."""

    def __init__(self, config: Config, space: Space, encoder: Encoder) -> None:
        super().__init__(config, space, encoder)
        self.on_pixels, self.hide_components = config.objective.target == "pixels", masking.hide_components
        if self.on_pixels and not space.keeps_rest:
            objectives.require_inverse(config.space.name, space.measured().get("preimage_error"))

    def hidden_groups(self, draw: masking.Draw) -> Tensor:
        """Booleans (B, G): which components, or groups of them, a draw hides."""
        if not self.config.masking.enabled:
            return torch.zeros_like(draw.noise, dtype=torch.bool)
        return self.hide_components(draw.noise, self.space.mask_group_share, draw.ratio, self.config.masking.prefix)

    def hide(self, x: Tensor, draw: masking.Draw) -> tuple[Tensor, Tensor, Tensor]:
        """Coefficients (B, K), which of them are hidden (B, K), and the image of the visible ones."""
        hidden = self.space.expand_mask(self.hidden_groups(draw))
        z, visible = self.space.hide(x, hidden)
        return z, hidden, visible

    def forward(self, x: Tensor, draw: masking.Draw) -> Outcome:
        if not self.config.masking.enabled:  # SimCLR: nothing is hidden, so nothing is to be predicted
            nothing = x.new_zeros(len(x))
            return Outcome(self.between_views(self.predict(x)[1], x), nothing, nothing, nothing)
        z, hidden, visible = self.hide(x, draw)
        patches, tokens = self.predict(visible)
        y = unpatchify(patches, self.patch, self.encoder.shape)
        share = (self.space.variance_share * hidden).sum(1).expand(len(x))
        if not self.on_pixels:
            found = objectives.on_components(self.space.project_bf16(y), z, hidden, self.objective)
            return self.compare(found, self.space.variance.sum(), tokens, share, x)
        # Standardized pixels have a variance of 1 each, which coefficients without an inverse do not add up to.
        energy = float(x[0].numel()) if math.isinf(self.space.tolerance) else self.space.variance.sum()
        found = objectives.on_pixels(y, x - visible, self.objective)
        return self.compare(found, energy, tokens, share, x)


class MAE(MaskedAutoencoder):
    """MAE (He et al. 2022): hide patches; the encoder sees the others, the decoder fills the gaps."""

    def __init__(self, config: Config, space: Space, encoder: Encoder) -> None:
        super().__init__(config, space, encoder)
        require_vit(encoder, config.encoder.name)
        if self.contrastive and self.contrastive.predicts_tokens:
            rule = "one without targets for tokens where space.name is 'pixels': MAE drops the tokens of hidden patches"
            raise UserError(f"objective.contrastive must be {rule}, got {config.objective.contrastive!r}")

    @property
    def mask_group_count(self) -> int:
        return self.patches

    def forward(self, x: Tensor, draw: masking.Draw) -> Outcome:
        mask = masking.hide_patches(draw.noise.expand(len(x), -1), draw.visible)
        target = torch.take_along_dim(patchify(x, self.patch), mask.drop[..., None], 1)
        predicted, tokens = self.predict(x, mask)
        found = objectives.on_patches(predicted, target, self.config.objective.normalize_patches, self.objective)
        return self.compare(found, x[0].numel(), tokens, found.size / x[0].numel(), x)


def build_method(
    config: Config, shape: tuple[int, int, int], space: Space | None = None, weights: dict[str, Tensor] | None = None
) -> MaskedAutoencoder:
    """The method that a resolved configuration describes, for images (C, H, W); `weights` are the encoder's."""
    kind = MAE if config.method == "mae" else PrincipalMAE
    space, encoder = space or build_space(config.space, shape), build_encoder(config.encoder, shape)
    if weights:
        encoder.net.load_state_dict(weights)  # before a teacher copies them
    method = kind(config, space, encoder)
    what, rule = "the groups that a mask hides some of", "two or more (components, bands or patches)"
    require(not config.masking.enabled or method.mask_group_count > 1, what, rule, method.mask_group_count)
    return method
