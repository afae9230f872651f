"""lightly's MAE: its masked timm encoder and its decoder, joined as its documentation joins them."""

from lightly.models import utils
from lightly.models.modules import MaskedVisionTransformerTIMM
from lightly.models.modules.masked_vision_transformer_decoder_timm import MaskedVisionTransformerDecoderTIMM
from torch import Tensor, nn

from benchmarks.work import CHANNELS, Work, vision_transformer


class Network(nn.Module):
    """lightly leaves embedding, head and loss to the user; the head serves the hidden tokens alone."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        sizes, vit = work.network, vision_transformer(work)
        self.masked, self.patch = work.config.masking.masked_patches or 0.0, work.patch
        self.encoder = MaskedVisionTransformerTIMM(vit)
        self.embed = nn.Linear(sizes.width, sizes.decoder_width)
        self.decoder = MaskedVisionTransformerDecoderTIMM(
            vit.patch_embed.num_patches, sizes.decoder_width, sizes.decoder_depth, sizes.decoder_heads
        )
        self.head = nn.Linear(sizes.decoder_width, work.patch**2 * CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        """The loss on hidden patches, normalized."""
        size = (len(x), self.encoder.sequence_length)
        keep, hidden = utils.random_token_mask(size, self.masked, device=x.device)
        visible = self.embed(self.encoder.encode(x, idx_keep=keep))
        gaps = utils.repeat_token(self.decoder.mask_token, size).to(visible.dtype)
        tokens = self.decoder(utils.set_at_index(gaps, keep, visible))
        predicted = self.head(utils.get_at_index(tokens, hidden))
        # Positions count [CLS] as the first, patches do not.
        patches = utils.get_at_index(utils.patchify(x, self.patch), hidden - 1)
        return nn.functional.mse_loss(predicted, utils.normalize_mean_var(patches))

    def predict(self, x: Tensor) -> Tensor:
        """Every patch (B, N, P)."""
        patches: Tensor = self.head(self.decoder(self.embed(self.encoder.encode(x)))[:, 1:])
        return patches
