"""Encoders from timm, and the decoder."""

from pmae.models.decoder import Decoder
from pmae.models.encoder import Encoder, build_encoder, is_vit_name
from pmae.models.patches import patch_sides, patchify, unpatchify
from pmae.models.projector import Projector

__all__ = ["Decoder", "Encoder", "Projector", "build_encoder", "is_vit_name", "patch_sides", "patchify", "unpatchify"]
