"""The page in a real browser, from disk: on a phone and a desktop, light and dark."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pmae.report.page import write_report
from pmae.runs import Run

EMPTY = (
    "return [...document.querySelectorAll('figure svg')].filter(s => !(s.getBoundingClientRect().height > 40)).length"
)
INK = "return getComputedStyle(document.querySelector('figure svg text')).fill"
PAPER = "return getComputedStyle(document.body).backgroundColor"
WIDE = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"


def test_the_page_is_whole_in_a_browser(
    browser: Any, make_run: Callable[..., Run], suite: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    scores = {"linear/cls/test": 0.7, "linear/mean/test": 0.72, "knn/cls/test": 0.6}
    evaluation = {"pmae epoch 1": suite(scores), "pmae epoch 3": suite(scores), "random weights": suite(scores)}
    first = make_run("a_run_with_quite_a_long_name_" * 3, evaluation=evaluation, features=True)
    second = make_run("<script>", space="pixels", data={"notes": ["word" * 60]})
    write_report([first.path, second.path], tmp_path / "report.html")
    colours = set()
    for width, theme in ((390, "light"), (390, "dark"), (1280, "light"), (1280, "dark")):
        _emulate(browser, width, theme)
        browser.get((tmp_path / "report.html").as_uri())
        count = browser.execute_script("return document.querySelectorAll('figure svg').length")
        assert count == 1 + 1 + 1 + 7 + 2
        assert browser.execute_script(EMPTY) == 0
        assert browser.execute_script(WIDE) <= 0
        colours.add((browser.execute_script(INK), browser.execute_script(PAPER)))
    assert len(colours) == 2, "ink and paper follow the theme"
    assert [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []
    assert {address.split(":")[0] for address in _requested(browser)} <= {"file", "data"}


def _emulate(browser: Any, width: int, theme: str) -> None:
    size = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    feature = {"name": "prefers-color-scheme", "value": theme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})


def _requested(browser: Any) -> list[str]:
    """Every address the page asked for."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [m["params"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    # The browser's own start page asks for chrome:// addresses before ours is opened.
    sent = [params["request"]["url"] for params in sent if params["documentURL"].startswith("file:")]
    assert sent, "the page itself is among them"
    return sent
