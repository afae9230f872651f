"""The paper on one screen: project, hide, reconstruct, encode, decode, compare.

Both methods share encoder, decoder and the meaning of a ratio; they differ in what is hidden and what is compared.
Shapes: B images (C, H, W), K components, N patches of P numbers.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pmae import masking, objectives
from pmae.config import Config
from pmae.errors import UserError
from pmae.models import Decoder, Encoder, Projector, build_encoder, patchify, unpatchify
from pmae.spaces import Space, build_space


class Draw(NamedTuple):
    """The randomness of a mask: noise (B or 1, K or N), and the ratio, also as the number of visible patches."""

    noise: Tensor
    ratio: Tensor
    visible: int


class Outcome(NamedTuple):
    """The loss, and per image: squared error and energy of the hidden part, and the share that was hidden."""

    loss: Tensor
    error: Tensor
    energy: Tensor
    share: Tensor


class Pictures(NamedTuple):
    """What a person wants to see: the input that the encoder saw, the prediction and the target, as images."""

    visible: Tensor
    prediction: Tensor
    target: Tensor


def alone(features: Tensor) -> Tensor:
    """One process has the features of the whole batch."""
    return features


class MaskedAutoencoder(nn.Module, ABC):
    """What MAE and PMAE share: an encoder that is kept, a decoder that is not, and a space in which to hide."""

    ratio: Tensor
    """The ratio that a run aims at."""

    def __init__(self, config: Config, space: Space, encoder: Encoder) -> None:
        super().__init__()
        patch = config.encoder.patch_size
        if patch is None:
            raise UserError("encoder.patch_size must be set or derived from the data before a model is built")
        self.config, self.patch, self.precision = config, patch, torch.float32
        self.space, self.encoder, self.decoder = space, encoder, Decoder(config.decoder, encoder, patch)
        self.patches = self.decoder.grid[0] * self.decoder.grid[1]
        # A tensor and no number, so that runs which differ in their ratio alone share a compiled step.
        self.register_buffer("ratio", torch.tensor(masking.nominal_ratio(config.masking)), persistent=False)
        self.views = 2 if config.objective.contrastive_weight else 1
        self.gather: Callable[[Tensor], Tensor] = alone
        if self.views == 2:
            self.decoder.projector = Projector(encoder.width)  # saved with the decoder, and thrown away with it

    @property
    @abstractmethod
    def units(self) -> int:
        """How many things can be hidden: components or patches."""

    @abstractmethod
    def hidden(self, draw: Draw) -> Tensor:
        """Booleans (B, K) or (B, N): what a draw hides."""

    @abstractmethod
    def forward(self, x: Tensor, draw: Draw) -> Outcome:
        """Hide, predict and compare a batch of standardized images."""

    @abstractmethod
    def pictures(self, x: Tensor, draw: Draw) -> Pictures:
        """The same as `forward`, for the eye."""

    def predict(self, x: Tensor, mask: masking.PatchMask | None = None) -> tuple[Tensor, Tensor]:
        """Every patch (B, N, P) from the images, or the hidden ones from those a mask leaves, and the mean token.

        Hidden patches come in the mask's order; the token is (B, width). The networks run in `precision`.
        """
        with self._arithmetic(x):
            tokens = self.encoder(x) if mask is None else self.encoder(x, mask.keep)
            patches = self.decoder(*tokens, None if mask is None else mask.order)
        return patches.float(), tokens[1].mean(1)

    def loss(self, comparison: objectives.Comparison, energy: Tensor | float) -> Tensor:
        """The error over the ratio's share of the total energy, or as the objective's scale says."""
        return objectives.scaled(comparison, self.config.objective.scale, self.ratio * energy)

    def contrast(self, features: Tensor) -> Tensor | float:
        """The second task, if there is one: in training the second half of a batch shows the first half's images."""
        if self.views == 1 or not self.training:
            return 0.0
        features, objective = self.gather(features), self.config.objective
        with self._arithmetic(features):
            points = self.decoder.projector(features)  # type: ignore[operator]
        return (objective.contrastive_weight or 0.0) * objectives.contrast(points, objective.temperature)

    def _arithmetic(self, x: Tensor) -> torch.autocast:
        return torch.autocast(x.device.type, torch.bfloat16, enabled=self.precision == torch.bfloat16)


class PMAE(MaskedAutoencoder):
    """Hide components; predict them from the image that the others make."""

    def __init__(self, config: Config, space: Space, encoder: Encoder) -> None:
        super().__init__(config, space, encoder)
        self.on_pixels = config.objective.target == "pixels"
        missed = space.measured().get("preimage_error")
        if self.on_pixels and missed is not None and not space.keeps_rest:
            raise UserError(
                "objective.target 'pixels' must have a space with an exact inverse, or space.keep_rest; space.name "
                f"{config.space.name!r} has none, its pre-images have a relative error of {missed:.4f}; "
                "choices without the rest: components"
            )

    @property
    def units(self) -> int:
        return self.space.mask_group_count

    def hidden_units(self, draw: Draw) -> Tensor:
        """Booleans (B, units): which components, or groups of them, a draw hides."""
        prefix = self.config.masking.prefix
        return masking.hide_components(draw.noise, self.space.mask_group_share, draw.ratio, prefix)

    def hidden(self, draw: Draw) -> Tensor:
        return self.space.expand_mask(self.hidden_units(draw))

    def hide(self, x: Tensor, draw: Draw) -> tuple[Tensor, Tensor, Tensor]:
        """Coefficients (B, K), which of them are hidden (B, K), and the image of the visible ones."""
        z, hidden = self.space.project(x), self.hidden(draw)
        visible = self.space.reconstruct_bf16(z.masked_fill(hidden, 0.0))
        return z, hidden, visible + x - self.space.reconstruct(z) if self.space.keeps_rest else visible

    def forward(self, x: Tensor, draw: Draw) -> Outcome:
        z, hidden, visible = self.hide(x, draw)
        predicted, features = self.predict(visible)
        y = unpatchify(predicted, self.patch, self.encoder.shape)
        if self.on_pixels:
            comparison = objectives.on_pixels(y, x - visible)
        else:
            comparison = objectives.on_components(self.space.project_bf16(y), z, hidden)
        share = (self.space.variance_share * hidden).sum(1).expand(len(x))
        learns = self.space.learns
        loss = objectives.unexplained(comparison) if learns else self.loss(comparison, self._energy(x))
        return Outcome(loss + self.contrast(features), comparison.error, comparison.energy, share)

    def component_errors(self, x: Tensor, draw: Draw) -> tuple[Tensor, Tensor]:
        """(units,) squared error and energy of each thing that is hidden, summed over the images in which it was."""
        z, hidden, visible = self.hide(x, draw)
        y = unpatchify(self.predict(visible)[0], self.patch, self.encoder.shape)
        predicted = self.space.project(y + visible if self.on_pixels else y)
        error, energy = ((predicted - z).square() * hidden).sum(0), (z.square() * hidden).sum(0)
        return self.space.sum_by_mask_group(error), self.space.sum_by_mask_group(energy)

    def pictures(self, x: Tensor, draw: Draw) -> Pictures:
        """The hidden part of the prediction beside the hidden part of the image."""
        z, hidden, visible = self.hide(x, draw)
        y = unpatchify(self.predict(visible)[0], self.patch, self.encoder.shape)
        if not self.on_pixels:
            y = self._image_of(hidden, self.space.project(y))
        return Pictures(visible, y, self._image_of(hidden, z))

    def _energy(self, x: Tensor) -> Tensor | float:
        """Of a whole image in the units of the comparison; standardized pixels have a variance of 1 each."""
        differ = self.on_pixels and math.isinf(self.space.tolerance)
        return float(x[0].numel()) if differ else self.space.variance.sum()

    def _image_of(self, hidden: Tensor, z: Tensor) -> Tensor:
        """What the hidden coefficients add to the image of the others."""
        return self.space.reconstruct(z) - self.space.reconstruct(z.masked_fill(hidden, 0.0))


class MAE(MaskedAutoencoder):
    """Hide patches; the encoder sees the others, the decoder fills the gaps."""

    def __init__(self, config: Config, space: Space, encoder: Encoder) -> None:
        super().__init__(config, space, encoder)
        if not encoder.is_vit:
            raise UserError(
                "space.name 'pixels' (MAE) must have a ViT encoder, because the encoder sees only the visible patches; "
                f"encoder.name is {config.encoder.name!r}; use a vit_* name, or space.name 'pca', which drops none"
            )

    @property
    def units(self) -> int:
        return self.patches

    def hidden(self, draw: Draw) -> Tensor:
        return masking.hide_patches(draw.noise, draw.visible).hidden

    def forward(self, x: Tensor, draw: Draw) -> Outcome:
        mask = masking.hide_patches(draw.noise.expand(len(x), -1), draw.visible)
        patches = torch.take_along_dim(patchify(x, self.patch), mask.drop[..., None], 1)
        normalize = self.config.objective.normalize_patches
        predicted, features = self.predict(x, mask)
        comparison = objectives.on_patches(predicted, patches, normalize)
        loss = self.loss(comparison, x[0].numel()) + self.contrast(features)
        return Outcome(loss, comparison.error, comparison.energy, comparison.size / x[0].numel())

    def pictures(self, x: Tensor, draw: Draw) -> Pictures:
        """The image without its hidden patches, and the predicted patches in their gaps, in the image's own units."""
        mask = masking.hide_patches(draw.noise.expand(len(x), -1), draw.visible)
        patches, hidden = patchify(x, self.patch), mask.hidden[..., None]
        at = mask.drop[..., None].expand(-1, -1, patches.shape[2])
        y = torch.zeros_like(patches).scatter(1, at, self.predict(x, mask)[0])
        if self.config.objective.normalize_patches:
            y = y * (patches.var(2, keepdim=True) + 1e-6).sqrt() + patches.mean(2, keepdim=True)
        shown = (patches * ~hidden, y * hidden, patches * hidden)
        return Pictures(*(unpatchify(p, self.patch, self.encoder.shape) for p in shown))


def build_method(config: Config, shape: tuple[int, int, int], space: Space | None = None) -> MaskedAutoencoder:
    """The method that a resolved configuration describes, for images (C, H, W)."""
    space = space or build_space(config.space, shape)
    kind = MAE if config.space.name == "pixels" else PMAE
    return kind(config, space, build_encoder(config.encoder, shape))


def draw_mask(model: MaskedAutoencoder, batch: int, ratio: float, generator: torch.Generator) -> Draw:
    """Noise for one batch on the generator's device, one row an image or one for all."""
    rows = batch if model.config.masking.per == "image" else 1
    noise = torch.rand(rows, model.units, generator=generator, device=generator.device)
    visible = masking.visible_patches(model.patches, ratio)
    return Draw(noise, torch.full((), ratio, device=generator.device), visible)
