"""Killed without warning, at random moments and at every kind of write, a run ends as if nothing had happened."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def killed(folder: Path, seed: int, **kills: int) -> dict[str, int]:
    words = [f"{how}={count}" for how, count in kills.items()]
    command = [sys.executable, str(Path(__file__).with_name("killing.py")), str(folder), str(seed), *words]
    # One thread: the harness forks, and threads do not survive a fork.
    alone = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=alone, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout)
    return found


def test_a_run_killed_a_few_times_equals_one_left_in_peace(tmp_path: Path) -> None:
    assert killed(tmp_path, 0, moments=2, writes=2) == {"moments": 2, "writes": 2}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["moments", "writes"])
def test_a_run_killed_fifty_times_equals_one_left_in_peace(tmp_path: Path, how: str) -> None:
    assert killed(tmp_path, 1, **{how: 50}) == {how: 50}
