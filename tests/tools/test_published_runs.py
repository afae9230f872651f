"""Published runs can still be repeated: their settings load, and the tables on the pages are what run folders say."""

import dataclasses
import functools
import importlib
import json
import math
import re
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from pmae.api import evaluate, pretrain
from pmae.cli import parsed
from pmae.config import Config, replace
from pmae.config_file import to_dict
from pmae.data.images import Splits
from pmae.derive import resolve
from pmae.errors import UserError
from pmae.evaluate.protocols import only, preset
from pmae.files import read_tensors, write_json, write_tensors
from pmae.flops import flops_per_image
from pmae.intervals import Interval
from pmae.report.contents import load
from pmae.report.difference import difference
from pmae.runs import Run
from pmae.standing import scores_of

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "results"
RUNS = sorted((RESULTS / "runs").iterdir())


@functools.lru_cache(1)  # a command line of 200 settings takes a tenth of a second
def repeated(run: Path) -> Config:
    """The settings of a command that repeats a run."""
    found: Config = parsed("pretrain", ["--config", str(run / "config.json"), "--out", "unused"]).configured()
    return found


@pytest.mark.parametrize("gpu", [True, False])
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_a_published_run_can_be_repeated(run: Path, gpu: bool) -> None:
    config = repeated(run)
    assert config.data.root == "data"
    data = json.loads((run / "environment.json").read_text())["data"]
    # Nothing was left to derive: a later change of the rules cannot change what the file means.
    assert resolve(config, data["counts"]["train"], tuple(data["shape"]), gpu=gpu) == (config, {})


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that imports a module of tools/ by its name."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module


@pytest.mark.parametrize("page", ["README.md", "results/RESULTS.md", "results/photographs.md", "results/frontier.md"])
def test_the_tables_on_a_page_are_what_is_generated(page: str, tool: Any) -> None:
    text = (ROOT / page).read_text()
    assert "<!-- table: " in text
    assert tool("tables").filled(text) == text, "run python tools/tables.py"


@pytest.mark.parametrize(
    "page",
    ["README.md", "results/RESULTS.md", "results/spaces.md", "results/photographs.md", "results/frontier.md"],
)
def test_every_figure_on_a_page_is_there(page: str) -> None:
    text = (ROOT / page).read_text()
    shown = [part.partition(")")[0] for part in text.split("](")[1:]] + [
        p.split('"')[1] for p in text.split("<img ")[1:]
    ]
    pictures = [name for name in shown if name.endswith(".png")]
    assert pictures
    assert all(((ROOT / page).parent / name).is_file() for name in pictures)


ROWS = {"cifar10": "CIFAR-10", "dermamnist": "DermaMNIST 64x64", "bloodmnist": "BloodMNIST 64x64"}


def linear(run: Path, label: str) -> str:
    """Accuracy of the linear probe on the mean, straight from results.json."""
    results = json.loads((run / "results.json").read_text())["evaluation"]
    entries = results[f"{label} [strong]"]["results"]
    wanted = [e for e in entries if (e["protocol"], e["split"]) == ("linear", "test") and e["pooling"] != "cls"]
    return f"{100 * wanted[0]['metrics']['accuracy']['value']:.1f}"


@pytest.mark.parametrize(("data", "title"), ROWS.items())
def test_the_headline_in_the_readme_is_what_was_measured(data: str, title: str) -> None:
    page = [line.strip("| ").split(" | ") for line in (ROOT / "README.md").read_text().splitlines() if "|" in line]
    at = next(row for row in page if title in row).index(title) + 1  # the first column has no name
    shown = {row[0]: row[at].strip("*") for row in page if len(row) == 7}
    first = RESULTS / "runs" / f"{data}-pmae-100"
    assert shown["random weights"] == linear(first, "random weights")
    assert shown["PCA features"] == linear(first, "pca features")
    assert shown["MAE 0.75, 100 epochs"] == linear(RESULTS / "runs" / f"{data}-mae-100", "mae epoch 100")
    assert shown["PMAE 0.2, 100 epochs"] == linear(first, "pmae epoch 100")
    assert shown["`ours`, 150 epochs"] == linear(RESULTS / "runs" / f"{data}-contrast-150", "pmae epoch 150")


def long_run(place: Path, name: str, source: str, **changes: Any) -> Run:
    """A published run as if it had been 800 epochs long."""
    folder = Path(shutil.copytree(RESULTS / "runs" / source, place / name))
    run = Run(folder)
    config = replace(run.config, train__epochs=800, optim__warmup_epochs=40.0, **changes)
    write_json(folder / "config.json", to_dict(config))
    text = (folder / "results.json").read_text().replace("epoch 100", "epoch 800").replace('"epoch":100', '"epoch":800')
    (folder / "results.json").write_text(text)
    lines = [{**line, "epoch": 8 * line["epoch"]} for line in run.metrics()]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return run


def cells(table: str, start: str) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith(f"| {start}")]


def accuracy(source: str, preset: str, protocol: str, pooling: str) -> float:
    results = json.loads((RESULTS / "runs" / source / "results.json").read_text())["evaluation"]
    (suite,) = [s for key, s in results.items() if " epoch " in key and key.endswith(f"[{preset}]")]
    wanted = (protocol, pooling, "test")
    (entry,) = [e for e in suite["results"] if (e["protocol"], e["pooling"], e["split"]) == wanted]
    return 100 * float(entry["metrics"]["accuracy"]["value"])


def test_long_runs_stand_beside_the_published_numbers(tool: Any, tmp_path: Path) -> None:
    tables: ModuleType = tool("tables")
    run = long_run(tmp_path, "a", "cifar10-pmae-100")
    long_run(tmp_path, "b", "bloodmnist-mae-100")
    long_run(tmp_path, "c", "bloodmnist-mae-100", train__seed=1)
    table = tables.paper_table(tmp_path)
    (pmae,) = cells(table, "here, PMAE 0.2, `masking` with encoder.patch_size=8, 1 run |")
    assert pmae[1:4] == ["paper", "test", "[CLS]"]
    for column, protocol in enumerate(("linear", "mlp", "knn", "finetune"), start=4):
        assert float(pmae[column].split()[0]) == pytest.approx(
            accuracy("cifar10-pmae-100", "paper", protocol, "cls"), abs=0.051
        )
    # Two runs with the same numbers: the spread is theirs, and it is nothing.
    (mae,) = [row for row in cells(table, "here, MAE 0.75") if row[0].endswith("2 runs")]
    assert mae[4] == f"{accuracy('bloodmnist-mae-100', 'paper', 'linear', 'cls'):.1f} ± 0.0"
    (said,) = cells(table, "**PMAE, oracle ratio: published** | paper | test")
    assert said[4:] == ["59.0", "64.1", "55.3", "84.8"]
    # 50,000 images, 800 times; operations an image by the closed form of `pmae.flops`.
    assert pmae[8] == f"{flops_per_image(run.config, (3, 32, 32)) * 50_000 * 800:.1e}".replace("+", "")


def test_the_headline_follows_the_longest_pair(tool: Any, tmp_path: Path) -> None:
    headline: ModuleType = tool("headline")
    for method in ("mae", "pmae"):
        shutil.copytree(RESULTS / "runs" / f"cifar10-{method}-100", tmp_path / method)
    assert "published" not in headline.headline(tmp_path)
    other = shutil.copytree(tmp_path, tmp_path.with_name(f"{tmp_path.name}-long"))
    for method in ("mae", "pmae"):
        long_run(other, f"{method}-800", f"cifar10-{method}-100")
    table = headline.headline(other)
    (row,) = cells(table, "PMAE 0.2, 800 epochs |")
    assert row[1] == f"**{accuracy('cifar10-pmae-100', 'strong', 'linear', 'mean'):.1f}**"
    # 17 tokens through an encoder 192 wide and a decoder 512 wide: 3.2e9 operations an image.
    assert float(row[2]) == pytest.approx(3.2e9 * 50_000 * 800, rel=0.1)


def swept_run(place: Path, ratio: float) -> None:
    """A published run as if it had been one of those that compare ratios."""
    run = long_run(place, f"{ratio}", "cifar10-pmae-100", masking__masked_variance=ratio, decoder__name="small")
    write_json(run.path / "config.json", to_dict(replace(run.config, train__epochs=50, optim__warmup_epochs=2.5)))
    text = (run.path / "results.json").read_text().replace("epoch 800", "epoch 50").replace('"epoch":800', '"epoch":50')
    (run.path / "results.json").write_text(text)


def test_runs_that_compare_ratios_fill_the_table_of_ratios(tool: Any, tmp_path: Path) -> None:
    tables, figures = tool("tables"), tool("figures")
    assert tables.ratio_tables(tmp_path / "nothing") == "Not run yet.\n"
    assert figures.measured(tmp_path / "nothing") == {}
    for ratio in (0.1, 0.2, 0.4):
        swept_run(tmp_path, ratio)
    first, second = tables.ratio_tables(tmp_path).split("### Features: mean")
    for table, pooling in ((first, "cls"), (second, "mean")):
        (row,) = cells(table, "linear probe | strong | PMAE |")
        value = f"{accuracy('cifar10-pmae-100', 'strong', 'linear', pooling):.1f}"
        assert row[3:] == [value, value, "–", value, *["–"] * 7]
    (spent,) = cells(first + second, "PMAE | 2.0e15 |")
    assert spent[1:] == ["2.0e15", "2.0e15", "–", "2.0e15", *["–"] * 7]
    # A mean over three of nine shares is no number to publish, and a line through them no figure.
    assert "standard error" not in second
    assert figures.measured(tmp_path) == {}
    for ratio in (0.3, 0.5, 0.6, 0.7, 0.8, 0.9):
        swept_run(tmp_path, ratio)
    assert cells(tables.ratio_tables(tmp_path), "PMAE | strong | 9 |")[0][4] == "0.00"
    assert set(figures.measured(tmp_path)) == {"paper-ratio", "paper-spread"}


def test_learning_curves_of_long_runs_are_drawn_in_the_colours_of_their_methods(tool: Any, tmp_path: Path) -> None:
    for method in ("mae", "pmae"):
        long_run(tmp_path, method, f"cifar10-{method}-100")
    drawn = tool("figures").measured(tmp_path)
    assert list(drawn) == ["paper-curves"]
    loss, r2, probe = drawn["paper-curves"].figure.axes
    assert [line.get_label() for line in loss.lines] == ["PMAE 0.2, masking", "MAE 0.75, masking"]
    said = Run(RESULTS / "runs" / "cifar10-pmae-100").results["pretrain"]
    ends = [line.get_ydata()[-1] for line in probe.lines]
    assert ends[0] == pytest.approx(100 * said["linear"])
    held_out = next(line for line in r2.lines if line.get_alpha() is None)  # that in training is faint
    assert held_out.get_ydata()[-1] == pytest.approx(100 * said["held_out_r2"], rel=1e-3)


def test_a_run_is_published_in_small(tool: Any, tmp_path: Path) -> None:
    publish: ModuleType = tool("publish")
    source = RESULTS / "runs" / "cifar10-pmae-100"
    folder = Path(shutil.copytree(source, tmp_path / "run"))
    run = Run(folder)
    write_json(folder / "config.json", to_dict(replace(run.config, data__root="/somewhere/else")))
    lines = (source / "metrics.jsonl").read_text().splitlines()
    # As training writes them: several lines an epoch, of which the last one counts.
    early = [json.dumps({**json.loads(line), "epoch": n + 0.5, "loss": 9.0}) for n, line in enumerate(lines[:100])]
    pairs = [line for pair in zip(early, lines[:100], strict=True) for line in pair]
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in [*pairs, *lines[100:]]))
    made = publish.publish(run, tmp_path / "runs")
    assert made == tmp_path / "runs" / "cifar10-pmae-100"
    assert Run(made).config == Run(source).config
    assert Run(made).results == Run(source).results
    assert Run(made).environment == Run(source).environment
    assert Run(made).metrics() == Run(source).metrics()
    # True classes, the answers of a seed, and those of one that diverged.
    answers = torch.tensor([[0, 9], [9, 9], [-1, -1]], dtype=torch.int16)
    write_tensors(folder / "answers.safetensors", {score.key: answers.clone() for score in scores_of(run.evaluations)})
    kept = read_tensors(publish.publish(run, tmp_path / "runs") / "answers.safetensors")
    assert kept
    assert all(torch.equal(each.short(), answers) for each in kept.values())
    other = replace(run.config, optim__base_lr=3e-4)
    write_json(folder / "config.json", to_dict(other))
    with pytest.raises(UserError, match="holds a run of other settings"):
        publish.publish(run, tmp_path / "runs")
    run.add_results(pretrain={"epoch": 40})
    with pytest.raises(UserError, match="must have come to its end"):
        publish.publish(run, tmp_path / "runs")


def test_where_weights_lay_on_a_machine_is_not_published(tool: Any, tmp_path: Path) -> None:
    run = Run(shutil.copytree(RESULTS / "trials/speedrun/patch_4", tmp_path / "run"))
    near, far = "runs/speedrun/patch_8", "/somewhere/else/speedrun/patch_8"
    for name in ("config.json", "environment.json"):
        text = (run.path / name).read_text()
        assert near in text
        (run.path / name).write_text(text.replace(near, far))
    made = Run(tool("publish").publish(run, tmp_path / "runs"))
    assert made.config.encoder.weights == near
    assert made.environment == Run(RESULTS / "trials/speedrun/patch_4").environment


def test_where_images_lay_on_a_machine_is_not_published(tool: Any, tmp_path: Path) -> None:
    run = Run(shutil.copytree(RESULTS / "runs/cifar10-pmae-100", tmp_path / "run"))
    config = replace(run.config, data__source="/somewhere/else/cifar10", probe__data="/somewhere/else/probed.npz")
    write_json(run.path / "config.json", to_dict(config))
    run.add_results(labelled={"source": "/somewhere/else/scans", "labels": "/somewhere/else/scans.csv", "columns": {}})
    made = tool("publish").publish(run, tmp_path / "runs")
    assert not [path for path in made.glob("*.json*") if "somewhere" in path.read_text()]
    assert Run(made).config.probe.data == "data/probed.npz"
    assert Run(made).results["labelled"] == {"source": "data/scans", "labels": "data/scans.csv", "columns": {}}


def test_operations_of_a_stopped_run_are_those_of_its_epochs(tool: Any, tmp_path: Path) -> None:
    whole = long_run(tmp_path, "whole", "cifar10-pmae-100")
    half = Run(Path(shutil.copytree(whole.path, tmp_path / "half")))
    kept = [line for line in whole.metrics() if line["epoch"] <= 400]
    (half.path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in kept))
    counted = [float(tool("published_runs").operations(run)) for run in (whole, half)]
    assert counted[1] == pytest.approx(counted[0] / 2, rel=0.02)


def test_the_speedrun_is_drawn_as_it_was_logged(tool: Any) -> None:
    (axes,) = tool("trials").speedrun_figure().figure.axes
    found = json.loads((RESULTS / "trials/speedrun-long/speedrun.json").read_text())["looks"]
    drawn = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
    assert drawn["linear probe, patches of 8"] == [100 * look["linear"] for look in found if look["patch_size"] == 8]
    assert drawn["k-NN, patches of 2"][-1] == 100 * found[-1]["knn"]


def test_pairs_are_told_apart_by_what_their_folders_say(tool: Any) -> None:
    pairs: ModuleType = tool("pairs")

    def of_both(data: str, *wanted: str, kind: str = "paper") -> list[Interval]:
        """Accuracies of PMAE and MAE after 800 epochs, under a preset, by protocol, pooling and split."""
        runs = [Run(RESULTS / "runs" / f"{data}-{method}-{kind}-800") for method in ("pmae", "mae")]
        scores = [score for run in runs for one in run.evaluations for score in one.scores]
        return [s.accuracy for s in scores if (s.preset, s.protocol, s.pooling, s.split) == wanted]

    medical = pairs.pairs_table(pairs.MEDICAL)
    (derma,) = cells(medical, "DermaMNIST, 20%")
    assert derma[1:3] == ["paper, [CLS]", "val"]
    # Of these runs accuracies alone were kept, shares of 1,003 images.
    mine, other = (each.value / 100 for each in of_both("dermamnist", "paper", "knn", "cls", "val"))
    points, half = 100 * (mine - other), 196 * ((mine * (1 - mine) + other * (1 - other)) / 1003) ** 0.5
    assert derma[5] == f"{points:+.1f} ({points - half:+.1f} to {points + half:+.1f})"
    # Of these what was said of every image: on the same images, which agree, the interval is narrower.
    (blood,) = cells(medical, "BloodMNIST, random")
    mine, other = of_both("bloodmnist", "paper", "linear", "cls", "val", kind="paper-random")
    points, low, high = map(float, re.findall(r"[+-][\d.]+", blood[3]))
    assert points == pytest.approx(mine.value - other.value, abs=0.06)
    assert high - low < math.hypot(mine.high - mine.low, other.high - other.low)
    first, *_ = cells(pairs.pairs_table(pairs.CIFAR10), "the text's settings")
    mine, other = of_both("cifar10", "paper", "mlp", "cls", "test")
    points, half = mine.value - other.value, 0.5 * math.hypot(mine.high - mine.low, other.high - other.low)
    assert first[4] == f"**{points:+.1f} ({points - half:+.1f} to {points + half:+.1f})**"


def test_operations_of_stages_are_added(tool: Any) -> None:
    trials: ModuleType = tool("trials")
    rows = {row[0]: row[1:] for row in cells(trials.looked_at(trials.STAGES), "")}
    large, both = (float(rows[f"patches of 8, 56 epochs{more}"][2]) for more in ("", ", then of 4, 14 epochs"))
    small = Run(RESULTS / "trials/patches/8-then-4")
    assert both - large == pytest.approx(flops_per_image(small.config, (3, 32, 32)) * 50_000 * 14, abs=6e14)


def test_a_score_that_was_measured_anew_is_published_once(tool: Any, tmp_path: Path) -> None:
    source = RESULTS / "runs" / "imagenette-mae-200"
    run = Run(shutil.copytree(source, tmp_path / "run"))
    run.add_evaluation(run.evaluations[0])
    assert len(run.evaluations) == 2
    published = Run(tool("publish").publish(run, tmp_path / "runs"))
    assert published.evaluations == Run(source).evaluations
    assert published.results["pretrain"] == Run(source).results["pretrain"]


@pytest.mark.usefixtures("no_figures")
def test_published_runs_are_compared_image_by_image(tool: Any, tmp_path: Path, tiny: Config, toy: Splits) -> None:
    probes = only(preset("paper"), ["knn"])
    blood = dataclasses.replace(toy, name="bloodmnist", val=toy.test)  # which the paper scores on its val images
    made = []
    for seed in (0, 1):
        run = pretrain(replace(tiny, train__epochs=1, train__seed=seed), blood, out=tmp_path / f"run{seed}", quiet=True)
        made.append(tool("publish").publish(evaluate(run, probes, blood, baselines=False), tmp_path / "runs"))
    assert made[0] != made[1]
    (mine, theirs), sources = map(load, made), [load(tmp_path / f"run{seed}") for seed in (0, 1)]
    # What stands for a run, of test images; and what the paper has.
    kept = {(score.split, score.pooling) for score in mine.scores if score.answers is not None}
    assert kept == {("test", "mean"), ("test", "cls"), ("val", "cls")}
    chosen = [next(s for s in run.scores if s.answers is not None) for run in (mine, theirs)]
    whole = [next(s for s in run.scores if s.key == one.key) for run, one in zip(sources, chosen, strict=True)]
    found, wanted = difference(*chosen), difference(*whole)
    assert found.paired
    assert found == wanted


def test_confusion_of_many_classes_is_left_out(tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(shutil.copytree(RESULTS / "runs" / "imagenette-mae-200", tmp_path / "run"))
    publish = tool("publish")
    for most, kept in ((10, True), (9, False)):  # the set has ten classes
        monkeypatch.setattr(publish, "CLASSES", most)
        scores = Run(publish.publish(run, tmp_path / str(most))).evaluations[0].scores
        assert [bool(score.confusion) for score in scores] == [kept] * len(scores)
        assert [score.accuracy for score in scores] == [score.accuracy for score in run.evaluations[0].scores]


def test_the_table_of_photographs_has_every_score_with_its_interval(tool: Any) -> None:
    rows = {row[0]: row[1:] for row in cells(tool("tables").photograph_table(), "")}
    results = json.loads((RESULTS / "runs" / "imagenette-mae-200" / "results.json").read_text())
    for score in results["evaluations"][0]["scores"]:
        found = {key: 100 * score["metrics"]["accuracy"][key] for key in ("value", "low", "high")}
        shown = "{value:.1f} ({low:.1f} to {high:.1f})".format(**found)
        assert rows[f"MAE 0.75, 200 epochs ({score['pooling']})"][score["protocol"] == "knn"] == shown


def test_published_names_say_what_a_run_is(tool: Any, tmp_path: Path) -> None:
    names = {path.name: tool("publish").name_of(Run(path)) for path in RUNS}
    assert names == {path.name: path.name for path in RUNS}
    for name, changes in {
        "cifar10-pmae-0.4-800": {"masking__masked_variance": 0.4},
        "cifar10-pmae-random-800": {"masking__masked_variance": None, "masking__ratio_schedule": "uniform"},
        "cifar10-pmae-pixels-0.2-800": {"objective__target": "pixels"},
        "cifar10-cosine-grouped=True-0.2-800-seed3": {
            "space__name": "cosine",
            "space__grouped": True,
            "train__seed": 3,
        },
        "cifar10-pmae-paper-800": {"masking__per": "batch", "objective__scale": "sum", "decoder__name": "text"},
        "cifar10-pmae-decoder=text-800": {"decoder__name": "text"},
    }.items():
        assert tool("publish").name_of(long_run(tmp_path, name, "cifar10-pmae-100", **changes)) == name
