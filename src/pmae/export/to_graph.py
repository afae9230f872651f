"""ONNX and torch: encoder or classifier as one graph of raw images, standardization included, without pmae or timm."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from pmae.data.images import as_tensor
from pmae.export.source import Source, needed

PACKAGES = ("onnx", "onnxscript", "onnxruntime")
LARGEST_FILE = 2**30
"""Bytes of weights above which ONNX has them in a file of their own: a protobuf holds 2 GiB."""
ONNX_USAGE = """
import onnxruntime

session = onnxruntime.InferenceSession("FOLDER/encoder.onnx")
outputs = session.run(None, {"images": images})   # float32 (B, C, H, W) in the data's own units -> [cls, mean]
"""
TORCH_USAGE = """
import torch

encoder = torch.export.load("FOLDER/encoder.pt2").module()
features = encoder(images)   # float32 (B, C, H, W) in the data's own units -> {"cls": (B, width), "mean": (B, width)}
"""
ONNX_CLASSIFIER_USAGE = """
import onnxruntime

session = onnxruntime.InferenceSession("FOLDER/classifier.onnx")
logits, probabilities = session.run(None, {"images": images})   # float32 (B, C, H, W) in the data's own units
classes = session.get_modelmeta().custom_metadata_map["classes"]   # JSON
"""
TORCH_CLASSIFIER_USAGE = """
import torch

classifier = torch.export.load("FOLDER/classifier.pt2").module()
outputs = classifier(images)   # float32 (B, C, H, W) in the data's own units -> {"logits": ..., "probabilities": ...}
"""


class Deployed(nn.Module):
    """Images in the data's own units, as float32 (B, C, H, W), to features by pooling, or to a classifier's outputs."""

    pixel_mean: Tensor
    pixel_std: Tensor

    def __init__(self, source: Source) -> None:
        super().__init__()
        self.encoder, self.head = source.encoder, source.head
        if source.head:
            self.linear = nn.Linear(*source.head.weight.T.shape)
            self.linear.load_state_dict({"weight": source.head.weight, "bias": source.head.bias})
        self.register_buffer("pixel_mean", source.standardize.mean)
        self.register_buffer("pixel_std", source.standardize.std)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        # No cast here, though `Standardize` has one: a traced cast pins the program to the device it was traced on.
        features: dict[str, Tensor] = self.encoder.features((images - self.pixel_mean) / self.pixel_std)
        return features if self.head is None else self.head.outputs(self.linear(features[self.head.pooling]))


def trace(source: Source) -> ExportedProgram:
    """The graph for any number of images, without the paths of this machine's files."""
    example = torch.zeros(2, *source.shape)
    with torch.no_grad():
        program = torch.export.export(Deployed(source).eval(), (example,), dynamic_shapes=({0: Dim("batch")},))
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)
    return program


def write_onnx(source: Source, folder: Path) -> None:
    """encoder.onnx or classifier.onnx, with a file .data beside it where the weights are large."""
    needed("onnx", *PACKAGES)
    names = list(source.features(source.images()[:1]))
    graph = trace(source)
    made: Any = torch.onnx.export(graph, input_names=["images"], output_names=names, dynamo=True, verbose=False)
    _forget_names(made.model.graph)
    if source.head:
        told = {"classes": list(source.head.classes), "multi_label": source.head.multi_label}
        made.model.metadata_props.update({name: json.dumps(value) for name, value in told.items()})
    weights = sum(tensor.nbytes for tensor in source.encoder.net.state_dict().values())
    made.save(folder / f"{source.stem}.onnx", external_data=weights > LARGEST_FILE)


def _forget_names(graph: Any) -> None:
    """Number the values inside, some of which may be called like an output, and drop the code they came from."""
    outside = {id(value) for value in (*graph.inputs, *graph.outputs)}
    for place, node in enumerate(graph.all_nodes()):
        node.metadata_props.clear()
        for number, value in enumerate(node.outputs):
            if id(value) not in outside:
                value.name = f"value_{place}_{number}"


def onnx_features(source: Source, folder: Path, images: np.ndarray) -> dict[str, Tensor]:
    """What onnxruntime makes of the images."""
    path = folder / f"{source.stem}.onnx"
    session = needed("onnx", *PACKAGES).InferenceSession(path, providers=["CPUExecutionProvider"])
    outputs = session.run(None, {"images": images.astype(np.float32)})
    return {node.name: torch.from_numpy(value) for node, value in zip(session.get_outputs(), outputs, strict=True)}


def write_torch(source: Source, folder: Path) -> None:
    """encoder.pt2 or classifier.pt2: a JSON graph and raw weights in a zip file."""
    program = trace(source)
    # Example inputs are the one part of the file that would be pickled.
    program.example_inputs = None
    # In memory first: torch's own writer ends the whole process when the disk is full.
    made = io.BytesIO()
    torch.export.save(program, made)
    (folder / f"{source.stem}.pt2").write_bytes(made.getbuffer())


def torch_features(source: Source, folder: Path, images: np.ndarray) -> dict[str, Tensor]:
    """What the program makes of the images."""
    encoder = torch.export.load(folder / f"{source.stem}.pt2").module()
    with torch.inference_mode():
        made: dict[str, Tensor] = encoder(as_tensor(images).float())
    return made
