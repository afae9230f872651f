"""Nothing that is read runs code, leaves its folder, fills the memory or the page, or calls out."""

import ast
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import numpy as np
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from PIL import Image

import pmae
from pmae.config import DataConfig
from pmae.data import fetch
from pmae.data.named import BatchUnpickler, Inert
from pmae.data.sets import load
from pmae.errors import UserError
from pmae.report.page import write_report

SOURCE = Path(pmae.__file__).parent
ROOT = SOURCE.parents[1]
UNSAFE = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml"}
REQUIRED = {
    "np.load": ("allow_pickle", False),
    "numpy.load": ("allow_pickle", False),
    "torch.load": ("weights_only", True),
}


def unsafe_uses(tree: ast.AST) -> list[str]:
    """Imports that can run what they read, and loads that do not say that they must not."""
    found = []
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        found += [f"import {name}" for name in names if name.split(".")[0] in UNSAFE]
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            key, value = REQUIRED.get(called, ("", None))
            given = {word.arg: getattr(word.value, "value", None) for word in node.keywords}
            if (key and given.get(key) is not value) or called in ("eval", "exec"):
                found.append(ast.unparse(node))
    return found


def test_no_file_of_the_package_can_run_what_it_reads() -> None:
    files = list(SOURCE.rglob("*.py"))
    found = {str(file): unsafe_uses(ast.parse(file.read_text())) for file in files}
    assert len(files) > 100
    # The reader of CIFAR-10's batches imports no name that a pickle asks for: find_class makes an inert one.
    known = {str(SOURCE / "data" / "named.py"): ["import pickle"]}
    assert {file: uses for file, uses in found.items() if uses} == known
    assert isinstance(BatchUnpickler(io.BytesIO(b"")).find_class("numpy", "ndarray"), Inert)


@pytest.mark.parametrize(
    "code", ["import pickle", "from joblib import load", "np.load(p)", "torch.load(p, weights_only=False)", "eval(x)"]
)
def test_the_scan_finds_what_it_looks_for(code: str) -> None:
    assert unsafe_uses(ast.parse(code))


OUTSIDE = ("../out.txt", "a/../../out.txt", "/tmp_out.txt")


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("suffix", [".zip", ".tar"])
def test_an_archive_does_not_leave_its_folder(tmp_path: Path, suffix: str, name: str) -> None:
    archive, folder = tmp_path / f"a{suffix}", tmp_path / "inner" / "folder"
    folder.mkdir(parents=True)
    if suffix == ".zip":
        with zipfile.ZipFile(archive, "w") as members:
            members.writestr(name, "bad")
    else:
        with tarfile.open(archive, "w") as members:
            member = tarfile.TarInfo(name)
            member.size = 3
            members.addfile(member, io.BytesIO(b"bad"))
    before = {path for path in tmp_path.rglob("*") if not path.is_relative_to(folder)}
    # Tar members with an absolute name are unpacked below the folder; all others are refused.
    if suffix == ".tar" and name.startswith("/"):
        fetch.extract(archive, folder)
    else:
        with pytest.raises(UserError, match="cannot unpack"):
            fetch.extract(archive, folder)
    assert {path for path in tmp_path.rglob("*") if not path.is_relative_to(folder)} == before
    assert not Path(f"{os.sep}tmp_out.txt").exists()


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_in_an_archive_are_refused(tmp_path: Path, kind: bytes) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as members:
        member = tarfile.TarInfo("link")
        member.type, member.linkname = kind, "../../secret"
        members.addfile(member)
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match=r"cannot unpack a\.tar"):
        fetch.extract(tmp_path / "a.tar", tmp_path / "folder")
    assert not list((tmp_path / "folder").iterdir())


def test_a_picture_larger_than_the_limit_is_refused_by_its_header(tmp_path: Path) -> None:
    # Ten thousand by ten thousand pixels in a few kilobytes; Pillow alone would only warn.
    Image.new("1", (10_000, 10_000)).save(tmp_path / "bomb.png", optimize=True)
    assert (tmp_path / "bomb.png").stat().st_size < 50_000
    with pytest.warns(Image.DecompressionBombWarning), pytest.raises(UserError, match="it may be a decompression bomb"):
        load(DataConfig(str(tmp_path)))


CALLS = """
import json, sys
calls = []
def watch(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto", "urllib.Request"):
        calls.append(f"{event} {arguments[1:]}")
        raise ConnectionError("this test has no network")
sys.addaudithook(watch)
from pmae import api
from pmae.cli import main
api.save_figures = lambda run: []  # the report draws the same ones
codes = [main(command) for command in json.loads(sys.argv[1])]
print(json.dumps([codes, calls]))
"""


def _pictures(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for split, count in (("train", 24), ("test", 8)):
        for name in ("<script>alert(1)<", "&amp;\"'"):
            (folder / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 255, (8, 8), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"<img src=x onerror=alert(2)>{number}.png")


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int], list[str]]:
    """Every common command on hostile names in a process whose every call outside is noted and refused."""
    folder = tmp_path_factory.mktemp("offline")
    _pictures(folder / "data")
    run, data = str(folder / "<script>run"), str(folder / "data")
    sizes = (("width", 16), ("depth", 1), ("heads", 2))
    small = ["--patch-size=4", *(f"--{part}.{key}={n}" for part in ("encoder", "decoder") for key, n in sizes)]
    commands = [
        [
            "pretrain",
            "--data",
            data,
            "--data.labels",
            "folders",
            "--out",
            run,
            "--epochs",
            "2",
            "--device",
            "cpu",
            *small,
        ],
        ["evaluate", run, "--preset", "plain", "--protocols", "knn", "--device", "cpu", "--no-baselines"],
        ["embed", run, "--data", data, "-o", str(folder / "features.npz"), "--device", "cpu"],
        ["export", run, "--format", "timm", "-o", str(folder / "exported")],
        ["report", run, "--out", str(folder / "report.html")],
    ]
    done = subprocess.run(
        [sys.executable, "-c", CALLS, json.dumps(commands)],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    codes, calls = json.loads(done.stdout.splitlines()[-1])
    assert codes == [0] * len(commands), done.stderr
    return folder, codes, calls


def test_no_command_calls_out(offline: tuple[Path, list[int], list[str]]) -> None:
    assert offline[2] == []


def test_a_page_about_hostile_names_is_harmless(offline: tuple[Path, list[int], list[str]]) -> None:
    page = (offline[0] / "report.html").read_text()
    assert "&lt;script&gt;alert(1)" in page
    assert "<script>alert" not in page
    assert "<script>run" not in page
    assert not re.search(r"<img[^>]*onerror", page)


def test_a_page_about_a_folder_that_is_no_run_is_harmless(
    offline: tuple[Path, list[int], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pmae.report.page.write_beside", lambda *_: None)  # seconds of figures of the run
    (tmp_path / "<script>alert(1)").mkdir()
    write_report([offline[0] / "<script>run", tmp_path / "<script>alert(1)"], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "&lt;script&gt;" in page
    assert "<script>alert" not in page


def test_the_lock_pins_every_dependency_to_a_version_that_the_project_allows() -> None:
    lines = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if not line.startswith("#")]
    pins = {canonicalize_name(line.split("==")[0]): line.split("==")[1].split(" ")[0] for line in lines}
    wanted = [
        Requirement(text) for text in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    ]
    for requirement in wanted:
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), requirement
        for text in distribution(requirement.name).requires or []:
            inner = Requirement(text)
            if inner.marker is None or inner.marker.evaluate({"extra": ""}):
                assert canonicalize_name(inner.name) in pins, f"{requirement.name} needs {inner.name}"
    assert all(re.fullmatch(r"[a-z0-9.-]+==[0-9a-z.]+ --hash=sha256:[0-9a-f]{64}", line) for line in lines)
    # Every Pillow before 12.3 has known holes in what it decodes.
    (pillow,) = (requirement for requirement in wanted if requirement.name == "pillow")
    assert not pillow.specifier.contains("12.2.0")
