"""Learn image representations without labels by masking components instead of pixels."""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from pmae.api import embed, evaluate, export, pretrain
    from pmae.classify.estimator import PMAEClassifier
    from pmae.classify.finetune import finetune
    from pmae.classify.model import ImageClassifier, load_classifier
    from pmae.classify.predict import predict
    from pmae.component_mask import ComponentMask
    from pmae.config import Config
    from pmae.estimator import PMAE
    from pmae.paper.recipes import recipe
    from pmae.plugins import register
    from pmae.runs import Run
    from pmae.train.callbacks import Callback
    from pmae.train.checkpoint import load_encoder

_HOMES = {
    "Callback": "pmae.train.callbacks",
    "ComponentMask": "pmae.component_mask",
    "PMAE": "pmae.estimator",
    "PMAEClassifier": "pmae.classify.estimator",
    "Config": "pmae.config",
    "ImageClassifier": "pmae.classify.model",
    "Run": "pmae.runs",
    "embed": "pmae.api",
    "evaluate": "pmae.api",
    "export": "pmae.api",
    "finetune": "pmae.classify.finetune",
    "load_classifier": "pmae.classify.model",
    "load_encoder": "pmae.train.checkpoint",
    "predict": "pmae.classify.predict",
    "pretrain": "pmae.api",
    "recipe": "pmae.paper.recipes",
    "register": "pmae.plugins",
}
__all__ = ["PMAE", "Callback", "ComponentMask", "Config", "ImageClassifier", "PMAEClassifier", "Run"]
__all__ += ["embed", "evaluate", "export", "finetune", "load_classifier", "load_encoder", "predict", "pretrain"]
__all__ += ["recipe", "register"]


def __getattr__(name: str) -> Any:
    """Public names are imported on first use: torch takes seconds, and `pmae --help` does not need it."""
    if name == "__version__":
        return import_module("importlib.metadata").version("pmae")
    if name not in _HOMES:
        raise AttributeError(f"module 'pmae' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """What completion shows: the public names alone."""
    return [*__all__, "__version__"]


class _Package(ModuleType):
    """This module, in which a room of the same name does not hide a public function: embed, evaluate, export."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _HOMES or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
