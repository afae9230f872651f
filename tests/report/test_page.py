"""The page: what it says, what it never loads, and what it does with bad input."""

import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

from pmae.cli import main
from pmae.errors import UserError
from pmae.report.contents import load
from pmae.report.page import save_figures, write_report
from pmae.report.published import published_accuracy
from pmae.report.tables import accuracy_table, training_seconds
from pmae.runs import Run

Suite = Callable[..., dict[str, Any]]
MakeRun = Callable[..., Run]
EVIL = "<script>alert('x')</script>"
PICTURES = {"reconstructions", "masks", "learning-curves"}
SPECTRAL = {"spectrum", "spectrum-parts", "r2-by-band", "components"}
NAMESPACE = "http://www.w3.org/2000/svg"  # a name, not an address


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


@pytest.fixture
def page_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No files beside the page: figures of each kind take seconds, and tests of words do not look at them."""
    monkeypatch.setattr("pmae.report.page.write_beside", lambda *_: None)


@pytest.fixture
def words_alone(page_alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty figures on the page too."""
    monkeypatch.setattr("pmae.report.style.Drawing.svg", b"<svg ></svg>")


def test_one_page_and_its_files(make_run: MakeRun, suite: Suite, tmp_path: Path) -> None:
    both = {"linear/cls/test": 0.7, "linear/cls/val": 0.6}
    a = make_run("a", evaluation={"pmae epoch 3": suite(both), "random weights": suite({"linear/cls/test": 0.5})})
    b = make_run("b", space="pixels", evaluation={"mae epoch 3": suite(both)}, train__seed=7)
    out = tmp_path / "deep" / "report.html"
    write_report([a.path, b.path], out)
    page = Page(out)
    # Bars of two splits, curves, reconstructions, masks, four of the spectrum; confusion matrices are tables.
    assert page.tags.count("figure") == 2 + 1 + 2 + 4 + 1 + 2 + 1
    assert page.tags.count("svg") == page.tags.count("figure") - 2
    for words in ("train.seed", "space.name", "95.5", "73.4", "published: PMAE, oracle ratio", "600", "CPU", "2.11.0"):
        assert words in page.text, words
    assert '<td data-name="linear probe" class="number">70.0 <small>(68.0–72.0)</small></td>' in page.source
    assert 'aria-label="Accuracy on test"' in page.source
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


@pytest.mark.usefixtures("page_alone")
def test_nothing_comes_from_outside_and_the_same_runs_make_the_same_page(
    make_run: MakeRun, suite: Suite, tmp_path: Path
) -> None:
    run = make_run(evaluation={"pmae epoch 3": suite({"linear/cls/test": 0.7})})
    for name in ("one", "two"):
        write_report([run.path], tmp_path / f"{name}.html")
    assert (tmp_path / "one.html").read_bytes() == (tmp_path / "two.html").read_bytes()
    page = Page(tmp_path / "one.html")
    assert page.links
    assert all(link.startswith(("#", "data:")) for link in page.links)
    assert not {"iframe", "object", "embed"} & set(page.tags)
    assert page.tags.count("script") == 2, "its data and its own script, whose hash is in its policy"
    assert "http://" not in page.source.replace(NAMESPACE, "")
    assert "https://" not in page.source
    assert "@import" not in page.source
    assert "default-src 'none'" in page.source


@pytest.mark.usefixtures("page_alone")
def test_names_of_runs_classes_and_notes_are_harmless(make_run: MakeRun, suite: Suite, tmp_path: Path) -> None:
    evaluated = suite({"linear/cls/test": 0.7}, data=EVIL, classes=[EVIL, "b"], notes=[EVIL])
    data = {"name": EVIL, "notes": [EVIL], "classes": [EVIL, "b"]}
    run = make_run("<script>", data=data, evaluation={f"pmae {EVIL}": evaluated}, features=True)
    write_report([run.path], tmp_path / "r.html")
    page = Page(tmp_path / "r.html")
    assert page.tags.count("script") == 2
    assert page.source.count("<script") == 2
    assert EVIL in page.text
    assert "Pretraining report: <script>" in page.text


@pytest.mark.usefixtures("words_alone")
def test_the_command_prints_how_the_first_run_differs_from_the_others(
    make_run: MakeRun, suite: Suite, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scores = {"a": 0.7, "b": 0.65, "c": 0.7}
    runs = [make_run(n, evaluation={"pmae epoch 3": suite({"linear/cls/test": s})}).path for n, s in scores.items()]
    out = tmp_path / "r.html"
    assert main(["report", *map(str, runs), "-o", str(out)]) == 0
    second, third, told = capsys.readouterr().out.splitlines()
    assert second.startswith("a (pmae epoch 3) gets 5.0 points more than b (pmae epoch 3) (65.0%); 95% interval")
    assert third.startswith("a (pmae epoch 3) gets as much as c (pmae epoch 3) (70.0%)")
    assert told == f"report: {out}"
    assert second in Page(out).text


def test_published_numbers_of_several_sets_are_told_apart(make_run: MakeRun, suite: Suite) -> None:
    runs = []
    for data in ("bloodmnist", "dermamnist"):
        scores = {"pmae epoch 3": suite({"linear/cls/test": 0.7}, data=data)}
        runs.append(load(make_run(data, evaluation=scores, data={"name": data}).path))
    (alone, *_), both = accuracy_table(runs[:1], "test").rows[-1], accuracy_table(runs, "test").rows[-2:]
    assert [row[0] for row in both] == [f"{alone}, bloodmnist", f"{alone}, dermamnist"]
    published = [published_accuracy("linear", "pmae_oracle_components", data) for data in ("bloodmnist", "dermamnist")]
    assert [row[1] for row in both] == published


def test_material_that_cannot_be_drawn_is_named_and_stops_nothing(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    found = {name: value[:1] if value.ndim == 4 else value[:0] for name, value in load(run.path).samples.items()}
    save_file(found, run.path / "samples.safetensors")
    told = [{**line, "r2_band_0_50": None, "r2_band_50_80": None} for line in run.metrics()]
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in told))
    assert write_report([run.path], tmp_path / "report.html") == ([], [])
    text = Page(tmp_path / "report.html").text
    assert "the figure of the spectrum could not be drawn" in text
    assert "R2 by band" not in text, "of what was not measured there is no figure"


@pytest.mark.usefixtures("words_alone")
def test_folders_that_are_no_run_are_refused_or_left_out(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere, out = str(tmp_path / "nowhere"), tmp_path / "deep" / "report.html"
    assert main(["report", nowhere, "-o", str(out)]) == 2
    printed = capsys.readouterr().err
    assert "run must be a folder that pretraining wrote" in printed
    assert printed.count("\n") == 1
    assert not out.parent.exists()
    with pytest.raises(UserError, match="at least one run folder"):
        write_report([], out)
    with pytest.raises(SystemExit) as stop:
        main(["report", nowhere, str(make_run(pictures=False).path), "-o", str(out)])
    assert stop.value.code == 1  # a script must not take it for the whole
    assert f"left out: run must be a folder that pretraining wrote (with a config.json), got {nowhere!r}" in (
        capsys.readouterr().err
    )
    text = Page(out).text
    assert "run must be a folder that pretraining wrote" in text
    assert "toy: a closer look" in text


@pytest.mark.usefixtures("words_alone")
def test_the_page_says_how_much_was_asked_to_be_hidden_and_how_much_was(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(pictures=False, masking__masked_variance=0.3)
    write_report([run.path], tmp_path / "r.html")
    assert "30% of variance (20.0%)" in Page(tmp_path / "r.html").text
    run = make_run("older", pictures=False, space="pixels")
    metrics = run.path / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"masked_share": 0.2, ', ""))
    write_report([run.path], tmp_path / "r.html")
    assert "75% of patchesvit_tiny" in Page(tmp_path / "r.html").text


@pytest.mark.usefixtures("words_alone")
@pytest.mark.parametrize(
    ("rival", "headline"),
    [
        (0.68, "Unclear: the leads over raw pixels and PCA features may be chance"),
        (0.5, "So far yes: clearly better than raw pixels and PCA features; random weights not evaluated"),
    ],
)
def test_the_headline_calls_no_lead_that_may_be_chance(
    make_run: MakeRun, suite: Suite, tmp_path: Path, rival: float, headline: str
) -> None:
    kinds = {"raw pixels": "pixels", "pca features": "pca"}
    rivals = {name: suite({f"linear/{kind}/test": rival}) for name, kind in kinds.items()}
    run = make_run(pictures=False, evaluation={"pmae epoch 3": suite({"linear/cls/test": 0.7}), **rivals})
    assert main(["report", str(run.path), "-o", str(tmp_path / "r.html")]) == 0
    assert headline in Page(tmp_path / "r.html").text


@pytest.mark.usefixtures("words_alone")
def test_the_page_says_how_large_a_small_vit_is(make_run: MakeRun, tmp_path: Path) -> None:
    small = make_run("small", pictures=False, encoder__width=96, encoder__depth=4, encoder__heads=6)
    usual = make_run("usual", pictures=False, encoder__width=192)
    assert main(["report", str(small.path), str(usual.path), "-o", str(tmp_path / "r.html")]) == 0
    text = Page(tmp_path / "r.html").text
    assert "ViT, 96 wide, 4 blocks, 6 heads, patch" in text
    assert "vit_tiny, patch" in text


@pytest.mark.usefixtures("words_alone")
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


@pytest.mark.usefixtures("words_alone")
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


@pytest.mark.usefixtures("words_alone")
@pytest.mark.parametrize("found", [{"results": [{"protocol": "linear"}]}, 3])
def test_an_evaluation_of_another_shape_is_named(make_run: MakeRun, tmp_path: Path, found: Any) -> None:
    write_report(
        [make_run(evaluation={"pmae epoch 3": found}, pictures=False).path],
        tmp_path / "r.html",
    )
    assert "results.json could not be read" in Page(tmp_path / "r.html").text


@pytest.mark.usefixtures("words_alone")
def test_duplicates_are_counted_and_named(make_run: MakeRun, suite: Suite, tmp_path: Path) -> None:
    evaluated = suite({"linear/cls/test": 0.7})
    exact = {"count": 11, "pairs": [{"train": "a.png", "held_out": "b.png"}]}
    near = {"near": 1, "near_of": 90, "near_pairs": [{"train": "c.png", "held_out": "d.png"}]}
    evaluated["data"]["duplicates"] = {"test": exact | near}
    write_report([make_run(evaluation={"pmae epoch 3": evaluated}, pictures=False).path], tmp_path / "r.html")
    text = Page(tmp_path / "r.html").text
    assert "11 images of test can be found byte for byte in the training part" in text
    assert "b.png = a.png" in text
    assert "1 image of test can be found nearly unchanged in the training part as well (90 were compared)" in text
    assert "d.png ~ c.png" in text


@pytest.mark.usefixtures("words_alone")
def test_warnings_name_their_protocol_and_preset(make_run: MakeRun, suite: Suite, tmp_path: Path) -> None:
    evaluated = suite({"linear/cls/test": 0.7}, notes=["few images to search"])
    evaluated["results"][0]["notes"] = ["training diverged"]
    write_report([make_run(evaluation={"pmae epoch 3": evaluated}, pictures=False).path], tmp_path / "r.html")
    text = Page(tmp_path / "r.html").text
    assert "training diverged (linear probe on pmae epoch 3 (CLS), test, preset paper)" in text
    assert "few images to search (preset paper)" in text


@pytest.mark.usefixtures("words_alone")
def test_what_is_true_of_several_runs_is_said_once(make_run: MakeRun, tmp_path: Path) -> None:
    notes = {"a": ["shared", "of one"], "b": ["shared"]}
    runs = [make_run(name, pictures=False, data={"notes": said}) for name, said in notes.items()]
    write_report([run.path for run in runs], tmp_path / "r.html")
    source = Page(tmp_path / "r.html").source
    assert source.count("shared") == 1
    assert "<li>shared</li>" in source
    assert "<li>a: of one</li>" in source


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
        write_report([make_run("other").path], tmp_path / "report.html")


def test_seconds_are_images_over_speed(make_run: MakeRun) -> None:
    # 30 steps of 20 images at 100 images a second.
    assert training_seconds(load(make_run().path)) == pytest.approx(6.0)


@pytest.mark.parametrize(
    ("shape", "dtype", "space"),
    [
        ((3, 8, 8), "uint8", "pca"),
        ((1, 6, 10), "uint16", "pca"),
        ((5, 8, 6), "float32", "pca"),
        ((2, 8, 8), "int16", "pixels"),
    ],
)
def test_every_kind_of_image_is_drawn(make_run: MakeRun, shape: tuple[int, int, int], dtype: str, space: str) -> None:
    run = make_run(shape=shape, dtype=dtype, space=space)
    paths = save_figures(run)
    assert {path.stem for path in paths} == PICTURES | (SPECTRAL if space == "pca" else set())
    assert all(path.read_bytes().startswith(b"\x89PNG") and path.parent == run.path / "figures" for path in paths)
    assert not list((run.path / "figures").glob(".*"))
    assert load(run.path).problems == []


def test_evaluated_runs_get_bars_curves_confusion_and_a_map(make_run: MakeRun, suite: Suite) -> None:
    scores = {"linear/cls/test": 0.7, "knn/mean/test": 0.6}
    evaluation = {"pmae epoch 1": suite(scores), "pmae epoch 3": suite(scores), "random weights": suite(scores)}
    paths = save_figures(make_run(evaluation=evaluation, features=True))
    found = {path.name for path in paths}
    assert {"accuracy-test.png", "accuracy-by-epoch-test.png", "confusion.png", "feature-map.png"} <= found
