"""The list of tables and figures: nothing of the paper is left out, and every cell is what the paper describes."""

import dataclasses
from pathlib import Path

import pytest

from pmae.cli import main
from pmae.config import Config, replace
from pmae.errors import UserError
from pmae.paper.recipes import recipe
from pmae.paper.tables import DATASETS, ITEMS, RATIOS, Row, RunChoices, cost_of, spec_of, specs_of
from pmae.report.published import published_accuracy

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
    assert published_accuracy(protocol, row.key, data) == value


@pytest.mark.parametrize("name", [name for name, item in ITEMS.items() if item.kind == "table"])
def test_every_cell_of_a_table_has_a_published_number(name: str) -> None:
    item = ITEMS[name]
    for row, data in item.cells(RunChoices()):
        assert all(published_accuracy(protocol, row.key, data) is not None for protocol in item.protocols)


def settings_that_differ(config: Config, base: Config) -> set[str]:
    """Dotted names of what a cell changes, apart from the data, the device and the seed."""
    flat = [
        {f"{room}.{key}": value for room, part in dataclasses.asdict(c).items() for key, value in part.items()}
        for c in (config, base)
    ]
    return {name for name in flat[0] if flat[0][name] != flat[1][name]} - {"data.source", "train.device"}


def test_the_cells_are_the_recipes_with_what_the_paper_varies() -> None:
    item, chosen = ITEMS["main"], RunChoices()
    std = spec_of(item, Row("mae", 0.75), "cifar10", 0.75, 0, chosen).config
    assert settings_that_differ(std, recipe("mae")) == set()
    third = spec_of(item, Row("pmae", "oracle"), "cifar10", 0.3, 0, chosen).config
    assert settings_that_differ(third, recipe("paper")) == {"masking.masked_variance"}
    drawn = spec_of(item, Row("mae", "random"), "cifar10", None, 0, chosen).config
    assert settings_that_differ(drawn, recipe("mae")) == {"masking.ratio_schedule", "masking.masked_patches"}
    pixels = spec_of(item, Row("pmae", "oracle", "pixels"), "cifar10", 0.2, 0, chosen).config
    assert settings_that_differ(pixels, recipe("paper")) == {"objective.target"}
    kernel = spec_of(item, Row("kmae", "oracle"), "cifar10", 0.3, 0, chosen).config
    assert settings_that_differ(kernel, recipe("kmae")) == set()
    assert (kernel.space.name, kernel.space.gamma) == ("kernel_pca", 3e-4)
    ours = spec_of(item, Row("mae", 0.75), "cifar10", 0.75, 4, RunChoices("ours", epochs=7)).config
    assert ours == replace(recipe("mae_ours"), data__source="cifar10", train__seed=4, train__epochs=7)


def test_rows_can_be_left_out() -> None:
    chosen = RunChoices(datasets=("cifar10",), ratios=(0.1, 0.2), methods=("mae_std", "pmae_oracle_components"))
    assert [spec.name for spec in specs_of(ITEMS["main"], chosen)] == [
        f"cifar10-{name}-seed0" for name in ("mae-0.75", "pmae-0.1", "pmae-0.2")
    ]
    assert cost_of(ITEMS["main"], chosen).runs == 3


def test_items_share_their_runs() -> None:
    main_runs = {spec.config for spec in specs_of(ITEMS["main"], RunChoices())}
    assert {spec.config for spec in specs_of(ITEMS["spread"], RunChoices())} < main_runs
    assert {spec.config for spec in specs_of(ITEMS["epochs"], RunChoices())} < main_runs
    assert len(specs_of(ITEMS["ratio"], RunChoices())) == (3 * len(RATIOS) + 2) * len(DATASETS)


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
        (["main", "--set", "encoder.depth=deep"], "encoder.depth must be a whole number, got 'deep'"),
        (["main", "--set", "encoder.depth={[]: 1}"], "encoder.depth must be a whole number, got '{[]: 1}'"),
        (["ratio", "--set", "masking.masked_variance=0.3"], "must be given by --ratios, got '0.3'"),
        (["main", "--set", "train.seed=3"], "train.seed must be given by --seeds, got '3'"),
        (["main", "--set", "data.source=photos"], "data.source must be given by --datasets, got 'photos'"),
        (
            ["main", "--only-found", "--images-per-second", "9"],
            "--images-per-second must be given with --list, got 9.0",
        ),
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


def test_choices_are_checked_when_they_are_made() -> None:
    with pytest.raises(UserError, match="recipe: unknown name 'papers'"):
        RunChoices("papers")
