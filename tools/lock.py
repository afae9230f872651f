"""Writes requirements.lock: the versions installed here of everything that `pip install pmae` brings, and no more.

Run it as `.venv/bin/python tools/lock.py` from the root, in an environment whose tests pass.
"""

import tomllib
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

HEADER = """\
# Every dependency of pmae at the version its tests ran with (Linux, x86-64, Python 3.11; extras are not pinned).
# Made by `.venv/bin/python tools/lock.py`. Install: `pip install -r requirements.lock`, then
# `pip install --no-deps .`.
"""


def closure(texts: list[str]) -> dict[str, str]:
    """Name and public version of these requirements and of all that they need on this machine."""
    found: dict[str, str] = {}
    waiting = [Requirement(text) for text in texts]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        wanted = [{"extra": extra} for extra in ("", *requirement.extras)]
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        known = name in found and not requirement.extras
        if not known:
            there = distribution(name)
            found[name] = Version(there.version).public
            inner = [Requirement(text) for text in there.requires or []]
            for each in inner:
                if each.marker is None or any(each.marker.evaluate(extra) for extra in wanted):
                    each.marker = None
                    waiting.append(each)
    return found


def main() -> None:
    """Write the file beside pyproject.toml."""
    root = Path(__file__).parents[1]
    needed = tomllib.loads((root / "pyproject.toml").read_text())["project"]["dependencies"]
    pins = sorted(closure(needed).items())
    (root / "requirements.lock").write_text(HEADER + "".join(f"{name}=={version}\n" for name, version in pins))


if __name__ == "__main__":
    main()
