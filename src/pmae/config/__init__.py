"""Every setting of a run, typed, frozen and checked on construction; `None` means "derived from the data".

The same classes are the Python API and, through tyro, the command line. `derive.resolve` fills in the derived ones.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from pmae.config.hiding import MaskingConfig, ObjectiveConfig, SpaceConfig
from pmae.config.images import AugmentConfig, DataConfig
from pmae.config.models import DecoderConfig, EncoderConfig
from pmae.config.training import OptimConfig, ProbeConfig, TrainConfig
from pmae.errors import UserError, require

__all__ = [
    "AugmentConfig",
    "Config",
    "DataConfig",
    "DecoderConfig",
    "EncoderConfig",
    "MaskingConfig",
    "ObjectiveConfig",
    "OptimConfig",
    "ProbeConfig",
    "SpaceConfig",
    "TrainConfig",
    "replace",
]


@dataclass(frozen=True)
class Config:
    """A whole pretraining run."""

    data: DataConfig = field(default_factory=DataConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    space: SpaceConfig = field(default_factory=SpaceConfig)
    masking: MaskingConfig = field(default_factory=MaskingConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    decoder: DecoderConfig = field(default_factory=DecoderConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    probe: ProbeConfig = field(default_factory=ProbeConfig)

    def __post_init__(self) -> None:
        pixels, masking, target = self.space.name == "pixels", self.masking, self.objective.target
        if pixels and masking.masked_variance is not None:
            raise UserError(
                "masking.masked_variance belongs to a space of components; "
                f"space.name is 'pixels', which takes masking.masked_patches (got {masking.masked_variance})"
            )
        if not pixels and masking.masked_patches is not None:
            raise UserError(
                "masking.masked_patches belongs to space.name 'pixels'; "
                f"space.name is {self.space.name!r}, which takes masking.masked_variance (got {masking.masked_patches})"
            )
        if target is not None and pixels != (target == "patches"):
            raise UserError(
                f"objective.target {target!r} does not fit space.name {self.space.name!r}; "
                + ("choices there: patches" if pixels else "choices there: components, pixels")
            )
        constant = self.space.name != "learned" or self.objective.scale == "constant"
        rule = "'constant' where space.name is 'learned', whose loss is relative to the hidden energy"
        require(constant, "objective.scale", rule, self.objective.scale)


def replace(config: Config, **dotted: Any) -> Config:
    """A copy with fields changed by dotted name, dots written as two underscores: `replace(c, train__epochs=3)`."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in dotted.items():
        section, _, name = key.partition("__")
        sections.setdefault(section, {})[name] = value
    changed = {s: dataclasses.replace(getattr(config, s), **values) for s, values in sections.items()}
    return dataclasses.replace(config, **changed)
