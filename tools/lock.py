"""Writes requirements.lock: everything `pip install pmae` brings, at the versions installed here, with checksums.

Run it as `.venv/bin/python tools/lock.py` from the root, in an environment whose tests pass.
"""

import json
import subprocess
import sys
import tempfile
from importlib.metadata import distributions
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import Version

HEADER = """\
# Every dependency of pmae at the version its tests ran with (Linux, x86-64, Python 3.11; extras are not pinned).
# Made by `.venv/bin/python tools/lock.py`. Install: `pip install --require-hashes -r requirements.lock`, then
# `pip install --no-deps .`.
"""


def resolved(root: Path) -> list[tuple[str, str, str]]:
    """Name, version and SHA-256 of each package that pip would install with the project, held to what is here."""
    here = {d.name: Version(d.version).public for d in distributions() if canonicalize_name(d.name) != "pmae"}
    with tempfile.TemporaryDirectory() as folder:
        held, report = Path(folder, "constraints.txt"), Path(folder, "report.json")
        held.write_text("".join(f"{name}=={version}\n" for name, version in here.items()))
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        subprocess.run([*pip, "--report", report, "--constraint", held, root], check=True)
        items = json.loads(report.read_text())["install"]
    return [_pin(item) for item in items if "dir_info" not in item["download_info"]]


def _pin(item: dict[str, dict[str, dict[str, dict[str, str]]]]) -> tuple[str, str, str]:
    name, version = str(item["metadata"]["name"]), str(item["metadata"]["version"])
    return canonicalize_name(name), version, item["download_info"]["archive_info"]["hashes"]["sha256"]


def main() -> None:
    """Write the file beside pyproject.toml."""
    root = Path(__file__).parents[1]
    lines = [f"{name}=={version} --hash=sha256:{digest}\n" for name, version, digest in sorted(resolved(root))]
    (root / "requirements.lock").write_text(HEADER + "".join(lines))


if __name__ == "__main__":
    main()
