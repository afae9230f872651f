"""What tables and figures cost: runs, images seen and hours, of what was asked for."""

import pytest

from pmae.cli import main
from pmae.config import replace
from pmae.flops import flops_per_image
from pmae.paper.recipes import recipe
from pmae.paper.tables import DATASETS, ITEMS, RunChoices, cost_of
from pmae.sweep.scoring import Scoring


def test_what_the_main_table_costs() -> None:
    # Per data set: 9 ratios of MAE and of PMAE, MAE at 0.75, and a random ratio for each.
    cost = cost_of(ITEMS["main"], RunChoices(datasets=("cifar10",)))
    assert cost.runs == 21
    # Five rows are evaluated: probes and fine-tuning, 100 epochs each.
    assert cost.images == 50_000 * (21 * 800 + 5 * 200)
    assert cost.hours(50_000) == pytest.approx((21 * 800 + 5 * 200) / 3600)
    # With three seeds the two searches stay at one seed, the rest is repeated.
    assert cost_of(ITEMS["main"], RunChoices(datasets=("cifar10",), seeds=(0, 1, 2))).runs == 2 * 9 + 2 * 2 + 3 * 3
    # At 64x64 an image has 65 tokens instead of 17.
    tiny = cost_of(ITEMS["main"], RunChoices(datasets=("tinyimagenet",)))
    assert tiny.work / tiny.images == pytest.approx(65 / 17)
    assert cost_of(ITEMS["main"], RunChoices()).runs == 21 * len(DATASETS)


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
    # 21 runs of 100 epochs with 17 tokens and of 25 with 65, two views each; five rows of probes and fine-tuning for
    # 100 epochs each, of 65 tokens an image.
    images = 50_000 * (21 * 2 * (100 * 17 / 65 + 25) + 5 * 200)
    assert hours_on_cores(capsys, "--recipe", "ours") == pytest.approx(images / 479 / 3600, rel=0.02)
    images = 50_000 * (21 * 100 + 5 * 200)
    # A size that is given keeps the paper's other sizes, and their speed.
    sized = hours_on_cores(capsys, "--recipe", "masking", "--set", "decoder.name=released")
    assert sized == pytest.approx(images * 65 / 17 / 56 / 3600, rel=0.02)


@pytest.mark.parametrize("setting", ["encoder.width=24", "decoder.depth=1"])
def test_smaller_networks_cost_less_in_proportion_to_their_operations(
    setting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = ["--methods", "pmae_oracle_components"]
    whole, small = hours_on_cores(capsys, *rows), hours_on_cores(capsys, *rows, "--set", setting)
    name, _, value = setting.partition("=")
    config = replace(recipe("paper"), **{name.replace(".", "__"): int(value)})
    shares = [flops_per_image(one, (3, 32, 32)) for one in (config, recipe("paper"))]
    assert small / whole == pytest.approx(shares[0] / shares[1], rel=0.02)
    assert small < 0.8 * whole


def test_a_second_view_is_counted_where_it_is_derived() -> None:
    chosen = RunChoices("ours", ("cifar10",))
    # 300 epochs of two views with large patches and 75 with small ones on a GPU; without, 100 and 25.
    assert cost_of(ITEMS["main"], chosen).images == 50_000 * (21 * 375 * 2 + 5 * 200)
    assert cost_of(ITEMS["main"], chosen, gpu=False).images == 50_000 * (21 * 125 * 2 + 5 * 200)
    assert cost_of(ITEMS["main"], RunChoices("masking", ("cifar10",))).images == 50_000 * (21 * 100 + 5 * 200)


def test_several_presets_are_several_evaluations() -> None:
    one, both = (
        cost_of(ITEMS["spread"], RunChoices(datasets=("cifar10",)), Scoring(presets=names))
        for names in (("paper",), ("paper", "plain"))
    )
    # Features for probes without augmentation are computed once for each of 18 runs.
    assert both.images - one.images == 18 * 50_000
    assert both.runs == one.runs


def test_the_list_counts_what_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    scoring = Scoring(protocols=("linear",), head_epochs=7)
    assert cost_of(ITEMS["main"], RunChoices(datasets=("cifar10",)), scoring).images == 50_000 * (21 * 800 + 5 * 7)
    options = ["--datasets", "cifar10", "--protocols", "linear", "--head-epochs", "7", "--images-per-second", "1000"]
    assert main(["paper", "--list", "main", *options]) == 0
    line, label = capsys.readouterr().out.splitlines()[1:3]
    assert line.split()[:3] == ["main", "21", f"{0.05 * (21 * 800 + 5 * 7):,.1f}"]
    assert label.split()[:2] == ["Table", "1"]
    assert main(["paper", "--list", *options]) == 0
    named = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line[:1].islower()]
    # Items without a linear probe are left out: k-NN, settings, drawings and pictures.
    assert named[1:-1] == ["main", "kernel", "pixel-objective", "ratio", "epochs", "spread"]
