"""The wheel carries everything that the package reads at run time."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD = "import sys; from setuptools.build_meta import build_wheel; print(build_wheel(sys.argv[1]))"


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Files in a wheel that is built from a copy, so that nothing is left in the tree."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    subprocess.run([sys.executable, "-c", BUILD, str(out)], cwd=copy, capture_output=True, check=True)
    with zipfile.ZipFile(next(out.glob("*.whl"))) as wheel:
        return set(wheel.namelist())


def test_every_file_of_the_package_is_in_the_wheel(names: set[str]) -> None:
    source = ROOT / "src"
    files = {p.relative_to(source).as_posix() for p in (source / "pmae").rglob("*") if p.is_file()}
    assert {name for name in files if "__pycache__" not in name} == {n for n in names if n.startswith("pmae/")}


def test_types_templates_and_the_command_travel_along(names: set[str]) -> None:
    assert {"pmae/py.typed", "pmae/report/page.html.j2", "pmae/report/published.json"} <= names
    assert any(name.endswith("entry_points.txt") for name in names)
    assert not any(name.startswith("tests") for name in names)
