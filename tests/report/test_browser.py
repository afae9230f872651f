"""The page in a real browser, from disk: on a phone and a desktop, light and dark, and everything one can do on it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pmae.report.page import write_report
from pmae.runs import Run

EMPTY = (
    "return [...document.querySelectorAll('figure svg')].filter(s => s.checkVisibility() && "
    "!s.closest('.noscript, .classes') && !(s.getBoundingClientRect().height > 40)).length"
)
INK = "return getComputedStyle(document.querySelector('.figures figure svg text')).fill"
PAPER = "return getComputedStyle(document.body).backgroundColor"
WIDE = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
POINT = """const map = document.querySelector('figure[id^=map-] svg.map');
const at = map.querySelector('[data-i="3"]').getBoundingClientRect();
const where = {clientX: at.x + at.width / 2, clientY: at.y + at.height / 2};
map.dispatchEvent(new PointerEvent(arguments[0], where))"""
CSP = "return document.querySelector('meta[http-equiv]').content"
LOOKS = [(390, "light"), (390, "dark"), (1280, "light"), (1280, "dark")]
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def report(
    write_run: Callable[..., Run], suite: Callable[..., dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Two runs, one with a map, under names that are markup."""
    folder = tmp_path_factory.mktemp("report")
    scores = {"linear/cls/test": 0.7, "linear/mean/test": 0.72, "knn/cls/test": 0.6}
    classes = ["round", HOSTILE]
    evaluation = {name: suite(scores, classes=classes) for name in ("pmae epoch 1", "pmae epoch 3", "random weights")}
    first = write_run(folder, "a_run_with_quite_a_long_name_" * 3, evaluation=evaluation, features=True)
    second = write_run(folder, "<script>", space="pixels", data={"notes": ["word" * 60]})
    write_report([first.path, second.path], folder / "report.html")
    return folder / "report.html"


@pytest.fixture(params=LOOKS, ids=lambda look: f"{look[0]}-{look[1]}")
def page(request: pytest.FixtureRequest, browser: Any, report: Path, look: Callable[[Any, int, str], None]) -> Any:
    """The report opened anew at a width and in a theme; afterwards the console is empty."""
    look(browser, *request.param)
    browser.get(report.as_uri())
    yield browser
    said = [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]
    assert said == []


def test_everything_works_at_any_width_and_in_any_light(page: Any, barriers: Callable[[Any], list[str]]) -> None:
    assert page.execute_script(EMPTY) == 0
    assert page.execute_script(WIDE) <= 0
    _copies_commands(page)
    _sorts_tables(page)
    _shows_and_hides_runs(page)
    _opens_pictures_and_neighbours(page)
    _opens_the_mistakes_of_a_cell(page)
    assert page.execute_script(WIDE) <= 0
    assert barriers(page) == []


def _copies_commands(page: Any) -> None:
    page.execute_script("document.querySelector('details').open = true")
    page.execute_script("document.querySelector('.command button').click()")
    command = page.execute_script("return document.querySelector('.command pre').textContent")
    assert command.startswith("pmae ")
    assert page.execute_script("return getSelection().toString()").strip() == command


def _sorts_tables(page: Any) -> None:
    column = (
        "return [...document.querySelectorAll('#results table tbody tr')].map(r => parseFloat(r.cells[1].innerText))"
    )
    for order in ("descending", "ascending"):
        page.execute_script("document.querySelectorAll('#results table thead button')[1].click()")
        assert page.execute_script("return document.querySelector('#results th[aria-sort]').ariaSort") == order
        found = [value for value in page.execute_script(column) if value is not None]
        assert found == sorted(found, reverse=order == "descending")


def _shows_and_hides_runs(page: Any) -> None:
    lines = "return document.querySelectorAll('#curves .panel:first-child path').length"
    assert page.execute_script(lines) == 2
    page.execute_script("document.querySelector('#curves .toggles input').click()")
    assert page.execute_script(lines) == 1
    hover = """const svg = document.querySelector('#curves .panel svg'), f = svg.getBoundingClientRect();
    svg.dispatchEvent(new PointerEvent('pointermove', {clientX: f.x + f.width / 2, clientY: f.y + 50}));
    return document.querySelector('#curves .panel .tip').innerText"""
    assert "<script>: " in page.execute_script(hover), "a run's name stays text"


def _opens_pictures_and_neighbours(page: Any) -> None:
    page.execute_script(POINT, "pointermove")
    assert page.execute_script("return !document.querySelector('figure[id^=map-] .tip').hidden")
    page.execute_script(POINT, "click")
    detail = page.execute_script("return document.querySelector('figure[id^=map-] .detail').innerText")
    assert f"{HOSTILE}, taken for {HOSTILE}" in detail, "a class's name stays text"
    assert "Nearest after pretraining: 2 of 5 of the same class" in detail
    assert "Nearest with random weights: 3 of 5 of the same class" in detail
    page.execute_script("document.querySelector('figure[id^=map-] button[data-class=\"0\"]').click()")
    assert page.execute_script("return document.querySelectorAll('figure[id^=map-] g.dim').length") == 1


def _opens_the_mistakes_of_a_cell(page: Any) -> None:
    page.execute_script("document.querySelector('button[data-cell=\"0,1\"]').click()")
    shown = page.execute_script("return document.querySelector('[id$=-mistakes]').innerText")
    assert shown.startswith(f"round, but taken for {HOSTILE}: 2 of the 20 images on the map")
    assert "image 10" in shown


def test_the_page_asks_for_nothing_and_lets_no_other_script_run(browser: Any, report: Path) -> None:
    browser.get_log("performance")
    browser.get(report.as_uri())
    policy = browser.execute_script(CSP)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy.partition("style-src")[0]
    browser.execute_cdp_cmd("Page.enable", {})
    injected = "const s = document.createElement('script'); s.textContent = 'window.hit = 1'; document.body.append(s)"
    browser.execute_script(injected)
    assert browser.execute_script("return window.hit") is None
    assert "Content Security Policy" in browser.get_log("browser")[-1]["message"]
    assert {address.split(":")[0] for address in _requested(browser)} <= {"file", "data"}


def test_it_reads_well_without_script(browser: Any, report: Path) -> None:
    bare = report.with_name("bare.html")  # a script that is switched off may still run where the machine is slow
    bare.write_text(report.read_text(encoding="utf-8").rpartition("<script>")[0], encoding="utf-8")
    browser.get(bare.as_uri())
    assert browser.execute_script("return document.querySelector('.noscript figure svg').checkVisibility()")
    assert browser.execute_script("return document.querySelector('figure[id^=map-] svg.map').checkVisibility()")
    assert not browser.execute_script("return document.querySelector('#curves').checkVisibility()")


def _requested(browser: Any) -> list[str]:
    """Every address the page asked for."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [m["params"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    # The browser's own start page asks for chrome:// addresses before ours is opened.
    sent = [params["request"]["url"] for params in sent if params["documentURL"].startswith("file:")]
    assert sent, "the page itself is among them"
    return sent
