"""The encoder as one function of raw images, standardization included: what becomes a graph."""

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from pmae.export.source import Source


class Deployed(nn.Module):
    """Images in the data's own units, as float32 (B, C, H, W), to "cls" (where there is one) and "mean", (B, width)."""

    pixel_mean: Tensor
    pixel_std: Tensor

    def __init__(self, source: Source) -> None:
        super().__init__()
        self.encoder = source.encoder
        self.register_buffer("pixel_mean", source.standardize.mean)
        self.register_buffer("pixel_std", source.standardize.std)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        # No cast here, though `Standardize` has one: a traced cast pins the program to the device it was traced on.
        features: dict[str, Tensor] = self.encoder.features((images - self.pixel_mean) / self.pixel_std)
        return features


def trace(source: Source) -> ExportedProgram:
    """The graph for any number of images, without the paths of this machine's files."""
    example = torch.zeros(2, *source.shape)
    with torch.no_grad():
        program = torch.export.export(Deployed(source).eval(), (example,), dynamic_shapes=({0: Dim("batch")},))
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)
    return program
