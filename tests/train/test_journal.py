"""What a run says: plain lines where there is no terminal, a live one where there is, whole lines in metrics.jsonl."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from pmae.train.journal import Journal

VALUES = {"epoch": 1.5, "loss": 0.25, "r2": 0.5, "images_per_second": 1234.0}


def test_plain_lines_without_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Journal(tmp_path / "metrics.jsonl", epochs=3, steps=10, done=0) as journal:
        journal.show(VALUES, 15)
        journal.show(VALUES, 16)
        journal.show({**VALUES, "epoch": 3.0}, 30)
    printed = capsys.readouterr().out.splitlines()
    # How long the rest takes is not told from steps that compile and warm up.
    assert printed[0] == "epoch 1.5/3  1,234 images/s  loss 0.2500  R2 +0.500"
    # The second came within seconds and is left out; the last of a run is always printed.
    assert len(printed) == 2
    assert printed[1].endswith("0:00:00 left")


def test_the_time_left_is_told_from_the_steps_after_the_first_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter(range(0, 1000, 20))
    with Journal(tmp_path / "metrics.jsonl", epochs=3, steps=10, done=0) as journal:
        monkeypatch.setattr("pmae.train.journal.time.monotonic", lambda: next(clock))
        for step in (1, 2, 3):
            journal.show(VALUES, step)
        monkeypatch.undo()
    left = [line.partition("R2 +0.500")[2] for line in capsys.readouterr().out.splitlines()]
    assert left == ["", "  0:09:20 left", "  0:09:00 left"]


def test_quiet_says_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Journal(tmp_path / "metrics.jsonl", 3, 10, 0, quiet=True) as journal:
        journal.show(VALUES, 30)
    assert capsys.readouterr().out == ""


def test_a_terminal_gets_a_live_line(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from pmae.train.journal import Journal\n"
        f"with Journal(Path({str(tmp_path / 'm.jsonl')!r}), 3, 10, 0) as journal:\n"
        f"    journal.show({VALUES!r}, 15)\n"
    )
    master, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    subprocess.run([sys.executable, "-c", code], stdout=terminal, stderr=terminal, env=environment, check=True)
    os.close(terminal)
    shown = os.read(master, 10_000).decode()
    os.close(master)
    assert "epoch 1.5/3  1,234 images/s  loss 0.2500  R2 +0.500" in shown


def test_resuming_forgets_later_and_half_written_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in (1, 2, 3)) + '{"step": 4, "lo')
    Journal(path, epochs=3, steps=10, done=2)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]
