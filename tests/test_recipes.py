"""Every recipe is built as it stands and trained for two steps on a smaller model."""

from pathlib import Path

import pytest

from pmae.config import Config, replace
from pmae.data.images import Splits
from pmae.derive import resolve
from pmae.errors import UserError
from pmae.experiments.recipes import RECIPES, recipe
from pmae.method import MAE, build_method
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
def test_a_recipe_says_how_to_run_it(name: str) -> None:
    assert "pmae pretrain" in (RECIPES[name].__doc__ or "")


def test_an_unknown_recipe_names_the_choices() -> None:
    with pytest.raises(UserError, match="did you mean 'paper'"):
        recipe("papr")
