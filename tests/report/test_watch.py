"""The live page: what it says of runs in every state, whom it answers, and what one can do on it in a browser."""

import json
import math
import os
import shutil
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pmae.cli import main
from pmae.errors import UserError
from pmae.report.watch import Watched, serve
from pmae.runs import Run

HOSTILE = "<img src=x onerror=alert(1)>"
WIDE = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
ROWS = "return [...document.querySelectorAll('#runs tbody tr')].map(row => row.innerText).join(';')"
LINES = "return document.querySelectorAll('#curves .panel:first-child path').length"


@pytest.fixture(scope="module")
def folder(write_run: Callable[..., Run], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, one that this process trains, one whose process died, and one whose loss was not finite."""
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder, HOSTILE)
    holder = {"training": os.getpid(), "stopped": 2**22 + 1}
    for name, epochs in (("training", 2), ("stopped", 1), ("failed", 1)):
        run = write_run(folder, name, epochs=epochs, pictures=name == "training")
        if name in holder:
            (run.path / ".lock").write_text(f"{holder[name]} on {socket.gethostname()}\n")
    (folder / "failed" / "failure_step_00000003.safetensors").touch()
    (folder / "no run").mkdir()
    return folder


@contextmanager
def running(folder: Path, port: int | None = None) -> Iterator[ThreadingHTTPServer]:
    """The page's server in a thread, until the end of a block."""
    said: list[str] = []
    server = serve(folder, port, said.append)
    assert said[0].startswith(f"watching {folder} at http://127.0.0.1:")
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ThreadingHTTPServer]:
    with running(folder) as server:
        yield server


def ask(server: ThreadingHTTPServer, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes]:
    """Status and body of an answer."""
    address = f"http://127.0.0.1:{server.server_address[1]}{path}"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(urllib.request.Request(address, method=method, headers=headers), timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_every_state_is_told_with_the_time_that_is_left(folder: Path) -> None:
    found = {run["name"]: run for run in Watched(folder).state()["runs"]}
    states = {name: run["state"] for name, run in found.items()}
    assert states == {HOSTILE: "finished", "training": "training", "stopped": "stopped", "failed": "failed"}
    # One epoch is left: 10 steps of 20 images at 100 images a second.
    assert found["training"]["left"] == pytest.approx(2.0)
    assert found["stopped"]["left"] is None
    assert found[HOSTILE]["r2"] == pytest.approx(0.2)


def test_a_run_is_read_again_when_it_goes_on_and_nothing_is_written(
    write_run: Callable[..., Run], tmp_path: Path
) -> None:
    run, watched = write_run(tmp_path, "a", epochs=1), Watched(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    first = watched.runs()[0]
    assert watched.runs()[0] is first
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    line = {"epoch": 2.0, "step": 20, "loss": 0.1, "r2": 0.5, "lr": 1e-3, "images_per_second": 50.0}
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    assert watched.state()["runs"][0]["epoch"] == 2
    shutil.rmtree(run.path)
    assert watched.state()["runs"] == []


def test_a_run_that_diverged_does_not_hide_the_others(write_run: Callable[..., Run], tmp_path: Path) -> None:
    run = write_run(tmp_path, "a", epochs=1)
    line = {"epoch": 2.0, "step": 20, "loss": math.nan, "r2": math.inf, "images_per_second": 50.0}
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    with running(tmp_path) as server:
        text = ask(server, "/runs.json")[1]
    (told,) = json.loads(text, parse_constant=pytest.fail)["runs"]  # a browser knows no NaN
    assert (told["epoch"], told["loss"]) == (2, None)


def test_a_line_without_its_numbers_does_not_hide_the_others(write_run: Callable[..., Run], tmp_path: Path) -> None:
    broken, whole = (write_run(tmp_path, name, epochs=1) for name in "ab")
    line = {"epoch": 2.0, "step": 20, "loss": 1.0, "r2": 0.1, "images_per_second": None}
    with (broken.path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    found = {run["name"]: run["speed"] for run in Watched(tmp_path).state()["runs"]}
    assert found == {"a": None, "b": 100.0}
    assert whole.metrics()


def test_only_this_machine_is_answered_and_only_with_runs(server: ThreadingHTTPServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    assert ask(server, "/runs.json")[0] == 200
    assert ask(server, "/runs.json", Host="evil.example")[0] == 400
    assert ask(server, "/runs.json", Host="localhost")[0] == 200, "as with --port 80"
    assert ask(server, "/", method="POST")[0] == 501
    for path in ("/../etc/passwd", "/config.json", "/picture.png?run=../training", "/picture.png?run=stopped"):
        assert ask(server, path)[0] == 404, path
    status, picture = ask(server, "/picture.png?run=training")
    assert status == 200
    assert picture.startswith(b"\x89PNG")


@pytest.mark.parametrize(("width", "theme"), [(390, "light"), (390, "dark"), (1280, "light"), (1280, "dark")])
def test_runs_are_ticked_to_be_compared(
    server: ThreadingHTTPServer,
    browser: Any,
    look: Callable[[Any, int, str], None],
    barriers: Callable[[Any], list[str]],
    width: int,
    theme: str,
) -> None:
    look(browser, width, theme)
    browser.get(f"http://127.0.0.1:{server.server_address[1]}/")
    until(lambda: browser.execute_script(LINES) == 4)
    shown = browser.execute_script(ROWS)
    assert HOSTILE in shown, "a run's name stays text"
    assert "▶ training" in shown
    browser.execute_script("document.querySelectorAll('#runs input')[1].click()")
    assert browser.execute_script(LINES) == 3
    assert browser.execute_script("return document.querySelectorAll('#pictures img').length") == 2
    for count in (4, 0, 4):
        browser.execute_script("document.getElementById('all').click()")
        assert browser.execute_script(LINES) == count
    assert browser.execute_script(WIDE) <= 0
    assert barriers(browser) == []
    assert [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []


def test_an_open_page_goes_on_when_its_server_is_started_again(folder: Path, browser: Any) -> None:
    lost = "return !document.getElementById('lost').hidden"
    with running(folder) as first:
        port = first.server_address[1]
        browser.get(f"http://127.0.0.1:{port}/")
        until(lambda: browser.execute_script(LINES) == 4)
    browser.execute_script("look()")
    until(lambda: browser.execute_script(lost))
    assert browser.execute_script(LINES) == 4, "what was seen stays"
    with running(folder, port):
        browser.execute_script("look()")
        until(lambda: not browser.execute_script(lost))
        browser.refresh()
        until(lambda: browser.execute_script(LINES) == 4)
    browser.get_log("browser")  # holds the request that was not answered


def until(holds: Callable[[], bool]) -> None:
    """Wait for the page; a machine that is busy needs its time."""
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_what_cannot_be_watched_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(tmp_path / "nowhere")]) == 2
    assert "folder must be a folder with runs" in capsys.readouterr().err
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UserError, match="port must be one that nobody uses"):
            serve(tmp_path, taken.getsockname()[1], print)
