"""Every format, read back by its own library without this package's help, gives the encoder's features."""

import json
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file
from tests.commands import forked

from pmae.cli import main
from pmae.config import EncoderConfig
from pmae.errors import UserError
from pmae.export import FORMATS, export, formats
from pmae.export.source import load_source
from pmae.files import write_json
from pmae.train.checkpoint import load_encoder

COLOUR, DEEP, PAIR, MANY = (
    ((3, 16, 16), "uint8"),
    ((1, 16, 24), "uint16"),
    ((2, 8, 16), "int16"),
    ((5, 8, 8), "float32"),
)
# The graphs of onnx and torch take float32 whatever the data's type is; they are tested further down.
CASES = [(kind, *data) for kind in ("timm", "huggingface") for data in (COLOUR, DEEP, PAIR, MANY)]


def need(kind: str) -> None:
    for package in {"huggingface": ["transformers"], "onnx": ["onnx", "onnxscript", "onnxruntime"]}.get(kind, []):
        pytest.importorskip(package)


def raw_images(shape: tuple[int, ...], dtype: str, count: int = 3) -> np.ndarray:
    noise = np.random.default_rng(1).normal(size=(count, *shape))
    level = {"uint8": (120, 40), "uint16": (30000, 4000), "int16": (-100, 400), "float32": (0.3, 2)}[dtype]
    values = level[0] + level[1] * noise
    return values.clip(0, 255).astype(dtype) if dtype == "uint8" else values.astype(dtype)


def expected(run: Any, images: np.ndarray, epoch: int | None = None) -> dict[str, np.ndarray]:
    _, encoder, standardize = load_encoder(run, epoch)
    with torch.no_grad():
        found = encoder.features(standardize(torch.from_numpy(images.astype(np.float32))))
    return {name: value.numpy() for name, value in found.items()}


def assert_private(folder: Path) -> None:
    """No file tells where it was made: neither the run's folder, nor its data's, nor that of this Python."""
    private = [str(folder.parent).encode(), b"/home/somebody", str(Path(torch.__file__).parents[1]).encode()]
    for file in folder.rglob("*"):
        contents = [file.read_bytes()]
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                contents += [archive.read(name) for name in archive.namelist()]
        assert not [secret for secret in private for content in contents if secret in content], file.name


@pytest.mark.parametrize(("kind", "shape", "dtype"), CASES)
def test_every_format_takes_every_kind_of_image(
    make_run: Any, tmp_path: Path, kind: str, shape: tuple[int, int, int], dtype: str
) -> None:
    need(kind)
    assert export(make_run(shape, dtype).path, kind, tmp_path / "out") < 1e-4
    assert_private(tmp_path / "out")
    told = json.loads((tmp_path / "out/preprocessing.json").read_text())
    assert (told["channels"], told["height"], told["width"], told["dtype"]) == (*shape, dtype)


def test_timm_loads_it_with_its_statistics_and_can_add_a_classifier(make_run: Any, tmp_path: Path) -> None:
    run = make_run((3, 16, 16), "uint8")
    export(run.path, "timm", tmp_path / "out")
    model = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).eval()
    images = raw_images((3, 16, 16), "uint8")
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    x = torch.stack([transform(Image.fromarray(image.transpose(1, 2, 0))) for image in images])
    with torch.no_grad():
        tokens, want = model.forward_features(x).numpy(), expected(run, images)
        np.testing.assert_allclose(model(x).numpy(), want["cls"], atol=2e-5)
    np.testing.assert_allclose(tokens[:, 0], want["cls"], atol=2e-5)
    np.testing.assert_allclose(tokens[:, 1:].mean(1), want["mean"], atol=2e-5)
    tuned = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True, num_classes=7)
    assert tuned(x).shape == (3, 7)
    assert torch.equal(tuned.patch_embed.proj.weight, model.patch_embed.proj.weight)


GREY = ((1, 16, 16), "uint8")
CARDS = [(kind, *data) for kind in ("timm", "huggingface") for data in (COLOUR, GREY, DEEP, PAIR, MANY)]


@pytest.mark.parametrize(("kind", "shape", "dtype"), [*CARDS, ("onnx", *COLOUR), ("torch", *COLOUR)])
def test_the_lines_of_the_card_work_as_they_stand(
    make_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, shape: tuple[int, int, int], dtype: str
) -> None:
    need(kind)
    run = make_run(shape, dtype)
    export(run.path, kind, tmp_path / "out")
    monkeypatch.chdir(tmp_path)
    images = raw_images(shape, dtype)[:1]
    pixels = images[0].transpose(1, 2, 0)
    array = images.astype(np.float32)
    names = {"images": array if kind == "onnx" else torch.from_numpy(array)}
    if shape[0] in (1, 3):
        names["image"] = Image.fromarray(pixels[..., 0] if shape[0] == 1 else pixels)
    code = re.findall(r"```python\n(.*?)```", Path("out/README.md").read_text(), re.DOTALL)[0]
    with torch.no_grad():
        exec(code.partition("# Maps")[0], names)  # whose default are three blocks: this network has one
    found = {
        "timm": "tokens[:, 0]",
        "huggingface": "output.pooler_output",
        "onnx": "outputs[0]",
        "torch": "features['cls']",
    }
    want = expected(run, images)
    np.testing.assert_allclose(np.asarray(eval(found[kind], names)), want["cls"], atol=2e-5)
    if kind == "timm":
        np.testing.assert_allclose(names["features"], want["mean"], atol=2e-5)


def test_transformers_loads_it_as_its_own_vit(make_run: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    run = make_run((3, 16, 24), "uint8")
    export(run.path, "huggingface", tmp_path / "out")
    model = transformers.AutoModel.from_pretrained(tmp_path / "out").eval()
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "out")
    assert type(model) is transformers.ViTModel
    images = raw_images((3, 16, 24), "uint8")
    pictures = [Image.fromarray(image.transpose(1, 2, 0)) for image in images]
    with torch.no_grad():
        output = model(**processor(pictures, return_tensors="pt"))
    want = expected(run, images)
    np.testing.assert_allclose(output.last_hidden_state[:, 0].numpy(), want["cls"], atol=2e-5)
    np.testing.assert_allclose(output.pooler_output.numpy(), want["cls"], atol=2e-5)
    grey = pictures[0].convert("L")
    alone, colored = (
        processor(picture, return_tensors="pt")["pixel_values"] for picture in (grey, grey.convert("RGB"))
    )
    assert torch.equal(alone, colored)
    np.testing.assert_allclose(output.last_hidden_state[:, 1:].mean(1).numpy(), want["mean"], atol=2e-5)


def test_onnx_takes_raw_values_in_batches_of_any_size(make_run: Any, tmp_path: Path) -> None:
    need("onnx")
    import onnxruntime

    run = make_run((1, 16, 24), "uint16", standardize="pixel")
    export(run.path, "onnx", tmp_path / "out")
    assert_private(tmp_path / "out")
    session = onnxruntime.InferenceSession(tmp_path / "out/encoder.onnx", providers=["CPUExecutionProvider"])
    assert [each.shape[0] for each in (*session.get_inputs(), *session.get_outputs())] == ["batch"] * 3
    for count in (1, 5):
        images = raw_images((1, 16, 24), "uint16", count)
        cls, mean = session.run(["cls", "mean"], {"images": images.astype(np.float32)})
        np.testing.assert_allclose(cls, expected(run, images)["cls"], atol=2e-5)
        np.testing.assert_allclose(mean, expected(run, images)["mean"], atol=2e-5)


def test_torch_runs_it_without_pickle(make_run: Any, tmp_path: Path) -> None:
    run = make_run((2, 16, 16), "float32", standardize="pixel")
    export(run.path, "torch", tmp_path / "out")
    assert_private(tmp_path / "out")
    with zipfile.ZipFile(tmp_path / "out/encoder.pt2") as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    nested = [name for name, content in contents.items() if content[:4] == b"PK\x03\x04" or content[:2] == b"\x80\x02"]
    assert nested == []
    program = torch.export.load(tmp_path / "out/encoder.pt2").module()
    for count in (1, 5):
        images = raw_images((2, 16, 16), "float32", count)
        with torch.no_grad():
            found = program(torch.from_numpy(images))
        np.testing.assert_allclose(found["mean"].numpy(), expected(run, images)["mean"], atol=2e-5)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_convolutional_encoder_exports_too(
    make_run: Any, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    need(kind)
    # As if the weights were too many for one file.
    monkeypatch.setattr(formats, "LARGEST_FILE", 0)
    run, out = make_run((2, 32, 48), "uint8", EncoderConfig("test_efficientnet", patch_size=8)), tmp_path / "out"
    images = raw_images((2, 32, 48), "uint8")
    want = expected(run, images)["mean"]
    assert export(run.path, kind, out) < 1e-4 * np.abs(want).max()
    if kind == "onnx":
        assert (out / "encoder.onnx.data").stat().st_size > (out / "encoder.onnx").stat().st_size
    if kind == "timm":
        model = timm.create_model(f"local-dir:{out}", pretrained=True).eval()
        mean, std = (torch.tensor(model.pretrained_cfg[key]).view(-1, 1, 1) for key in ("mean", "std"))
        with torch.no_grad():
            pooled = model((torch.from_numpy(images) / 255 - mean) / std).numpy()
        np.testing.assert_allclose(pooled, want, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("kind", ["timm", "huggingface"])
def test_statistics_of_every_pixel_are_refused_where_they_have_no_place(
    make_run: Any, tmp_path: Path, kind: str
) -> None:
    need(kind)
    with pytest.raises(UserError, match=r"one mean and standard deviation per channel.*choices: onnx, torch"):
        export(make_run(standardize="pixel").path, kind, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_the_command_says_what_it_found_and_takes_an_epoch(
    make_run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run()
    assert main(["export", str(run.path), "--format", "timm", "-o", str(tmp_path / "out"), "--epoch", "1"]) == 0
    assert "largest difference from the original" in capsys.readouterr().out
    written = load_file(tmp_path / "out/model.safetensors")
    same = [
        load_encoder(run, epoch)[1].net.state_dict()["norm.weight"].equal(written["norm.weight"]) for epoch in (1, 2)
    ]
    assert same == [True, False]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--format", "tim"], "unknown name 'tim'; choices: 'timm'"),
        (["--format", "timm", "--epoch", "9"], "must hold a checkpoint of epoch 9"),
        (["--format", "timm", "--push", "no name", "--dry-run"], "push must be a repository, USER/NAME, got 'no name'"),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(
    make_run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    run = make_run()
    assert main(["export", str(run.path), "-o", str(tmp_path / "deep/out"), *arguments]) == 2
    printed = capsys.readouterr().err
    assert words in printed
    assert printed.count("\n") == 1
    assert not (tmp_path / "deep").exists()


def test_a_folder_below_a_file_is_refused(make_run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("in the way")
    out = str(tmp_path / "notes.txt/out")
    assert main(["export", str(make_run().path), "--format", "timm", "-o", out]) == 2
    assert "a file is in its place" in capsys.readouterr().err


def test_a_run_of_a_version_without_notes_on_its_data_exports(make_run: Any, tmp_path: Path) -> None:
    run = make_run()
    del (known := run.environment)["data"]["notes"]
    write_json(run.path / "environment.json", known)
    export(run, "timm", tmp_path / "out")
    assert "toy: 64 train images." in (tmp_path / "out/README.md").read_text()


def test_a_folder_with_something_in_it_is_refused_and_an_empty_one_taken(make_run: Any, tmp_path: Path) -> None:
    run, out = make_run(), tmp_path / "out"
    out.mkdir()
    export(run.path, "timm", out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(UserError, match="out must be a new or an empty folder"):
        export(run.path, "torch", out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_a_difference_is_refused_and_nothing_stays(
    make_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run()
    wrong = FORMATS["timm"]._replace(features=lambda source, *_: {k: v + 1 for k, v in wanted.items()})
    wanted = load_source(run, None).features(load_source(run, None).images())
    monkeypatch.setitem(FORMATS, "timm", wrong)
    with pytest.raises(UserError, match=r"must give features within .* got 1$"):
        export(run.path, "timm", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_network_that_the_library_cannot_take_is_one_sentence(
    make_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def features(*_: object) -> None:
        raise RuntimeError("missing keys:\n  a\n  b")

    monkeypatch.setitem(FORMATS, "timm", FORMATS["timm"]._replace(features=features))  # type: ignore[arg-type]
    words = (
        r"format 'timm' does not work for encoder.name 'vit_tiny': missing keys: a b; other formats: huggingface, onnx"
    )
    with pytest.raises(UserError, match=words):
        export(make_run().path, "timm", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_no_number_counts_as_a_difference(make_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run()
    wanted = load_source(run, None).features(load_source(run, None).images())
    lost = {name: value.clone().index_fill(1, torch.tensor([3]), torch.nan) for name, value in wanted.items()}
    monkeypatch.setitem(FORMATS, "timm", FORMATS["timm"]._replace(features=lambda *_: {**wanted, "mean": lost["mean"]}))
    with pytest.raises(UserError, match="got nan"):
        export(run.path, "timm", tmp_path / "out")


@pytest.mark.parametrize("kind", ["timm", "torch"])
def test_a_full_disk_is_one_sentence_and_leaves_nothing(kind: str, make_run: Any, tmp_path: Path) -> None:
    run, said = make_run(encoder=EncoderConfig(patch_size=4, width=64, depth=2, heads=2)), tmp_path / "said"
    command = ["export", str(run.path), "-o", str(tmp_path / "out"), "--format", kind]
    process = forked(command, str(said), largest=50_000)
    process.join(120)
    assert process.exitcode == 2
    assert said.read_text().count("a file may not grow this large") == 1
    assert "terminate called" not in said.read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"run", "said"}


def test_exported_files_are_as_readable_as_the_umask_says(make_run: Any, tmp_path: Path) -> None:
    export(make_run().path, "timm", tmp_path / "out")
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    assert modes["model.safetensors"] == modes["README.md"] == modes["config.json"]


PYRAMIDS = {"vit": EncoderConfig(patch_size=4, width=16, depth=4, heads=2), "resnet": EncoderConfig("resnet10t")}


@pytest.mark.parametrize("kind", PYRAMIDS)
def test_timm_makes_a_pyramid_of_it(make_run: Any, tmp_path: Path, kind: str) -> None:
    """`features_only`: each map is what the stage or block of the run's own network gives, seen by a hook."""
    run = make_run((3, 32, 32), "uint8", PYRAMIDS[kind])
    export(run.path, "timm", tmp_path / "out")
    pyramid = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True, features_only=True).eval()
    net: Any = load_encoder(run)[1].net
    stages = [net.act1, *(getattr(net, f"layer{i}") for i in range(1, 5))] if kind == "resnet" else net.blocks[1:]
    seen: list[torch.Tensor] = []
    for stage in stages:
        stage.register_forward_hook(lambda module, inputs, output: seen.append(output.clone()))
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        maps = pyramid(x)
        net.forward_features(x)
    ours = [out if out.ndim == 4 else out[:, 1:].mT.unflatten(2, (8, 8)) for out in seen]
    assert len(maps) == len(ours) == (5 if kind == "resnet" else 3)
    for theirs, own in zip(maps, ours, strict=True):
        torch.testing.assert_close(theirs, own, atol=1e-5, rtol=1e-5)
