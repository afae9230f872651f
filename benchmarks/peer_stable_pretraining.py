"""stable-pretraining's MAE; its decoder does without the [CLS] token."""

from stable_pretraining.methods.mae import MAE
from torch import Tensor, nn

from benchmarks.work import Work, vision_transformer


class Network(nn.Module):
    """Its MAE around the same timm encoder; for PMAE, its parts with a masked share of 0."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        sizes, masked = work.network, work.config.masking.masked_patches or 0.0
        decoder = (sizes.decoder_width, sizes.decoder_depth, sizes.decoder_heads)
        self.model = MAE(vision_transformer(work), *decoder, mask_ratio=masked)

    def forward(self, x: Tensor) -> Tensor:
        """The loss on hidden patches."""
        loss: Tensor = self.model(x).loss
        return loss

    def predict(self, x: Tensor) -> Tensor:
        """Every patch (B, N, P)."""
        seen = self.model.encoder(x)
        tokens = seen.encoded[:, self.model.encoder.num_prefix_tokens :]
        patches: Tensor = self.model.decoder(tokens, seen.mask, ids_keep=seen.ids_keep, output_masked_only=False)
        return patches
