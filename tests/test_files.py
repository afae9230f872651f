"""Files appear whole, with ordinary permissions, follow no planted link, and leave nothing behind; locks hold."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from pmae import files
from pmae.errors import UserError
from pmae.files import clear_stale, lock, read_tensors, write_json, write_tensors, write_text, write_whole
from pmae.runs import Run

POSIX = pytest.mark.skipif(os.name == "nt", reason="permissions and signals of POSIX")


@pytest.fixture
def dead() -> int:
    """The number of a process that is gone."""
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return done.pid


@POSIX
@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_files_have_the_permissions_that_the_umask_says(tmp_path: Path, mask: int, mode: int) -> None:
    before = os.umask(mask)
    try:
        write_tensors(tmp_path / "a.safetensors", {"x": torch.ones(2)})
        write_json(tmp_path / "a.json", {})
        write_whole(tmp_path / "folder", lambda folder: (folder.mkdir(), write_tensors(folder / "b", {})))
    finally:
        os.umask(before)
    made = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(made) == 3
    assert {path.stat().st_mode & 0o777 for path in made} == {mode}
    assert read_tensors(tmp_path / "a.safetensors")["x"].sum() == 2


@POSIX
def test_temporary_names_cannot_be_guessed_and_planted_links_are_not_followed(tmp_path: Path) -> None:
    seen: list[str] = []

    def write(temporary: Path) -> None:
        seen.append(temporary.name)
        temporary.write_text("new")

    victim = write_text(tmp_path / "victim", "old")
    folder = tmp_path / "shared"
    folder.mkdir()
    (folder / f".a.txt.{os.getpid()}.part").symlink_to(victim)
    (folder / ".a.txt.lock").symlink_to(victim)
    for _ in range(2):
        write_whole(folder / "a.txt", write)
    assert seen[0] != seen[1]
    assert victim.read_text() == "old"
    with pytest.raises(UserError, match="cannot be written"), lock(folder / "a.txt"):
        pass
    (folder / "b.txt").symlink_to(victim)
    write_text(folder / "b.txt", "new")
    assert victim.read_text() == "old"


def test_what_a_dead_process_left_is_cleared_and_what_others_write_stays(tmp_path: Path, dead: int) -> None:
    left = [f".o.npz.{files.HOST}-00ff.{dead}.part", f".o.npz.{dead}.part"]
    kept = [f".o.npz.{files.HOST}-00ff.{os.getpid()}.part", f".o.npz.00000000-00ff.{dead}.part", f".p.npz.{dead}.part"]
    for name in left + kept:
        (tmp_path / name).write_text("half")
    (tmp_path / f".o.npz.{files.HOST}-aa.{dead}.part").mkdir()
    write_text(tmp_path / "o.npz", "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*kept, "o.npz"])
    clear_stale(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*kept[:2], "o.npz"])


WRITING = """
import sys, time
from pathlib import Path
from pmae.files import write_whole
def write(temporary):
    temporary.write_text("half")
    print("writing", flush=True)
    time.sleep(60)
write_whole(Path(sys.argv[1]) / "a.npz", write)
"""


@POSIX
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_a_signal_leaves_nothing_half_written(tmp_path: Path, name: str) -> None:
    number = getattr(signal, name)
    child = subprocess.Popen(
        [sys.executable, "-c", WRITING, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"writing\n"
    child.send_signal(number)
    assert child.wait(30) in (128 + number, -number)
    assert not list(tmp_path.iterdir())


UPDATING = """
import sys
from pmae.runs import Run
for number in range(50):
    Run(sys.argv[1]).add_results(**{f"{sys.argv[2]}-{number}": number})
"""


def test_four_processes_lose_none_of_200_updates(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {})
    commands = [[sys.executable, "-c", UPDATING, str(tmp_path), str(writer)] for writer in range(4)]
    writers = [subprocess.Popen(command) for command in commands]
    assert [writer.wait(120) for writer in writers] == [0] * 4
    assert len(Run(tmp_path).results) == 200
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "results.json"]


HOLDING = """
import sys, time
from pathlib import Path
from pmae.files import lock
with lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@POSIX
def test_a_process_that_is_killed_lets_go(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", HOLDING, str(tmp_path / "x")], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"held\n"
    child.kill()
    child.wait()
    began = time.monotonic()
    with lock(tmp_path / "x"):
        assert time.monotonic() - began < 10
    assert not list(tmp_path.iterdir())


def test_without_the_systems_locks_files_are_still_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)
    write_json(tmp_path / "config.json", {})
    Run(tmp_path).add_results(held_out=["a"])
    assert Run(tmp_path).results == {"held_out": ["a"]}


def test_a_file_never_takes_the_place_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "kept.txt").write_text("years of work")
    with pytest.raises(UserError, match="a folder is in its place"):
        write_text(tmp_path / "results", "a page")
    assert (tmp_path / "results" / "kept.txt").read_text() == "years of work"
    assert [path.name for path in tmp_path.iterdir()] == ["results"], "nothing half-written is left"
