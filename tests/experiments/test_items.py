"""The list of tables and figures: nothing of the paper is left out, and every cell is what the paper describes."""

import dataclasses
from pathlib import Path

import pytest

from pmae.cli import main
from pmae.config import Config, replace
from pmae.errors import UserError
from pmae.paper.cost import Heads, cost_of
from pmae.paper.recipes import recipe
from pmae.paper.tables import DATASETS, ITEMS, RATIOS, Cell, Plan, Row, job_of, jobs_of
from pmae.report.published import accuracy

LABELS = """
tab:results app_tab:training app_tab:evaluation_lin app_tab:evaluation_fine app_tab:results tab:results_kernel
tab:results_A fig:pitch fig:overview fig:pixel_mask fig:masking3 fig:mae_hyperparameters fig:stability
fig:masking_pc fig:medmnist fig:masking app_tab:model app_fig:ressources fig:reconstructions
app_fig:performance_curve fig:overview_A fig:pmae_masking_ratio_combined
"""
"""Every table and figure of the paper, by its label in the source."""


def test_every_table_and_figure_of_the_paper_is_in_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paper", "--list"]) == 0
    printed = capsys.readouterr().out
    words = printed.replace("(", " ").replace(")", " ").replace(",", " ").split()
    assert set(LABELS.split()) <= set(words)
    assert set(ITEMS) <= set(words)


@pytest.mark.parametrize(
    ("protocol", "row", "data", "value"),
    [
        ("linear", Row("mae", 0.75), "cifar10", 41.7),
        ("mlp", Row("mae", "oracle"), "tinyimagenet", 22.2),
        ("finetune", Row("pmae", "oracle"), "dermamnist", 82.3),
        ("linear", Row("mae", "random"), "bloodmnist", 83.2),
        ("mlp", Row("pmae", "random"), "pathmnist", 97.7),
        ("knn", Row("pmae", "oracle", "pixels"), "cifar10", 48.1),
        ("linear", Row("pmae", "random", "pixels"), "cifar10", 56.0),
        ("mlp", Row("kmae", "oracle"), "cifar10", 68.6),
    ],
)
def test_a_row_finds_its_published_number(protocol: str, row: Row, data: str, value: float) -> None:
    assert accuracy(protocol, row.key, data) == value


@pytest.mark.parametrize("name", [name for name, item in ITEMS.items() if item.kind == "table"])
def test_every_cell_of_a_table_has_a_published_number(name: str) -> None:
    item = ITEMS[name]
    for cell in item.cells(Plan()):
        assert all(accuracy(protocol, cell.row.key, cell.data) is not None for protocol in item.protocols)


def settings_that_differ(config: Config, base: Config) -> set[str]:
    """Dotted names of what a cell changes, apart from the data, the device and the seed."""
    flat = [
        {f"{room}.{key}": value for room, part in dataclasses.asdict(c).items() for key, value in part.items()}
        for c in (config, base)
    ]
    return {name for name in flat[0] if flat[0][name] != flat[1][name]} - {"data.source", "train.device"}


def test_the_cells_are_the_recipes_with_what_the_paper_varies() -> None:
    item, plan = ITEMS["main"], Plan()
    std = job_of(item, Cell(Row("mae", 0.75), "cifar10"), 0.75, 0, plan).config
    assert settings_that_differ(std, recipe("mae")) == set()
    third = job_of(item, Cell(Row("pmae", "oracle"), "cifar10"), 0.3, 0, plan).config
    assert settings_that_differ(third, recipe("paper")) == {"masking.masked_variance"}
    drawn = job_of(item, Cell(Row("mae", "random"), "cifar10"), None, 0, plan).config
    assert settings_that_differ(drawn, recipe("mae")) == {"masking.ratio_schedule", "masking.masked_patches"}
    pixels = job_of(item, Cell(Row("pmae", "oracle", "pixels"), "cifar10"), 0.2, 0, plan).config
    assert settings_that_differ(pixels, recipe("paper")) == {"objective.target"}
    kernel = job_of(item, Cell(Row("kmae", "oracle"), "cifar10"), 0.3, 0, plan).config
    assert settings_that_differ(kernel, recipe("kmae")) == set()
    assert (kernel.space.name, kernel.space.gamma) == ("kernel_pca", 3e-4)
    ours = job_of(item, Cell(Row("mae", 0.75), "cifar10"), 0.75, 4, Plan("ours", epochs=7)).config
    assert ours == replace(recipe("mae_ours"), data__source="cifar10", train__seed=4, train__epochs=7)


def test_what_the_main_table_costs() -> None:
    # Per data set: 9 ratios of MAE and of PMAE, MAE at 0.75, and a random ratio for each.
    cost = cost_of(ITEMS["main"], Plan(datasets=("cifar10",)))
    assert cost.runs == 21
    # Five rows are evaluated: probes and fine-tuning, 100 epochs each.
    assert cost.images == 50_000 * (21 * 800 + 5 * 200)
    assert cost.hours(50_000) == pytest.approx((21 * 800 + 5 * 200) / 3600)
    # With three seeds the two searches stay at one seed, the rest is repeated.
    assert cost_of(ITEMS["main"], Plan(datasets=("cifar10",), seeds=(0, 1, 2))).runs == 2 * 9 + 2 * 2 + 3 * 3
    # At 64x64 an image has 65 tokens instead of 17.
    tiny = cost_of(ITEMS["main"], Plan(datasets=("tinyimagenet",)))
    assert tiny.work / tiny.images == pytest.approx(65 / 17)
    assert cost_of(ITEMS["main"], Plan()).runs == 21 * len(DATASETS)


def test_a_measured_speed_takes_the_place_of_the_stated_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paper", "--list", "--images-per-second", "1000", "--datasets", "cifar10"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "hours, this machine" in lines[0]
    hours = 50_000 * (21 * 800 + 5 * 200) / 1000 / 3600
    assert f"{hours:,.0f}" in next(line for line in lines if line.startswith("main"))


def hours_on_cores(capsys: pytest.CaptureFixture[str], *options: str) -> float:
    assert main(["paper", "--list", "--datasets", "cifar10", *options]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("main"))
    return float(line.split()[5].replace(",", ""))


def test_small_networks_are_counted_where_they_are_derived(capsys: pytest.CaptureFixture[str]) -> None:
    # 21 runs of 100 epochs, and five rows of probes and fine-tuning for 100 each, of 65 tokens an image.
    images = 50_000 * (21 * 100 + 5 * 200)
    assert hours_on_cores(capsys, "--recipe", "ours") == pytest.approx(images / 479 / 3600, rel=0.02)
    # A size that is given keeps the paper's other sizes, and its speed.
    sized = hours_on_cores(capsys, "--recipe", "masking", "--set", "decoder.name=small")
    assert sized == pytest.approx(images * 65 / 17 / 56 / 3600, rel=0.02)


def test_a_second_view_is_counted_where_it_is_derived() -> None:
    plan = Plan("ours", ("cifar10",))
    # 150 epochs of two views on a GPU, 100 epochs of one without.
    assert cost_of(ITEMS["main"], plan).images == 50_000 * (21 * 150 * 2 + 5 * 200)
    assert cost_of(ITEMS["main"], plan, gpu=False).images == 50_000 * (21 * 100 + 5 * 200)
    assert cost_of(ITEMS["main"], Plan("masking", ("cifar10",))).images == 50_000 * (21 * 100 + 5 * 200)


def test_several_presets_are_several_evaluations() -> None:
    one, both = (
        cost_of(ITEMS["spread"], Plan(datasets=("cifar10",)), Heads(names))
        for names in (("paper",), ("paper", "plain"))
    )
    # Features for probes without augmentation are computed once for each of 18 runs.
    assert both.images - one.images == 18 * 50_000
    assert both.runs == one.runs


def test_the_list_counts_what_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    heads = Heads(kinds=("linear",), epochs=7)
    assert cost_of(ITEMS["main"], Plan(datasets=("cifar10",)), heads).images == 50_000 * (21 * 800 + 5 * 7)
    options = ["--datasets", "cifar10", "--protocols", "linear", "--head-epochs", "7", "--images-per-second", "1000"]
    assert main(["paper", "--list", "main", *options]) == 0
    line, label = capsys.readouterr().out.splitlines()[1:3]
    assert line.split()[:3] == ["main", "21", f"{0.05 * (21 * 800 + 5 * 7):,.1f}"]
    assert label.split()[:2] == ["Table", "1"]
    assert main(["paper", "--list", *options]) == 0
    named = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line[:1].islower()]
    # Items without a linear probe are left out: k-NN, settings, drawings and pictures.
    assert named[1:-1] == ["main", "kernel", "pixel-objective", "ratio", "epochs", "spread"]


def test_rows_can_be_left_out() -> None:
    plan = Plan(datasets=("cifar10",), ratios=(0.1, 0.2), methods=("mae_std", "pmae_oracle_components"))
    assert [job.name for job in jobs_of(ITEMS["main"], plan)] == [
        f"cifar10-{name}-seed0" for name in ("mae-0.75", "pmae-0.1", "pmae-0.2")
    ]
    assert cost_of(ITEMS["main"], plan).runs == 3


def test_items_share_their_runs() -> None:
    main_runs = {job.config for job in jobs_of(ITEMS["main"], Plan())}
    assert {job.config for job in jobs_of(ITEMS["spread"], Plan())} < main_runs
    assert {job.config for job in jobs_of(ITEMS["epochs"], Plan())} < main_runs
    assert len(jobs_of(ITEMS["ratio"], Plan())) == (3 * len(RATIOS) + 2) * len(DATASETS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["man"], "did you mean 'main'"),
        ([], "name at least one table or figure; choices: main"),
        (["main", "--datasets", "cifar"], "did you mean 'cifar10'"),
        (["main", "--recipe", "mae"], "choices: masking, ours, paper, released"),
        (["main", "--ratios", "1.5"], "ratios must be shares in (0, 1)"),
        (["main", "--ratios", "0.2", "0.20"], "ratios must be all different"),
        (["main", "--datasets", "cifar10", "cifar10"], "datasets must be all different"),
        (["main", "--seeds", "1", "1"], "no two alike"),
        (["main", "--epochs", "0"], "epochs must be at least 1, got 0"),
        (["main", "--head-epochs", "0"], "--head-epochs must be at least 1, got 0"),
        (["main", "--only-found", "--runs", "nowhere"], "--runs must be folders that hold run folders, got 'nowhere'"),
        (["--list", "--images-per-second", "0"], "--images-per-second must be above 0, got 0.0"),
        (["knn", "main", "--protocols", "knn", "--only-found"], "protocols of 'main' must be among"),
        (["main", "--protocols", "knn"], "protocols of 'main' must be among linear, mlp, finetune, got knn"),
        (["main", "--protocols", "lienar"], "did you mean 'linear'"),
        (["main", "--set", "encoder.depth"], "--set must be settings as name=value"),
        (["main", "--set", "encoder.dept=1"], "did you mean 'encoder.depth'"),
        (["main", "--set", "encoder.depth=deep"], "encoder.depth must be int, got 'deep'"),
        (["main", "--preset", "papr"], "did you mean 'paper'"),
        (["main", "--preset", "plain", "strnog"], "did you mean 'strong'"),
        (["main", "--preset", "plain", "plain"], "preset must be one or more, no two alike"),
        (["main", "--methods", "mae_stt"], "did you mean 'mae_std'"),
        (
            ["spread", "--methods", "mae_std"],
            "methods of 'spread' must be among mae_oracle, pmae_oracle_components, got",
        ),
        (["main", "--pooling", "both"], "pooling: unknown name 'both'"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["paper", *arguments, "--out", f"{tmp_path}/out"]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_plan_is_checked_when_it_is_made() -> None:
    with pytest.raises(UserError, match="recipe: unknown name 'papers'"):
        Plan("papers")
