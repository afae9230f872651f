"""Encoders from timm, and the decoder."""

from pmae.models.decoder import Decoder
from pmae.models.encoder import Encoder, build_encoder, is_vit_name, patch_sides, patchify, require_vit, unpatchify

__all__ = ["Decoder", "Encoder", "build_encoder", "is_vit_name", "patch_sides", "patchify", "require_vit", "unpatchify"]
