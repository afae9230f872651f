"""The page: what it says, what it never loads, and what it does with bad input."""

from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from pmae.errors import UserError
from pmae.report.contents import load
from pmae.report.overview import training_seconds
from pmae.report.page import write_report
from pmae.runs import Run

Suite = Callable[..., dict[str, Any]]
MakeRun = Callable[..., Run]
EVIL = "<script>alert('x')</script>"


class Page(HTMLParser):
    """Tags, addresses and text of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.styles, self.text = "", ""
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [
            value or "" for key, value in attributes if key in ("src", "href", "xlink:href", "srcset", "data")
        ]
        self.styles += " ".join(value or "" for key, value in attributes if key == "style")

    def handle_data(self, data: str) -> None:
        self.text += data


def test_one_page_and_its_files(make_run: MakeRun, suite: Suite, tmp_path: Path) -> None:
    both = {"linear/cls/test": 0.7, "linear/cls/val": 0.6}
    a = make_run("a", evaluation={"pmae epoch 3": suite(both), "random weights": suite({"linear/cls/test": 0.5})})
    b = make_run("b", space="pixels", evaluation={"mae epoch 3": suite(both)}, train__seed=7)
    out = tmp_path / "deep" / "report.html"
    write_report([a.path, b.path], out)
    page = Page(out)
    assert page.tags.count("figure") == 2 + 1 + 6 + 3
    assert page.tags.count("svg") == page.tags.count("figure")
    for words in ("train.seed", "space.name", "95.5", "73.4", "published: PMAE, oracle ratio", "600", "CPU", "2.11.0"):
        assert words in page.text, words
    files = {path.name for path in (tmp_path / "deep" / "report_files").iterdir()}
    assert {
        "accuracy-test.csv",
        "accuracy-val.md",
        "metrics-test.csv",
        "cost.csv",
        "environment.md",
        "runs.csv",
    } <= files
    assert {"a-reconstructions.png", "a-spectrum.svg", "b-masks.png", "learning-curves.svg", "a-classes.csv"} <= files
    assert not [name for name in files if name.startswith(".")]


def test_nothing_comes_from_outside(make_run: MakeRun, suite: Suite, tmp_path: Path) -> None:
    write_report([make_run(evaluation={"pmae epoch 3": suite({"linear/cls/test": 0.7})}).path], tmp_path / "r.html")
    page = Page(tmp_path / "r.html")
    assert page.links
    assert all(link.startswith(("#", "data:")) for link in page.links)
    assert not {"script", "iframe", "object", "embed"} & set(page.tags)
    assert "http://" not in page.source
    assert "https://" not in page.source
    assert "@import" not in page.source
    assert "default-src 'none'" in page.source


def test_names_of_runs_classes_and_notes_are_harmless(make_run: MakeRun, suite: Suite, tmp_path: Path) -> None:
    evaluated = suite({"linear/cls/test": 0.7}, data=EVIL, classes=[EVIL, "b"], notes=[EVIL])
    data = {"name": EVIL, "notes": [EVIL], "classes": [EVIL, "b"]}
    run = make_run("<script>", data=data, evaluation={f"pmae {EVIL}": evaluated}, features=True)
    write_report([run.path], tmp_path / "r.html")
    page = Page(tmp_path / "r.html")
    assert "script" not in page.tags
    assert EVIL in page.text
    assert "Pretraining report: <script>" in page.text


def test_no_runs_and_no_run_folders_still_make_a_page(make_run: MakeRun, tmp_path: Path) -> None:
    write_report([], tmp_path / "none.html")
    assert "No run folder was given." in Page(tmp_path / "none.html").text
    write_report([tmp_path / "nowhere", make_run(pictures=False).path], tmp_path / "some.html")
    text = Page(tmp_path / "some.html").text
    assert "run must be a folder that pretraining wrote" in text
    assert "toy: a closer look" in text


def test_an_interrupted_run_makes_a_page_that_says_so(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(epochs=2)
    (run.path / "samples.safetensors").unlink()
    (run.path / "checkpoints" / "epoch_0003" / "state.json").unlink()
    write_report([run.path], tmp_path / "r.html")
    text = Page(tmp_path / "r.html").text
    for words in (
        "training stopped at epoch 2 of 3",
        "there is no checkpoint",
        "no sample pictures",
        "stopped at epoch 2",
    ):
        assert words in text, words


BROKEN = [(name, "broken\n") for name in ("samples.safetensors", "results.json", "metrics.jsonl", "environment.json")]


@pytest.mark.parametrize(("name", "content"), [*BROKEN, ("metrics.jsonl", '{"loss": 1}\n'), ("results.json", "[]")])
def test_a_broken_file_is_named_and_the_rest_is_shown(
    make_run: MakeRun, tmp_path: Path, name: str, content: str
) -> None:
    run = make_run(pictures=False)
    (run.path / name).write_text(content)
    write_report([run.path], tmp_path / "r.html")
    text = Page(tmp_path / "r.html").text
    assert f"{name} could not be read" in text
    assert "All settings of toy" in text


@pytest.mark.parametrize("found", [{"results": [{"protocol": "linear"}]}, 3])
def test_an_evaluation_of_another_shape_is_named(make_run: MakeRun, tmp_path: Path, found: Any) -> None:
    write_report(
        [make_run(evaluation={"pmae epoch 3": found}, pictures=False).path],
        tmp_path / "r.html",
    )
    assert "results.json could not be read" in Page(tmp_path / "r.html").text


def test_duplicates_are_counted_and_named(make_run: MakeRun, suite: Suite, tmp_path: Path) -> None:
    evaluated = suite({"linear/cls/test": 0.7})
    evaluated["data"]["duplicates"] = {"test": {"count": 11, "pairs": [{"train": "a.png", "held_out": "b.png"}]}}
    write_report([make_run(evaluation={"pmae epoch 3": evaluated}, pictures=False).path], tmp_path / "r.html")
    assert "11 images of test can be found byte for byte in the training part" in Page(tmp_path / "r.html").text
    assert "b.png = a.png" in Page(tmp_path / "r.html").text


def test_an_output_that_cannot_be_written_is_refused(make_run: MakeRun, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=r"in its way|cannot be written"):
        write_report([make_run().path], tmp_path / "file" / "report.html")
    kept = tmp_path / "folder"
    kept.mkdir()
    with pytest.raises(UserError, match="out must be a file such as"):
        write_report([], kept)
    assert kept.is_dir()
    (tmp_path / "report_files").write_text("in the way")
    with pytest.raises(UserError, match="in its way"):
        write_report([], tmp_path / "report.html")


def test_the_same_runs_make_the_same_page(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    for name in ("one", "two"):
        write_report([run.path], tmp_path / f"{name}.html")
    assert (tmp_path / "one.html").read_bytes() == (tmp_path / "two.html").read_bytes()


def test_seconds_are_images_over_speed(make_run: MakeRun) -> None:
    # 30 steps of 20 images at 100 images a second.
    assert training_seconds(load(make_run().path)) == pytest.approx(6.0)
