"""The model card: what the encoder is, what it saw, how well it does and how to load it."""

import re
from importlib.metadata import version
from pathlib import Path

import numpy as np

from pmae.config_file import flat
from pmae.export.formats import FORMATS
from pmae.export.source import RunSource, Source
from pmae.report.tables import Cell, Table, in_line, to_markdown
from pmae.results import PROTOCOLS
from pmae.standing import scores_of

LOCAL = ("data.source", "data.root", "probe.data", "encoder.weights", "train.device")
"""Settings that say where things lie on the machine that trained, which is nobody else's business."""
LICENCES = {"bloodmnist": "cc-by-4.0", "dermamnist": "cc-by-nc-4.0", "pathmnist": "cc-by-4.0"}
"""Of the named sets whose publisher states one."""
USAGE = {
    "timm": """
import timm

model = timm.create_model("local-dir:FOLDER", pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))   # for PIL images
tokens = model.forward_features(transform(image)[None])

# Maps for detection and segmentation; those of a ViT are of its last blocks, before the last norm.
pyramid = timm.create_model("local-dir:FOLDER", pretrained=True, features_only=True).eval()
maps = pyramid(transform(image)[None])
""",
    "huggingface": """
from transformers import AutoImageProcessor, AutoModel

model = AutoModel.from_pretrained("FOLDER").eval()
processor = AutoImageProcessor.from_pretrained("FOLDER")
output = model(**processor(image, return_tensors="pt"))   # last_hidden_state; pooler_output is the summary
""",
    "onnx": """
import onnxruntime

session = onnxruntime.InferenceSession("FOLDER/encoder.onnx")
outputs = session.run(None, {"images": images})   # float32 (B, C, H, W) in the data's own units -> [cls, mean]
""",
    "torch": """
import torch

encoder = torch.export.load("FOLDER/encoder.pt2").module()
features = encoder(images)   # float32 (B, C, H, W) in the data's own units -> {"cls": (B, width), "mean": (B, width)}
""",
}
CLASSIFIER_USAGE = {
    "timm": """
import timm

model = timm.create_model("local-dir:FOLDER", pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))   # for PIL images
logits = model(transform(image)[None])   # of the classes in model.pretrained_cfg["label_names"]
""",
    "huggingface": """
from transformers import AutoImageProcessor, AutoModelForImageClassification

model = AutoModelForImageClassification.from_pretrained("FOLDER").eval()
processor = AutoImageProcessor.from_pretrained("FOLDER")
logits = model(**processor(image, return_tensors="pt")).logits   # of the classes in model.config.id2label
""",
    "onnx": """
import onnxruntime

session = onnxruntime.InferenceSession("FOLDER/classifier.onnx")
logits, probabilities = session.run(None, {"images": images})   # float32 (B, C, H, W) in the data's own units
classes = session.get_modelmeta().custom_metadata_map["classes"]   # JSON
""",
    "torch": """
import torch

classifier = torch.export.load("FOLDER/classifier.pt2").module()
outputs = classifier(images)   # float32 (B, C, H, W) in the data's own units -> {"logits": ..., "probabilities": ...}
""",
}
"""How what was exported is loaded, by format; FOLDER is where it lies."""


def write_card(
    source: Source, folder: Path, kind: str, name: str, difference: float, data_licence: str | None, on_hub: bool
) -> None:
    """Write README.md; `name` is the folder's, or that of its repository on the hub."""
    library, usage = FORMATS[kind].library, (CLASSIFIER_USAGE if source.head else USAGE)[kind].replace("FOLDER", name)
    usage = usage.replace("local-dir:", "hf-hub:") if on_hub else usage
    if mode := _pil_mode(source):
        usage = re.sub(r"\(image\b", f'(image.convert("{mode}")', usage)
    checked = (
        f"Re-loaded with {library} {version(library)} and compared with the original on images of noise: "
        f"the largest difference of a feature is {difference:.1e}."
    )
    task = "image-classification" if source.head else "image-feature-extraction"
    front = f"---\nlibrary_name: {library}\npipeline_tag: {task}\ntags: [pmae, masked-autoencoder]\n---"
    use = f"## Use\n\n```python\n{usage.strip()}\n```\n\n{checked}"
    parts = [front, *(_of_run(source, use) if isinstance(source, RunSource) else _of_classifier(source, use))]
    parts.insert(-1, f"## Licence of the images\n\n{_licence(source, data_licence)}")
    (folder / "README.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _of_classifier(source: Source, use: str) -> list[str]:
    assert source.head is not None
    names = ", ".join(map(_text, source.head.classes))
    kind = "each of which an image may have or not" if source.head.multi_label else "of which every image has one"
    what = f"`{source.network.name}` with a linear head on {len(source.head.classes)} classes, {kind}: {names}."
    sure = (
        "The logits are calibrated: their softmax (or sigmoid, for several labels) is the probability of being right."
    )
    return ["# Image classifier", f"{what} {sure}", use, f"## Input\n\n{_input(source)}"]


def _of_run(source: RunSource, use: str) -> list[str]:
    method = source.config.method.upper()
    return [
        f"# {method} encoder after epoch {source.epoch} on {_text(source.run.environment['data']['name'])}",
        _what(source),
        use,
        f"## Input\n\n{_input(source)}",
        f"## Data\n\n{_data(source)}",
        f"## Evaluation\n\n{_evaluation(source)}",
        f"## Settings\n\n```\n{_settings(source)}\n```",
    ]


def _what(source: RunSource) -> str:
    hidden = "patches" if source.config.method == "mae" else "components of the image"
    pooled = list(source.features(source.images()[:1]))
    names = {"cls": "its [CLS] token (`cls`)", "mean": "the mean of its patch tokens (`mean`)"}
    return (
        f"{source.config.encoder.in_words}, pretrained without labels by predicting hidden {hidden}. It turns an image "
        f"into {source.encoder.width} numbers: {' or '.join(names[name] for name in pooled)}. Nothing is masked here."
    )


def _input(source: Source) -> str:
    channels, height, width = source.shape
    kind = source.dtype
    values = f"{np.iinfo(kind).min} to {np.iinfo(kind).max}" if kind.kind in "iu" else "as in the data"
    scaled = ", after division by 255" if source.scale != 1 else ""
    lines = [f"{channels} x {height} x {width} (channels, height, width), trained on {kind.name}, values {values}."]
    if mode := _pil_mode(source):
        lines += [f'A PIL image of another kind becomes such a one by `image.convert("{mode}")`.', _picture(source)]
    else:
        lines += [
            "No PIL image holds it: a model of timm or Hugging Face takes a float tensor, standardized as follows."
        ]
    if source.per_channel:
        mean_text, std_text = (", ".join(f"{value:.6g}" for value in values) for values in source.statistics("card"))
        lines.append(f"Mean {mean_text} and standard deviation {std_text} per channel{scaled}.")
    else:
        lines.append("Mean and standard deviation of every pixel are inside the graph.")
    return "\n".join([*lines, "`preprocessing.json` holds the same in full."])


def _pil_mode(source: Source) -> str | None:
    """The mode in which PIL, and so the transforms of timm and Hugging Face, keep the values of such an image."""
    channels = source.shape[0]
    if source.dtype == np.uint8:
        return {1: "L", 3: "RGB", 4: "RGBA"}.get(channels)
    return "F" if channels == 1 else None


def _picture(source: Source) -> str:
    """How a picture of another size becomes such an image."""
    (height, width), resized = source.shape[1:], source.resized
    sides = f"the short side to {resized[0]}" if source.crop_mode == "center" else f"to {resized[0]} x {resized[1]}"
    kept = "" if source.crop_mode == "squash" and source.crop_pct == 1 else f", then the centre of {height} x {width}"
    turned = "Photographs are upright first, as their EXIF data say: `PIL.ImageOps.exif_transpose(image)`."
    return f"A picture of another size is resized, {sides} ({source.interpolation}, with antialiasing){kept}. {turned}"


def _data(source: RunSource) -> str:
    data = source.run.environment["data"]
    counts = ", ".join(f"{count:,} {split}" for split, count in data["counts"].items())
    start = source.run.environment.get("start")
    notes = [*data["notes"], *(["training did not start from random weights"] if start else [])]
    return "\n".join([f"{_text(data['name'])}: {_text(counts)} images.", *(f"- {_text(note)}" for note in notes)])


def _licence(source: Source, given: str | None) -> str:
    known = LICENCES.get(source.config.data.source) if isinstance(source, RunSource) else None
    return _text(given or known or "Not stated by whoever exported this; ask before you use it for more than research.")


def _evaluation(source: RunSource) -> str:
    found = scores_of(source.run.evaluations)
    found = [score for score in found if score.is_baseline or score.epoch == source.epoch]
    if all(score.is_baseline for score in found):
        return "Not evaluated with labels." + _r2(source)
    rows: list[list[Cell]] = [
        [s.representation, PROTOCOLS.get(s.protocol, s.protocol), s.preset, f"{_marked(s.data)} {s.split}", s.accuracy]
        for s in found
    ]
    header = ("representation", "protocol", "preset", "images", "accuracy %")
    table = Table("evaluation", "The encoder and what needs no pretraining", header, rows, "With 95% intervals.")
    return to_markdown(table).rstrip() + _r2(source)


def _r2(source: RunSource) -> str:
    signals = source.run.results.get("pretrain", {})
    named = {"held_out_r2": "held-out images", "train_r2": "training images, as none were held out"}
    told = [f"{images}: {signals[name]:.3f}" for name, images in named.items() if name in signals]
    if signals.get("epoch") != source.epoch or not told:
        return ""
    return f"\n\nR2 of the hidden variance on {told[0]} (0 is predicting the mean, 1 is perfect)."


def _settings(source: RunSource) -> str:
    given = {name: value for name, value in flat(source.config).items() if name not in LOCAL and value is not None}
    shown = {name: " ".join(str(value).split()) for name, value in given.items()}
    return "\n".join(f"{key:<27} {value}" for key, value in shown.items())


def _text(value: object) -> str:
    """A name or note that stays text: no tag, no link, no picture, no new line."""
    return _marked(in_line(str(value)))


def _marked(text: str) -> str:
    return re.sub(r"([\\`*_\[\]#~])", r"\\\1", text)
