"""Encoders from timm, and the decoder."""

from pmae.models.decoder import Decoder, patchify, unpatchify
from pmae.models.encoder import Encoder, build_encoder, is_vit_name

__all__ = ["Decoder", "Encoder", "build_encoder", "is_vit_name", "patchify", "unpatchify"]
