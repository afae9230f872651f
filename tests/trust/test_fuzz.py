"""Whatever bytes lie in a file, a reader makes something of them or says in one sentence that it cannot."""

import contextlib
import io
import json
import pickle
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tifffile
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save
from tests.data.test_decode import write_dicom

from pmae.config import Config, DataConfig
from pmae.config_file import from_dict, to_dict
from pmae.data.arrays import read_npy, read_npz
from pmae.data.named import BATCHES, bytes_array, read_batch_pickle, read_cifar10
from pmae.data.sets import load
from pmae.errors import UserError
from pmae.files import read_json, read_tensors
from pmae.runs import Run
from pmae.train.checkpoint import damage, load_into, load_standardize

settings.register_profile("fast", max_examples=200)
settings.register_profile("slow", max_examples=11_200)

Edit = tuple[int, int, bytes]
EDITS = st.lists(st.tuples(st.integers(0, 2**20), st.integers(0, 8), st.binary(max_size=8)), max_size=5)


def edited(whole: bytes, edits: list[Edit]) -> bytes:
    """A true file with a few stretches of bytes replaced, cut out or put in."""
    for place, cut, new in edits:
        start = place % (len(whole) + 1)
        whole = whole[:start] + new + whole[start + cut :]
    return whole


def shortened(whole: bytes, keep: int) -> bytes:
    return whole[: keep % (len(whole) + 1)]


def damaged(*files: bytes) -> st.SearchStrategy[bytes]:
    """Any bytes, and true files that were edited or cut short."""
    true = st.sampled_from(files)
    return st.binary(max_size=300) | st.builds(edited, true, EDITS) | st.builds(shortened, true, st.integers(0, 2**20))


@dataclass(frozen=True)
class Target:
    """A file to damage: true examples of it, its place in a folder, what else lies there, and who reads it."""

    files: tuple[bytes, ...]
    name: str
    read: Callable[[Path], object]
    others: dict[str, bytes]


def _image(kind: str, mode: str = "RGB") -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3)).convert(mode).save(file, kind)
    return file.getvalue()


def _npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def _npz(compression: int) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        archive.writestr("images.npy", _npy(np.zeros((3, 4, 4, 1), np.uint8)))
        archive.writestr("labels.npy", _npy(np.array([0, 1, 1])))
    return file.getvalue()


def _batch(protocol: int) -> bytes:
    return pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [1, 2], "filenames": ["a", "b"]}, protocol)


def _table(kind: str) -> bytes:
    """Two images of a struct, and labels with names, as `datasets` writes them."""
    features = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": ["a", "b"]}}
    columns = {"image": [{"bytes": _image("PNG"), "path": None}, {"bytes": None, "path": "b.png"}], "label": [0, 1]}
    noted = {"huggingface": json.dumps({"info": {"features": features}})}
    table, file = pyarrow.table(columns).replace_schema_metadata(noted), io.BytesIO()
    if kind == "parquet":
        pyarrow.parquet.write_table(table, file)
    else:
        with pyarrow.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    return file.getvalue()


def _tar(kind: int) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=kind) as archive:
        for name, content in {"0.png": _image("PNG"), "0.cls": b"1", "1.npy": _npy(np.zeros((8, 8, 3)))}.items():
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(content), 1.5
            archive.addfile(info, io.BytesIO(content))
    return file.getvalue()


def _tiff(**options: object) -> bytes:
    file = io.BytesIO()
    pixels = np.arange(8 * 8 * 5, dtype=np.uint16).reshape(8, 8, 5)
    tifffile.imwrite(file, pixels, photometric="minisblack", planarconfig="contig", **options)
    return file.getvalue()


def _dicom(syntax: str) -> bytes:
    file = io.BytesIO()
    write_dicom(file, np.arange(64, dtype=np.uint16).reshape(8, 8), syntax=syntax)  # type: ignore[arg-type]
    return file.getvalue()


def _read(path: Path) -> None:
    images = load(DataConfig(str(path.parent if path.suffix in (".tif", ".dcm") else path))).train.images
    images[:]


def _sheet() -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.zeros((2, 1024, 3), np.uint8)).save(file, "PNG")
    return file.getvalue()


def _plain_pickle(path: Path) -> None:
    for value in read_batch_pickle(path.read_bytes(), "a file").values():
        with contextlib.suppress(UserError):
            bytes_array(value, "a value")


def _config(path: Path) -> Config:
    config: Config = from_dict(read_json(path))
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config or "NaN" in json.dumps(to_dict(config))
    return config


def _fitted(path: Path) -> None:
    read_tensors(path)
    load_standardize(Run(path.parent))


def _checkpoint(path: Path) -> None:
    # As a checkpoint from before there were checksums, which would find all of this out.
    load_into(torch.nn.Linear(3, 2), path)


def _state(path: Path) -> None:
    run = Run(path.parents[2])
    for folder in run.checkpoints():
        damage(folder)
    damage(path.parent)
    run.checkpoint()


def _journal(path: Path) -> None:
    Run(path.parent).metrics()


CONFIG = json.dumps(to_dict(Config())).encode()
TENSORS = {"weight": torch.ones(2, 3), "bias": torch.ones(2)}
FITTED = {"standardize.mean": torch.ones(1, 1, 1), "standardize.std": torch.ones(1, 1, 1)}
STATE = json.dumps({"epoch": 1, "step": 4, "files": {"state.json": 9}, "blake2b": {"state.json": "00"}}).encode()
IMAGES = (*map(_image, ("PNG", "JPEG", "BMP", "WEBP", "TIFF")), _image("PNG", "P"))
PICKLES = {name: _batch(2) for name in BATCHES}
SHEETS = {f"{name}.png": _sheet() for name in BATCHES} | {"train_lables.json": b"[0,1,2,3,4,5,6,7,8,9]"}

FORMATS = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)
SYNTAXES = ("1.2.840.10008.1.2.1", "1.2.840.10008.1.2.1.99")
B = {"b.png": IMAGES[0]}

TARGETS = {
    "tar": Target(tuple(map(_tar, FORMATS)), "a.tar", _read, {}),
    "parquet": Target((_table("parquet"),), "a.parquet", _read, B),
    "arrow": Target((_table("arrow"),), "a.arrow", _read, B),
    "tiff": Target((_tiff(), _tiff(compression="zlib"), _tiff(tile=(16, 16))), "a.tif", _read, {}),
    "dicom": Target(tuple(map(_dicom, SYNTAXES)), "a.dcm", _read, {}),
    "image": Target(IMAGES, "a.png", lambda p: load(DataConfig(str(p.parent))), {"b.png": IMAGES[0]}),
    "npy": Target((_npy(np.zeros((3, 4, 4), np.uint8)), _npy(np.zeros((3, 5)))), "a.npy", read_npy, {}),
    "npz": Target((_npz(zipfile.ZIP_STORED), _npz(zipfile.ZIP_DEFLATED)), "a.npz", read_npz, {}),
    "cifar": Target((_batch(2), _batch(4)), "data_batch_3", lambda p: read_cifar10(p.parent), PICKLES),
    "labels": Target((b"[0, 1]",), "test_lables.json", lambda p: read_cifar10(p.parent), SHEETS),
    "pickle": Target((_batch(0), _batch(2), _batch(4)), "a.pickle", _plain_pickle, {}),
    "config": Target((CONFIG,), "config.json", _config, {}),
    "tensors": Target((save(TENSORS),), "encoder.safetensors", _checkpoint, {}),
    "fitted": Target((save(FITTED),), "fitted.safetensors", _fitted, {"config.json": CONFIG}),
    "state": Target((STATE,), "checkpoints/epoch_0001/state.json", _state, {"config.json": CONFIG}),
    "metrics": Target((b'{"step": 1}\n{"step": 2}\n',), "metrics.jsonl", _journal, {"config.json": CONFIG}),
}


def fuzz(target: Target, folder: Path, profile: str) -> int:
    """Read one damaged file after another; returns how many were read or refused, all of them."""
    path, tried = folder / target.name, [0]
    path.parent.mkdir(parents=True, exist_ok=True)
    for name, content in target.others.items():
        (folder / name).write_bytes(content)

    def check(data: bytes) -> None:
        path.write_bytes(data)
        tried[0] += 1
        with contextlib.suppress(UserError):
            target.read(path)

    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
    rules = settings(settings.get_profile(profile), deadline=None, database=None, suppress_health_check=quiet)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rules(given(damaged(*target.files))(check))()
    return tried[0]


@pytest.fixture(autouse=True)
def _small_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    # A damaged header may ask for any size; what is refused here is what Pillow would spend seconds on.
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100_000)


@pytest.mark.parametrize("name", TARGETS)
def test_any_bytes_are_read_or_refused(name: str, tmp_path: Path) -> None:
    assert fuzz(TARGETS[name], tmp_path, "fast") >= 150


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_a_hundred_thousand_files_are_read_or_refused(name: str, tmp_path: Path) -> None:
    # Small targets run out of new examples before the limit; the others make up for it.
    assert fuzz(TARGETS[name], tmp_path, "slow") >= 9_500


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
SETTINGS = [(section, key) for section, values in to_dict(Config()).items() for key in values]


@settings(max_examples=200, deadline=None, database=None)
@given(st.lists(st.tuples(st.sampled_from(SETTINGS), JSON), max_size=3))
def test_any_value_of_any_setting_is_taken_or_refused(changes: list[tuple[tuple[str, str], object]]) -> None:
    values = to_dict(Config())
    for (section, key), value in changes:
        values[section][key] = value
    with contextlib.suppress(UserError):
        assert isinstance(from_dict(values), Config)


@pytest.mark.parametrize("number", [10**400, -(10**400)])
def test_a_number_too_large_for_a_float_is_refused(number: int) -> None:
    with pytest.raises(UserError, match=r"optim\.base_lr must be a number, got a number too large"):
        from_dict({"optim": {"base_lr": number}})


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "1" * 10_000])
def test_json_without_an_end_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match="file must be readable JSON"):
        read_json(tmp_path / "config.json")


def test_a_pickle_that_holds_itself_many_times_over_is_refused_at_once() -> None:
    # Each of sixty tuples holds the one before twice: nothing in memory, and 2**60 items as text.
    doubling = b"".join(b"h%ch%c\x86q%c" % (i, i, i + 1) for i in range(60))
    program = b"\x80\x02K\x01q\x00" + doubling + b"}U\x04datah\x3c)Rs."
    with pytest.raises(UserError, match="'tuple' object is not callable"):
        read_batch_pickle(program, "a file")
