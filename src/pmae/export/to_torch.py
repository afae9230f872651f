"""torch: a program that torch alone runs, with neither pmae nor timm, standardization included."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pmae.data.images import as_tensor
from pmae.export.source import Source, trace

FILE = "encoder.pt2"
USAGE = """
import torch

encoder = torch.export.load("FOLDER/encoder.pt2").module()
features = encoder(images)   # float32 (B, C, H, W) in the data's own units -> {"cls": (B, width), "mean": (B, width)}
"""


def write(source: Source, folder: Path) -> None:
    """encoder.pt2: a JSON graph and raw weights in a zip file."""
    program = trace(source)
    # Example inputs are the one part of the file that would be pickled.
    program.example_inputs = None
    torch.export.save(program, folder / FILE)


def features(source: Source, folder: Path, images: np.ndarray) -> dict[str, Tensor]:
    """What the program makes of the images."""
    encoder = torch.export.load(folder / FILE).module()
    with torch.inference_mode():
        made: dict[str, Tensor] = encoder(as_tensor(images).float())
    return made
