"""transformers' ViTMAE: the autoencoder that the authors' released code trains."""

from torch import Tensor, nn
from transformers import ViTMAEConfig, ViTMAEForPreTraining

from benchmarks.work import Work


class Network(nn.Module):
    """ViTMAE as it is for MAE; for PMAE, its encoder and decoder with a masked share of 0."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        sizes = work.network
        config = ViTMAEConfig(
            hidden_size=sizes.width,
            num_hidden_layers=sizes.depth,
            num_attention_heads=sizes.heads,
            intermediate_size=4 * sizes.width,
            decoder_hidden_size=sizes.decoder_width,
            decoder_num_hidden_layers=sizes.decoder_depth,
            decoder_num_attention_heads=sizes.decoder_heads,
            decoder_intermediate_size=4 * sizes.decoder_width,
            image_size=work.side,
            patch_size=work.patch,
            norm_pix_loss=True,
            mask_ratio=work.config.masking.masked_patches or 0.0,
        )
        self.model = ViTMAEForPreTraining(config)

    def forward(self, x: Tensor) -> Tensor:
        """The loss on hidden patches."""
        loss: Tensor = self.model(pixel_values=x).loss
        return loss

    def predict(self, x: Tensor) -> Tensor:
        """Every patch (B, N, P)."""
        latent = self.model.vit(pixel_values=x)
        patches: Tensor = self.model.decoder(latent.last_hidden_state, latent.ids_restore).logits
        return patches
