"""Killed without warning, at random moments and at every kind of write, a run ends as if nothing had happened."""

import json
from pathlib import Path

import pytest
from tests.commands import started

from .killing import kill


def killed(folder: Path, seed: int, **kills: int) -> dict[str, int]:
    process = started(kill, folder, seed, kills, said=str(folder / "said"))
    process.join()
    assert process.exitcode == 0, (folder / "said").read_text()
    found: dict[str, int] = json.loads((folder / "kills.json").read_text())
    return found


def test_a_run_killed_a_few_times_equals_one_left_in_peace(tmp_path: Path) -> None:
    assert killed(tmp_path, 0, moments=2, writes=2) == {"moments": 2, "writes": 2}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["moments", "writes"])
def test_a_run_killed_fifty_times_equals_one_left_in_peace(tmp_path: Path, how: str) -> None:
    assert killed(tmp_path, 1, **{how: 50}) == {how: 50}
