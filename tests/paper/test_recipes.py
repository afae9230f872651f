"""Every recipe is built as it stands and trained for two steps on a smaller model."""

import re
from pathlib import Path

import pytest
from tests.conftest import smooth_images

from pmae.config import Config, replace
from pmae.config_file import flat
from pmae.data.images import ImageSet, Splits
from pmae.derive import resolve
from pmae.errors import UserError
from pmae.method import MAE, build_method
from pmae.paper.recipes import RECIPES, recipe, with_patches
from pmae.report.published import published_accuracy
from pmae.runs import Run
from pmae.train.loop import pretrain


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_recipe_builds_at_its_own_size_and_trains(name: str, tmp_path: Path) -> None:
    whole, _ = resolve(recipe(name), 50_000, (3, 32, 32))
    model = build_method(whole, (3, 32, 32))
    assert isinstance(model, MAE) == name.startswith("mae")
    small: Config = replace(
        recipe(name), encoder__width=24, encoder__depth=1, encoder__heads=2, decoder__width=24, decoder__depth=1,
        decoder__heads=2, train__epochs=1, train__batch_size=64, train__device="cpu", optim__warmup_epochs=None,
        optim__warmup_steps=1,
    )  # fmt: skip
    images = ImageSet(smooth_images(128, (3, 16, 16)))  # four patches of 8
    config, _ = resolve(small, len(images), images.shape)
    run = pretrain(config, Splits("smooth", images), tmp_path / "run", quiet=True)
    assert [line["step"] for line in run.metrics()][-1] == 2


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_recipe_says_how_to_run_it_what_it_costs_and_what_to_expect(name: str) -> None:
    lines = [line.strip() for line in (RECIPES[name].__doc__ or "").splitlines()]
    (command,) = [line for line in lines if line.startswith("pmae pretrain")]
    assert f"--recipe {name} " in command or name == "ours"
    (cost,) = [line for line in lines if line.startswith("Cost: ")]
    assert re.search(r"\d+ million images", cost)
    (expected,) = [line for line in lines if line.startswith("Expect: ")]
    assert re.search(r"\d+\.\d|`mae`", expected)


@pytest.mark.parametrize(("name", "method", "run"), [("paper", "pmae", "pmae-paper"), ("mae", "mae", "mae-paper")])
def test_what_a_recipe_expects_is_what_was_measured_and_what_the_paper_says(name: str, method: str, run: str) -> None:
    said = RECIPES[name].__doc__ or ""
    row, words = {"pmae": "pmae_oracle_components", "mae": "mae_std"}[method], ("linear", "MLP", "k-NN", "fine-tuned")
    protocols = ("linear", "mlp", "knn", "finetune")
    paper = ", ".join(f"{published_accuracy(protocol, row, 'cifar10'):.1f}" for protocol in protocols)
    assert f"published {paper})" in said
    results = Run(Path(__file__).parents[2] / "results" / "runs" / f"cifar10-{run}-800").results["evaluation"]
    entries = results[f"{method} epoch 800 [paper]"]["results"]
    found = {e["protocol"]: 100 * e["metrics"]["accuracy"]["value"] for e in entries if e["pooling"] == "cls"}
    assert ", ".join(f"{w} {found[p]:.1f}" for w, p in zip(words, protocols, strict=True)) in said


def test_text_and_released_code_differ_in_what_the_page_lists_and_in_nothing_else() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reproduce-the-paper.md").read_text()
    table = page.partition("| setting |")[2].partition("\n\n")[0]
    listed = set(re.findall(r"`([a-z]+\.[a-z_]+)`", "\n".join(line.split(" | ")[0] for line in table.splitlines())))
    pairs = [[flat(recipe(name)) for name in names] for names in (("paper", "released"), ("mae", "mae_released"))]
    found = [{key for key in text if text[key] != code[key]} for text, code in pairs]
    assert found[0] | found[1] == listed
    assert found[0] ^ found[1] == {"objective.scale", "masking.prefix", "objective.normalize_patches"}


def test_what_kmae_expects_is_what_the_paper_says() -> None:
    for protocol, word in (("linear", "linear"), ("mlp", "MLP")):
        assert f"{word} {published_accuracy(protocol, 'kmae_oracle', 'cifar10')}" in (RECIPES["kmae"].__doc__ or "")


def test_our_mae_is_the_twin_of_ours() -> None:
    assert recipe("mae_ours") == with_patches(recipe("ours"))


def test_an_unknown_recipe_names_the_choices() -> None:
    with pytest.raises(UserError, match="did you mean 'paper'"):
        recipe("papr")
