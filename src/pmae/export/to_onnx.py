"""ONNX: a graph that onnxruntime runs on any number of images, standardization included."""

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pmae.errors import missing_extra
from pmae.export.source import Source, trace

FILE = "encoder.onnx"
LARGEST_FILE = 2**30
"""Bytes of weights above which they lie in a file of their own: a protobuf holds 2 GiB."""
USAGE = """
import onnxruntime

session = onnxruntime.InferenceSession("FOLDER/encoder.onnx")
outputs = session.run(None, {"images": images})   # float32 (B, C, H, W) in the data's own units -> [cls, mean]
"""


def write(source: Source, folder: Path) -> None:
    """encoder.onnx, with encoder.onnx.data beside it where the weights are large."""
    _packages()
    names = list(source.features(source.images()[:1]))
    program = trace(source)
    made: Any = torch.onnx.export(program, input_names=["images"], output_names=names, dynamo=True, verbose=False)
    _forget_names(made.model.graph)
    weights = sum(tensor.nbytes for tensor in source.encoder.net.state_dict().values())
    made.save(folder / FILE, external_data=weights > LARGEST_FILE)


def _forget_names(graph: Any) -> None:
    """Number the values inside, some of which may be called like an output, and drop the code they came from."""
    outside = {id(value) for value in (*graph.inputs, *graph.outputs)}
    for place, node in enumerate(graph.all_nodes()):
        node.metadata_props.clear()
        for number, value in enumerate(node.outputs):
            if id(value) not in outside:
                value.name = f"value_{place}_{number}"


def features(source: Source, folder: Path, images: np.ndarray) -> dict[str, Tensor]:
    """What onnxruntime makes of the images."""
    runtime = _packages()
    session = runtime.InferenceSession(folder / FILE, providers=["CPUExecutionProvider"])
    outputs = session.run(None, {"images": images.astype(np.float32)})
    return {node.name: torch.from_numpy(value) for node, value in zip(session.get_outputs(), outputs, strict=True)}


def _packages() -> Any:
    """onnxruntime, once all that writing needs is known to be there."""
    try:
        return [import_module(name) for name in ("onnx", "onnxscript", "onnxruntime")][-1]
    except ImportError as error:
        raise missing_extra("format onnx", "export", error) from error
