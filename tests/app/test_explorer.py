"""The server and the page in a real browser: what it shows, what it refuses, and that nothing leaves the machine."""

import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pmae.app import explorer
from pmae.app.material import Material
from pmae.cli import main
from pmae.errors import UserError

WIDE = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
TEXT = "return document.querySelector(arguments[0])?.innerText || ''"
SHOWN = "return document.querySelectorAll(arguments[0] + ' figure img').length"
MOVE = """const field = document.querySelector('#share input[type=range]'); field.value = arguments[0];
for (const kind of ['input', 'pointerup']) field.dispatchEvent(new Event(kind, {bubbles: true}))"""

FIRST_SCREEN = "return document.querySelector('#masks figure').getBoundingClientRect().bottom < window.innerHeight"
FADING = """window.least = 1; window.looking = true;
const look = () => {
  for (let at = document.querySelector('#masks figure'); at; at = at.parentElement)
    window.least = Math.min(window.least, +getComputedStyle(at).opacity);
  if (window.looking) requestAnimationFrame(look);
};
look()"""


@pytest.fixture(scope="module")
def addresses() -> Iterator[list[str]]:
    """Every host that this process connects to or asks a name server for."""
    seen: list[str] = []
    connect, look_up = socket.socket.connect, socket.getaddrinfo

    def connecting(self: socket.socket, address: Any) -> None:
        seen.append(address[0] if isinstance(address, tuple) else "a file")
        connect(self, address)

    def looking_up(host: Any, *more: Any, **settings: Any) -> Any:
        seen.append(str(host))
        return look_up(host, *more, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", connecting)
        patch.setattr(socket, "getaddrinfo", looking_up)
        yield seen


@pytest.fixture(scope="module")
def served(trained: Material, addresses: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One server for all tests of this module."""
    pytest.importorskip("gradio", reason="gradio is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADIO_TEMP_DIR", str(tmp_path_factory.mktemp("gradio")))
        page, address = explorer.open_page(trained, browser=False)
        try:
            yield address
        finally:
            page.close(verbose=False)


def until(holds: Callable[[], bool], what: str) -> None:
    """Wait for the page; a machine that is busy needs its time."""
    end = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < end, f"waited for {what}"
        time.sleep(0.1)


def test_the_page_in_a_browser(
    served: str,
    browser: Any,
    addresses: list[str],
    tmp_path: Path,
    look: Callable[[Any, int, str], None],
    barriers: Callable[[Any], list[str]],
) -> None:
    for width, theme in ((390, "light"), (390, "dark"), (1280, "dark"), (1280, "light")):
        look(browser, width, theme)
        browser.get(served)
        until(lambda: browser.execute_script(SHOWN, "#masks") == 5, "the masks")
        assert browser.execute_script(FIRST_SCREEN), "a phone shows pictures, not controls alone"
        assert ours(barriers(browser)) == []
    _moves_the_share(browser)
    _says_what_is_wrong_with_an_empty_seed(browser)
    _takes_good_files_and_refuses_bad_ones(browser, tmp_path)
    _has_its_tabs_at_any_width(browser)
    problems = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert problems == []
    assert browser.execute_script("return Object.keys(localStorage).filter(key => key.includes('history'))") == []
    assert _hosts(browser) == {"127.0.0.1"}
    assert set(addresses) <= {"127.0.0.1", "localhost"}


def ours(found: list[str]) -> list[str]:
    """Without what is in Gradio's own controls, which are not ours to mend."""
    return [one for one in found if "svelte-" not in one]


def _moves_the_share(browser: Any) -> None:
    until(lambda: browser.execute_script(SHOWN, "#masks") == 5, "the masks")
    before = _share(browser)
    browser.execute_script(FADING)
    browser.execute_script(MOVE, "0.7")
    until(lambda: abs(_share(browser) - 70) < 15, "a larger share")
    assert abs(before - 20) < 15
    assert browser.execute_script("window.looking = false; return window.least") == 1, "nothing fades meanwhile"


def _says_what_is_wrong_with_an_empty_seed(browser: Any) -> None:
    field = browser.find_element("css selector", "#seed input")
    field.send_keys("\ue009a\ue009\ue003")  # control and a, then backspace
    until(lambda: "seed must be a whole number from 0, got nothing" in browser.execute_script(TEXT, "#masks"), "a word")
    field.send_keys("3")
    until(lambda: browser.execute_script(SHOWN, "#masks") == 5, "the masks")


def _takes_good_files_and_refuses_bad_ones(browser: Any, tmp_path: Path) -> None:
    Image.fromarray(np.full((50, 80, 3), (255, 0, 0), np.uint8)).save(tmp_path / "red.png")
    (tmp_path / "words.png").write_text("no picture")
    field = browser.find_element("css selector", "#choice input[type=file]")
    first = browser.execute_script("return document.querySelector('#masks figure img').src")
    field.send_keys(str(tmp_path / "red.png"))
    until(lambda: "red.png, resized to 8x12" in browser.execute_script(TEXT, "#message"), "the upload")
    shown = "return document.querySelector('#masks figure img').src"
    until(lambda: browser.execute_script(shown) != first, "the uploaded image")
    red = browser.execute_script(shown)
    field.send_keys(str(tmp_path / "words.png"))
    until(lambda: "upload must be an image" in browser.execute_script(TEXT, "#message"), "the refusal")
    assert browser.execute_script(shown) == red
    bottom = "return document.querySelector('#message .problem').getBoundingClientRect().bottom - window.innerHeight"
    assert browser.execute_script(bottom) < 0, "the answer is seen without scrolling"


TABS = (("Spectrum", "#walk", 7), ("Neighbours", "#neighbours", 13), ("Patches", "#patches", 7), ("Masks", "#masks", 5))
"""With the panel of each, and how many pictures it shows at least."""


def _has_its_tabs_at_any_width(browser: Any) -> None:
    for width in (1280, 390):
        _size(browser, width)
        for tab, panel, least in TABS:
            browser.execute_script(
                "[...document.querySelectorAll('button[role=tab]')].find(b => b.innerText == arguments[0]).click()", tab
            )
            until(lambda at=panel, least=least: browser.execute_script(SHOWN, at) >= least, tab)
            assert browser.execute_script(WIDE) <= 0, f"{tab} at {width}"


def _share(browser: Any) -> float:
    """The share that the page says is hidden, in percent; 0 while it says nothing."""
    found = re.search(r"with ([\d.]+)% of the variance", browser.execute_script(TEXT, "#masks"))
    return float(found[1]) if found else 0.0


def _size(browser: Any, width: int) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def _hosts(browser: Any) -> set[str]:
    """Every machine that the page asked for something."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [m["params"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    # The browser's own start page asks for chrome:// addresses before ours is opened.
    asked = [p["request"]["url"] for p in sent if p["documentURL"].startswith("http")]
    return {address.split("/")[2].split(":")[0] for address in asked if address.startswith(("http", "ws"))}


def test_uploads_over_the_limit_do_not_arrive(served: str) -> None:
    import httpx

    files = {"files": ("large.png", b"\0" * (explorer.LARGEST_FILE + 1))}
    with httpx.Client(trust_env=False) as client:
        assert client.post(f"{served}gradio_api/upload", files=files).status_code == 413


@pytest.mark.parametrize(
    ("host", "status"),
    [("127.0.0.1", 200), ("localhost", 200), ("[::1]", 200), ("evil.example", 400), ("127.0.0.1.evil.example", 400)],
)
def test_only_a_browser_that_asks_for_this_machine_is_answered(served: str, host: str, status: int) -> None:
    import httpx

    port = served.rstrip("/").rsplit(":", 1)[1]
    with httpx.Client(trust_env=False) as client:
        for path in ("", "config", "gradio_api/info"):
            assert client.get(f"{served}{path}", headers={"host": f"{host}:{port}"}).status_code == status


def test_a_bad_upload_keeps_the_image_and_says_why(trained: Material, tmp_path: Path) -> None:
    (tmp_path / "words.png").write_text("no picture")
    before = trained.picked.images[0]
    image, said = explorer.take(trained, str(tmp_path / "words.png"), before)
    assert image is before
    assert "upload must be an image" in said


def test_ctrl_c_ends_it_and_leaves_nothing(material: Material, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gradio", reason="gradio is not installed")
    said: list[str] = []
    folders: list[Path] = []

    def stop() -> None:
        folders.append(Path(os.environ["GRADIO_TEMP_DIR"]))
        assert folders[0].is_dir()
        raise KeyboardInterrupt

    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path))
    monkeypatch.setattr(explorer, "wait", stop)
    explorer.explore(material, None, False, said.append)
    assert said[0].startswith("exploring at http://127.0.0.1:")
    assert not folders[0].exists()


def test_a_port_that_is_taken_or_impossible_is_refused(material: Material) -> None:
    pytest.importorskip("gradio", reason="gradio is not installed")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port must be one that nobody uses, got {port}"):
            explorer.open_page(material, port, browser=False)
    with pytest.raises(UserError, match="port must be between 1 and 65535, got 70000"):
        explorer.open_page(material, 70_000, browser=False)


def test_without_gradio_one_line_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "gradio", None)
    assert main(["explore", "--no-browser"]) == 2
    assert "pmae explore needs gradio, which is not installed: pip install 'pmae[app]'" in capsys.readouterr().err
