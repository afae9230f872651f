"""The formats: how each is written, and how its library turns images into features from what was written.

timm and Hugging Face: a folder with the weights and the settings of a network that the library builds itself; for
transformers a plain ViT becomes its own ViTModel, any other timm network stays one, inside its timm wrapper. ONNX and
torch: the encoder as one graph of raw images, standardization included, without pmae or timm.
"""

import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import timm
import torch
from safetensors.torch import save
from timm.data.config import resolve_model_data_config
from timm.data.transforms_factory import create_transform
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from pmae.data.images import as_tensor
from pmae.errors import optional
from pmae.export.source import Source
from pmae.files import write_json
from pmae.models.encoder import pool, split_tokens, timm_recipe
from pmae.models.huggingface import to_huggingface

RESAMPLE = {"bilinear": 2, "bicubic": 3}  # Pillow's numbers
ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
LARGEST_FILE = 2**30  # bytes of weights above which ONNX has them in a file of their own: a protobuf holds 2 GiB


def write_timm(source: Source, folder: Path) -> None:
    """config.json in timm's layout and model.safetensors, the encoder's own state dict."""
    mean, std = source.statistics("format timm")
    name, options = timm_recipe(source.network, source.shape)
    known: Any = timm.get_pretrained_cfg(name)
    tensors, classes = source.encoder.net.state_dict(), source.head.classes if source.head else ()
    labels = {"label_names": list(classes)} if classes else {}
    if source.head:
        if isinstance(source.encoder.net, VisionTransformer):
            # timm's own head sees what ours does: tokens behind the last norm.
            options |= {"global_pool": "token" if source.head.pooling == "cls" else "avg", "fc_norm": False}
        tensors |= {f"{known.classifier}.weight": source.head.weight, f"{known.classifier}.bias": source.head.bias}
    config = {
        "architecture": name,
        "num_classes": len(classes),
        "num_features": source.encoder.width,
        "model_args": options,
        "pretrained_cfg": {
            "input_size": list(source.shape),
            "mean": mean,
            "std": std,
            "interpolation": source.interpolation,
            "crop_pct": source.crop_pct,
            "crop_mode": source.crop_mode,
            "num_classes": len(classes),
            **labels,
            # With the classifier's name, timm can add one; with that of the first layer it would replace the weights
            # of any other number of channels than three by random ones.
            "classifier": known.classifier,
            "first_conv": known.first_conv if source.shape[0] == 3 else None,
        },
    }
    write_json(folder / "config.json", config | labels)
    _write_weights(tensors, folder)


def _write_weights(tensors: dict[str, Tensor], folder: Path) -> None:
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    (folder / "model.safetensors").write_bytes(save(whole, metadata={"format": "pt"}))


def timm_features(source: Source, folder: Path, images: np.ndarray) -> dict[str, Tensor]:
    """What timm makes of the images, from the folder alone."""
    net: Any = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    with torch.inference_mode():
        x = _normalized(source, resolve_model_data_config(net), images)
        if source.head:
            return source.head.outputs(net(x))
        return pool(*split_tokens(net, net.forward_features(x)))


def _normalized(source: Source, config: dict[str, Any], images: np.ndarray) -> Tensor:
    """Images that have their size already, so that nothing is to be cropped, by timm's own transform."""
    transform: Any = create_transform(**{**config, "crop_pct": 1.0})
    return transform(as_tensor(images).float() * source.scale)


def write_huggingface(source: Source, folder: Path) -> None:
    """Weights, configuration and preprocessing in the layout of transformers."""
    transformers = optional("format huggingface", "export", "transformers")
    net: Any = source.encoder.net
    tensors = _vit_tensors(net)
    if tensors is None or (source.head and source.head.pooling != "cls"):  # where transformers' ViT has its head
        write_timm(source, folder)
        return
    mean, std = source.statistics("format huggingface")
    channels, height, width = source.shape
    rows, columns = net.patch_embed.patch_size
    transformers.ViTConfig(
        hidden_size=source.encoder.width,
        num_hidden_layers=len(net.blocks),
        num_attention_heads=net.blocks[0].attn.num_heads,
        intermediate_size=net.blocks[0].mlp.fc1.out_features,
        layer_norm_eps=net.norm.eps,
        image_size=(height, width),
        patch_size=rows if rows == columns else (rows, columns),
        num_channels=channels,
        pooler_act="linear",
        **_labels(source),
    ).save_pretrained(folder)
    pixels = {"rescale_factor": source.scale, "do_rescale": source.scale != 1, "image_mean": mean, "image_std": std}
    pixels |= {"do_convert_rgb": channels == 3}  # of pictures; arrays are taken as they are
    pixels |= {"resample": RESAMPLE[source.interpolation], **_sizes(source)}
    kind = transformers.BitImageProcessor if "crop_size" in pixels else transformers.ViTImageProcessor
    kind(**pixels).save_pretrained(folder)
    if source.head:
        own = {f"vit.{name}": tensor for name, tensor in tensors.items()}
        own |= {"classifier.weight": source.head.weight, "classifier.bias": source.head.bias}
        _write_weights(own, folder)
        return
    # The pooler hands on the [CLS] token as it is; left out, transformers would make one of random weights.
    pooler = {"pooler.dense.weight": torch.eye(net.num_features), "pooler.dense.bias": torch.zeros(net.num_features)}
    _write_weights(tensors | pooler, folder)


def _sizes(source: Source) -> dict[str, Any]:
    """What a processor of transformers resizes pictures to, and what it then keeps."""
    height, width = source.shape[1:]
    size = {"height": height, "width": width}
    if source.crop_mode == "squash" and source.crop_pct == 1:
        return {"size": size}
    high, wide = source.resized
    whole = {"shortest_edge": high} if source.crop_mode == "center" else {"height": high, "width": wide}
    return {"size": whole, "crop_size": size}


def _labels(source: Source) -> dict[str, Any]:
    """What a configuration of transformers says of its outputs."""
    if source.head is None:
        return {"architectures": ["ViTModel"]}
    names = dict(enumerate(source.head.classes))
    kind = "multi_label_classification" if source.head.multi_label else "single_label_classification"
    told = {"id2label": names, "label2id": {name: number for number, name in names.items()}, "problem_type": kind}
    return {"architectures": ["ViTForImageClassification"], **told}


def _vit_tensors(net: Any) -> dict[str, Tensor] | None:
    if type(net) is not VisionTransformer or net.num_prefix_tokens != 1 or net.pos_embed is None:
        return None
    first: Any = net.blocks[0]
    plain = isinstance(first.mlp.act, nn.GELU) and first.attn.qkv.bias is not None and not net.no_embed_class
    tensors, unknown = to_huggingface(net.state_dict())
    return tensors if plain and not unknown and isinstance(net.norm, nn.LayerNorm) else None


def huggingface_features(source: Source, folder: Path, images: np.ndarray) -> dict[str, Tensor]:
    """What transformers makes of the images, from the folder alone."""
    transformers = optional("format huggingface", "export", "transformers")
    with _quietly(transformers.utils.logging), torch.inference_mode():
        kind = transformers.AutoModelForImageClassification if source.head else transformers.AutoModel
        model = kind.from_pretrained(folder, local_files_only=True).eval()
        processor = transformers.AutoImageProcessor.from_pretrained(folder, local_files_only=True)
        if hasattr(model, "timm_model"):
            x = _normalized(source, processor.data_config, images)
            if source.head:
                return source.head.outputs(model(x).logits)
            return pool(*split_tokens(model.timm_model, model(x, do_pooling=False).last_hidden_state))
        as_they_are = {"do_resize": False, "do_center_crop": False, "input_data_format": "channels_first"}
        output = model(**processor(list(images), **as_they_are, return_tensors="pt"))
    if source.head:
        return source.head.outputs(output.logits)
    return {"cls": output.pooler_output, "mean": output.last_hidden_state[:, 1:].mean(1)}


@contextmanager
def _quietly(logging: Any) -> Iterator[None]:
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


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


BATCH = ({0: Dim("batch")},)
"""The one dimension that an exported graph leaves open."""


def trace(source: Source) -> ExportedProgram:
    """The graph for any number of images, without the paths of this machine's files."""
    example = torch.zeros(2, *source.shape)
    with torch.no_grad():
        program = torch.export.export(Deployed(source).eval(), (example,), dynamic_shapes=BATCH)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)
    return program


def write_onnx(source: Source, folder: Path) -> None:
    """encoder.onnx or classifier.onnx, with a file .data beside it where the weights are large."""
    optional("format onnx", "export", *ONNX_PACKAGES)
    names = list(source.features(source.images()[:1]))
    graph = trace(source)
    named: dict[str, Any] = {"input_names": ["images"], "output_names": names, "dynamic_shapes": BATCH}
    made: Any = torch.onnx.export(graph, **named, dynamo=True, verbose=False)
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
    runtime, file = optional("format onnx", "export", *ONNX_PACKAGES), folder / f"{source.stem}.onnx"
    session = runtime.InferenceSession(file, providers=["CPUExecutionProvider"])
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


class Format(NamedTuple):
    """How to write an encoder, and how its library turns images into features from what was written."""

    write: Callable[[Source, Path], None]
    features: Callable[[Source, Path, np.ndarray], dict[str, Tensor]]
    library: str


FORMATS = {
    "timm": Format(write_timm, timm_features, "timm"),
    "huggingface": Format(write_huggingface, huggingface_features, "transformers"),
    "onnx": Format(write_onnx, onnx_features, "onnxruntime"),
    "torch": Format(write_torch, torch_features, "torch"),
}
