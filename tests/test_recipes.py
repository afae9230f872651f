"""Every recipe is built as it stands and trained for two steps on a smaller model."""

import re
from pathlib import Path

import pytest

from pmae.api import mae_twin
from pmae.config import Config, replace
from pmae.data.images import Splits
from pmae.derive import resolve
from pmae.errors import UserError
from pmae.experiments.recipes import RECIPES, recipe
from pmae.method import MAE, build_method
from pmae.report.published import accuracy
from pmae.train.loop import pretrain


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_recipe_builds_at_its_own_size_and_trains(name: str, toy: Splits, tmp_path: Path) -> None:
    whole, _ = resolve(recipe(name), 50_000, (3, 32, 32))
    model = build_method(whole, (3, 32, 32))
    assert isinstance(model, MAE) == name.startswith("mae")
    small: Config = replace(
        recipe(name), encoder__width=24, encoder__depth=1, encoder__heads=2, decoder__width=24, decoder__depth=1,
        decoder__heads=2, train__epochs=1, train__batch_size=64, train__device="cpu", optim__warmup_epochs=None,
        optim__warmup_steps=1,
    )  # fmt: skip
    config, _ = resolve(small, len(toy.train), toy.train.shape)
    run = pretrain(config, toy, tmp_path / "run", quiet=True)
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


def test_what_a_recipe_expects_of_the_paper_is_what_the_paper_says() -> None:
    for name, method in (("paper", "pmae_oracle_components"), ("mae", "mae_std")):
        said = RECIPES[name].__doc__ or ""
        for protocol, word in (("linear", "linear"), ("mlp", "MLP"), ("knn", "k-NN"), ("finetune", "fine-tuned")):
            assert f"{word} {accuracy(protocol, method, 'cifar10')}" in said
    for protocol, word in (("linear", "linear"), ("mlp", "MLP")):
        assert f"{word} {accuracy(protocol, 'kmae_oracle', 'cifar10')}" in (RECIPES["kmae"].__doc__ or "")


def test_our_mae_is_the_twin_of_ours() -> None:
    assert recipe("mae_ours") == mae_twin(recipe("ours"))


def test_an_unknown_recipe_names_the_choices() -> None:
    with pytest.raises(UserError, match="did you mean 'paper'"):
        recipe("papr")
