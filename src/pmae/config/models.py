"""Settings of the two networks."""

from dataclasses import dataclass
from typing import Literal

from pmae.config.checks import at_least
from pmae.errors import require


@dataclass(frozen=True)
class EncoderConfig:
    """The encoder that is kept after pretraining."""

    name: str = "vit_tiny"
    """vit_tiny (192 wide, 12 blocks, 12 heads, as in the paper) or any timm image model."""
    patch_size: int | None = None
    """Side of a patch in pixels, or length in samples; derived from the data's size if not given."""
    width: int | None = None
    """Width of vit_tiny's tokens; 192 if not given, or 96 without a GPU if no size of either network is given."""
    depth: int | None = None
    """Number of vit_tiny's blocks; 12 if not given, or 4 in the same case."""
    heads: int | None = None
    """Number of vit_tiny's attention heads; 12 if not given, or 6 in the same case."""
    weights: str | None = None
    """Start from a run folder, or from a local safetensors file or folder that timm or Hugging Face wrote."""

    def __post_init__(self) -> None:
        for key in ("patch_size", "width", "depth", "heads"):
            at_least(f"encoder.{key}", 1, getattr(self, key))
        shaped = self.width or self.depth or self.heads
        require(
            not shaped or self.name == "vit_tiny",
            "encoder.width, depth and heads",
            "left unset unless encoder.name is vit_tiny (a timm name fixes its own shape)",
            self.name,
        )


@dataclass(frozen=True)
class DecoderConfig:
    """The decoder that is thrown away after pretraining."""

    name: Literal["released", "text", "small"] | None = None
    """released: 512 wide, 8 blocks, 16 heads; text: 192, 12, 12; small: 192, 4, 12. If not given, released, or small
    without a GPU."""
    width: int | None = None
    """Overrides the named width."""
    depth: int | None = None
    """Overrides the named number of blocks."""
    heads: int | None = None
    """Overrides the named number of heads."""

    def __post_init__(self) -> None:
        for key in ("width", "depth", "heads"):
            at_least(f"decoder.{key}", 1, getattr(self, key))
