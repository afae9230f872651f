"""Killed without warning, at random moments and at every kind of write, a run ends as if nothing had happened."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def killed(folder: Path, kills: int, seed: int, how: str) -> dict[str, float]:
    command = [sys.executable, str(Path(__file__).with_name("killing.py")), str(folder), str(kills), str(seed), how]
    # One thread: the harness forks, and threads do not survive a fork.
    alone = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=alone, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, float] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(("how", "kills"), [("moments", 3), ("writes", 2)])
def test_a_run_killed_a_few_times_equals_one_left_in_peace(tmp_path: Path, how: str, kills: int) -> None:
    assert killed(tmp_path, kills, 0, how)["kills"] == kills


@pytest.mark.slow
@pytest.mark.parametrize("how", ["moments", "writes"])
def test_a_run_killed_fifty_times_equals_one_left_in_peace(tmp_path: Path, how: str) -> None:
    assert killed(tmp_path, 50, 1, how)["kills"] == 50
