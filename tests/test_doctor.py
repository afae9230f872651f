"""The doctor: a healthy machine passes, each trouble is named with what to do, and nothing it starts outlives it."""

import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from pmae import doctor
from pmae.cli import main
from pmae.doctor import ask

GB = 10**9
SET = {"words": ["toy: 10 training images"], "mapped": False}


def levels(findings: object) -> dict[str, str]:
    return {finding.subject: finding.level for finding in findings}  # type: ignore[attr-defined]


def test_a_healthy_machine_is_ready(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "images.npy", np.zeros((20, 16, 24, 2), np.uint16))
    assert main(["doctor", "--data", str(tmp_path / "images.npy")]) == 0
    printed = capsys.readouterr().out
    assert f"torch {torch.__version__.split('+')[0]}" in printed
    assert "two processes over Gloo agree" in printed
    assert "20 training images of 16x24, 2 channels, uint16" in printed
    # The covariance, its eigenvectors and the workspace of 2 x 16 x 24 pixels, in float64.
    assert f"needs about {4 * 8 * (2 * 16 * 24) ** 2 / 1e6:.1f} MB of memory" in printed
    assert printed.endswith("ready to train\n")


def test_a_problem_has_advice_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    findings = [doctor.Finding("ok", "one", "fine"), doctor.Finding("problem", "two", "broken", "mend it")]
    monkeypatch.setattr(doctor, "examine", lambda *_: iter(findings))
    with pytest.raises(SystemExit) as stop:
        main(["doctor"])
    assert stop.value.code == 1
    assert capsys.readouterr().out == "ok       one            fine\nproblem  two            broken   -> mend it\n"


def test_a_probe_that_hangs_is_ended_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Every Python started with this folder on its path starts a child, notes both and sleeps.
    (tmp_path / "sitecustomize.py").write_text(
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(100)'])\n"
        f"open({str(tmp_path / 'pids')!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        "time.sleep(100)\n"
    )
    began = time.monotonic()
    monkeypatch.setitem(doctor.PATIENCE, "devices", 4.0)
    assert ask("devices", PYTHONPATH=str(tmp_path)) == {"trouble": "no answer within 4 s"}
    assert time.monotonic() - began < 20
    time.sleep(0.2)
    assert [pid for pid in (tmp_path / "pids").read_text().split() if _lives(pid)] == []


def _lives(pid: str) -> bool:
    if sys.platform != "linux":
        return os.system(f"kill -0 {pid} 2>/dev/null") == 0
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_probe_that_crashes_says_its_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(doctor.PATIENCE, "nothing", 60.0)
    assert ask("nothing") == {"trouble": "KeyError: 'nothing'"}
    found = list(doctor.room({"trouble": "data.source: there is no file"}, None))
    assert [(f.level, f.subject, f.words) for f in found] == [("problem", "data", "data.source: there is no file")]


def test_the_bytes_of_a_set_are_those_of_the_arrays(tmp_path: Path) -> None:
    train, test = np.zeros((30, 1, 8, 8), np.float32), np.zeros((10, 1, 8, 8), np.float32)
    np.savez(tmp_path / "set.npz", train_images=train, test_images=test)
    found = doctor.probe_data(str(tmp_path / "set.npz"), "data")
    assert found["set"] == train.nbytes + test.nbytes
    assert found["fit"] == 4 * 8 * 64**2
    assert found["disk"] > 4 * 64**2


def test_too_little_room_is_a_problem_and_a_mapped_file_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "available_bytes", lambda: 10 * GB)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 5 * GB}))
    small = {**SET, "set": GB, "fit": GB, "disk": GB}
    assert levels(doctor.room(small, None)) == {"data": "ok", "set": "ok", "pca fit": "ok", "disk": "ok"}
    large = {**SET, "set": 20 * GB, "fit": 11 * GB, "disk": 6 * GB}
    found = levels(doctor.room(large, None))
    assert found == {"data": "ok", "set": "problem", "pca fit": "problem", "disk": "problem"}
    mapped = levels(doctor.room({**large, "mapped": True}, 100 * GB))
    assert mapped == {"data": "ok", "set": "ok", "pca fit": "ok", "disk": "problem"}
    assert levels(doctor.room({**large, "mapped": True}, 30 * GB))["set"] == "warning"


def test_devices_are_told_with_what_they_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [{"name": "new", "capability": 9, "free": 80 * GB}, {"name": "old", "capability": 7, "free": 8 * GB}]
    found = list(doctor.devices({"cuda": "12", "threads": 4, "devices": cards}))
    assert [f.level for f in found] == ["ok", "warning"]
    assert found[1].words == "old, 8.0 GB free, no bfloat16"
    monkeypatch.setattr(doctor.shutil, "which", lambda _: "/usr/bin/nvidia-smi")
    alone = {"cuda": None, "threads": 4, "precision": "float32", "devices": []}
    hidden = list(doctor.devices(alone))
    assert (hidden[0].level, "built without CUDA" in hidden[0].words) == ("warning", True)
    assert next(doctor.devices({"trouble": "driver hangs"})).level == "problem"


@pytest.mark.parametrize("has_units", [True, False])
def test_a_cpu_says_what_it_trains_in(has_units: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_units, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    (found,) = doctor.devices(doctor.probe_devices())
    expected = "trains in bfloat16, for it has matrix units for that (AMX)" if has_units else "trains in float32"
    assert expected in found.words
    assert ("AMX" in found.words) is has_units


@pytest.mark.parametrize(("on_gpu", "level"), [(True, "problem"), (False, "warning")])
def test_a_compiler_that_hangs_matters_on_a_gpu(monkeypatch: pytest.MonkeyPatch, on_gpu: bool, level: str) -> None:
    monkeypatch.setitem(doctor.PATIENCE, "compiled", 0.01)
    found = doctor.compiler(on_gpu)
    assert found.level == level
    assert "no answer within 0.01 s" in found.words


def test_processes_that_do_not_meet_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(doctor.PATIENCE, "all_reduce", 0.01)
    found = doctor.communication()
    assert (found.level, found.words) == (
        "problem",
        "two processes over Gloo do not agree: no answer within 0.01 s",
    )


def test_a_package_that_is_too_old_or_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = ["torch>=99", "surely-not-installed>=1", "numpy>=1", "absent-extra>=2; extra == 'export'"]
    monkeypatch.setattr(doctor.metadata, "requires", lambda _: needs)
    told = type("Told", (), {"get_all": lambda self, key: ["export"]})()
    monkeypatch.setattr(doctor.metadata, "metadata", lambda _: told)
    found, extra = doctor.packages()
    assert found.level == "problem"
    assert f"torch {torch.__version__.split('+')[0]} is not >=99; surely-not-installed is missing" == found.words
    assert (extra.level, extra.words) == ("ok", "not installed: absent-extra is missing")
    assert "pip install 'pmae[export]'" in extra.advice
