"""The doctor: a healthy machine passes, each trouble is named with what to do, and nothing it starts outlives it."""

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from tests.commands import started
from tests.step_memory import first_step
from torch._inductor import config as inductor

from pmae import doctor
from pmae.cli import main
from pmae.config import Config, replace
from pmae.derive import resolve
from pmae.doctor import ask
from pmae.method import build_method


def levels(findings: object) -> dict[str, str]:
    return {finding.subject: finding.level for finding in findings}  # type: ignore[attr-defined]


def test_a_healthy_machine_is_ready(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "images.npy", np.zeros((20, 16, 24, 2), np.uint16))
    assert main(["doctor", "--data", str(tmp_path / "images.npy")]) == 0
    printed = capsys.readouterr().out
    assert f"torch {torch.__version__.split('+')[0]}" in printed
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
    monkeypatch.setitem(doctor.CHECKS, "devices", doctor.CHECKS["devices"]._replace(seconds=4.0))
    (found,) = ask("devices", PYTHONPATH=str(tmp_path))
    assert found == ("problem", "devices", "no answer within 4 s", "reinstall torch")
    assert time.monotonic() - began < 20
    time.sleep(0.2)
    assert [pid for pid in (tmp_path / "pids").read_text().split() if _lives(pid)] == []


def _lives(pid: str) -> bool:
    if sys.platform != "linux":
        return os.system(f"kill -0 {pid} 2>/dev/null") == 0
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_check_that_fails_says_its_last_line(tmp_path: Path) -> None:
    (found,) = ask("data", str(tmp_path / "no.npy"), "data")
    # The message is whole; only of what nobody foresaw is the advice all there is to go by.
    assert (found.level, found.subject, found.advice) == ("problem", "data", "")
    assert found.words == f"data.source: there is no file or folder {tmp_path / 'no.npy'}"
    (found,) = ask("data")
    assert "missing 2 required positional arguments" in found.words
    assert found.advice == "see what --data names"


def test_the_bytes_of_a_set_are_those_of_the_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, test = np.zeros((30, 1, 8, 8), np.float32), np.zeros((10, 1, 8, 8), np.float32)
    np.savez(tmp_path / "set.npz", train_images=train, test_images=test)
    monkeypatch.setattr(doctor, "decimal", str)
    found = {f.subject: f.words for f in doctor.check_data(str(tmp_path / "set.npz"), "data")}
    assert found["set"].startswith(f"needs about {train.nbytes + test.nbytes} of memory")
    assert found["pca fit"].startswith(f"needs about {4 * 8 * 64**2} of memory")
    assert int(found["disk"].split()[2]) > 4 * 64**2


def test_too_little_room_is_a_problem_and_a_mapped_file_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = np.zeros((30, 16, 16), np.uint8)
    np.save(tmp_path / "in.npy", images)
    np.savez(tmp_path / "in.npz", images=images)

    def found(name: str) -> dict[str, str]:
        return levels(doctor.check_data(str(tmp_path / name), "data"))

    assert found("in.npz") == {"data": "ok", "set": "ok", "pca fit": "ok", "training": "ok", "disk": "ok"}
    monkeypatch.setattr(doctor, "available_bytes", lambda: 1000)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    troubled = dict.fromkeys(["set", "pca fit", "training", "disk"], "problem")
    assert found("in.npz") == {"data": "ok", **troubled}
    assert found("in.npy")["set"] == "ok"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (images.nbytes, 0))
    assert found("in.npy")["set"] == "warning"


def test_what_an_encoder_takes_is_foretold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(4):
        Image.new("RGB", (96, 80 + number), (number, 0, 0)).save(tmp_path / f"{number}.png")
    monkeypatch.setattr(doctor, "decimal", str)
    found = {f.subject: f.words for f in doctor.check_data(str(tmp_path), "data", "resnet10t", "64")}
    assert found["crops"].startswith("crops are cut from the files' own pixels")
    assert found["training"].startswith("resnet10t, batches of 4, 1 view of ")
    view, need = int(found["training"].split()[7]), int(found["training"].split(" needs about ")[1].split()[0])
    # The first convolution's output alone is 24 maps of 32x32; weights, gradients and moments are 16 bytes each.
    assert view > 4 * 24 * 32 * 32
    assert need > 4 * view + 16 * sum(p.numel() for p in timm.create_model("resnet10t", num_classes=0).parameters())


def test_devices_are_told_with_what_they_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [SimpleNamespace(name="new", major=9), SimpleNamespace(name="old", major=7)]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cards))
    monkeypatch.setattr(torch.cuda, "get_device_properties", cards.__getitem__)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (8 * 10**9, 0))
    found = list(doctor.check_devices())
    assert [f.level for f in found] == ["ok", "warning"]
    assert found[1].words == "old, 8.0 GB free, no bfloat16"


@pytest.mark.parametrize("has_units", [True, False])
def test_a_cpu_says_what_it_trains_in(has_units: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_units, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    (found,) = doctor.check_devices()
    expected = "trains in bfloat16, for it has matrix units for that (AMX)" if has_units else "trains in float32"
    assert expected in found.words
    assert ("AMX" in found.words) is has_units
    monkeypatch.setattr(doctor.shutil, "which", lambda _: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(torch.version, "cuda", None)
    (found,) = doctor.check_devices()
    assert (found.level, "built without CUDA" in found.words) == ("warning", True)


def test_the_compiler_is_asked_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def ask_quickly(name: str, *_: str, **__: str) -> list[doctor.Finding]:
        asked.append(name)
        return [doctor.Finding("ok", "cuda:0", "a card")] if name == "devices" else []

    monkeypatch.setattr(doctor, "ask", ask_quickly)
    list(doctor.examine())
    assert asked == ["devices", "compiler"]
    # Really compiled, but neither for every kind of CPU in turn nor with all of torch's headers in advance.
    with inductor.patch({"compile_threads": 1, "cpp.vec_isa_ok": False, "cpp_cache_precompile_headers": False}):
        assert levels(doctor.check_compiler()) == {"compiler": "ok"}


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


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("side", "batch", "precision"), [(32, 256, "float32"), (32, 256, "bfloat16"), (160, 32, "float32")]
)
def test_a_step_on_a_cpu_takes_what_was_foretold(side: int, batch: int, precision: str, tmp_path: Path) -> None:
    # Told which, not asked: a step in bfloat16, which a CPU with AMX picks, keeps half as much as one in float32.
    process = started(first_step, side, batch, precision, tmp_path / "run", said=str(tmp_path / "said"))
    process.join(120)
    said = (tmp_path / "said").read_text()
    assert process.exitcode == 0, said
    foretold, measured = map(int, said.split())
    assert 0.7 * measured < foretold < 1.4 * measured


def test_local_views_take_their_share_of_the_memory(tiny: Config) -> None:
    def needed(views: int) -> int:
        given = replace(tiny, objective__contrastive_weight=1.0, objective__local_views=views)
        model = build_method(resolve(given, 64, (3, 16, 16))[0], (3, 16, 16)).train()
        assert model.contrastive
        local, model.contrastive = model.contrastive.windows if views else None, None
        return doctor.saved_bytes(model, (3, 16, 16), 3, local) - doctor.saved_bytes(model, (3, 16, 16), 2, local)

    none, two, four = map(needed, (0, 2, 4))
    assert none < two < four
    # The patches of an image are embedded once for all its windows; each window then has the blocks to itself.
    assert 0.5 * (two - none) < four - two <= 2 * (two - none)
