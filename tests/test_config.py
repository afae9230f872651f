"""Settings: contradictions, unknown keys and wrong types are refused; JSON round trips."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmae.cli import parsed
from pmae.config import Config, MaskingConfig, ObjectiveConfig, OptimConfig, SpaceConfig, TrainConfig, replace
from pmae.config_file import from_dict, to_dict, with_settings
from pmae.errors import UserError
from pmae.runs import read_config


def test_round_trip_through_json() -> None:
    config = replace(Config(), masking__masked_variance=0.3, train__epochs=7, optim__warmup_steps=40)
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


@pytest.mark.parametrize("ratio", [0.0, 1.0, -0.1, 1.5, float("nan"), float("inf")])
def test_a_ratio_outside_the_open_interval_is_refused(ratio: float) -> None:
    with pytest.raises(UserError, match=r"masking\.masked_variance must be a share between 0 and 1"):
        MaskingConfig(masked_variance=ratio)


def test_unknown_keys_name_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'epochs'"):
        from_dict({"train": {"epoch": 3}})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"train": {"epochs": "3"}}, r"train\.epochs must be int, got '3'"),
        ({"train": {"epochs": True}}, r"train\.epochs must be int, got True"),
        ({"masking": {"per": "pixel"}}, r"masking\.per: unknown name 'pixel'.*batch, image"),
        ({"augment": {"crop_scale": [0.2]}}, r"augment\.crop_scale must be a list of 2 values"),
        ({"train": []}, "train must be an object"),
        ([], "config must be an object"),
    ],
)
def test_wrong_types_are_refused_by_name(values: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        from_dict(values)


RENAMES = [("masking", "ratio", "ratio_schedule", "uniform"), ("objective", "contrast", "contrastive_weight", 0.5)]


@pytest.mark.parametrize(("section", "old", "new", "value"), RENAMES)
def test_a_renamed_setting_is_refused_with_its_new_name(section: str, old: str, new: str, value: object) -> None:
    kind = {"masking": MaskingConfig, "objective": ObjectiveConfig}[section]
    attempts: list[Callable[[], object]] = [
        lambda: kind(**{old: value}),
        lambda: replace(Config(), **{f"{section}__{old}": value}),
        lambda: from_dict({section: {old: value}}),
        lambda: with_settings(Config(), {f"{section}.{old}": str(value)}),
        lambda: parsed("pretrain", [f"--{section}.{old}", str(value)]),
        lambda: parsed("pretrain", [f"--{section}.{old}={value}"]),
    ]
    for attempt in attempts:
        with pytest.raises(UserError, match=rf"^setting {section}\.{old} is now called {section}\.{new}$"):
            attempt()


@pytest.mark.parametrize(("section", "old", "new", "value"), RENAMES)
def test_a_file_with_an_old_name_is_read(tmp_path: Path, section: str, old: str, new: str, value: object) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({section: {old: value}}))
    assert getattr(getattr(read_config(path), section), new) == value
    path.write_text(json.dumps({section: {old: value, new: value}}))
    with pytest.raises(UserError, match=f"{section}.{old} must be left out, for it is called {section}.{new}"):
        read_config(path)


def test_a_file_older_than_the_contrastive_loss_leaves_it_out(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"objective": {"scale": "sum"}}')
    assert read_config(tmp_path / "config.json").objective.contrastive_weight == 0


def test_every_published_run_loads() -> None:
    paths = sorted((Path(__file__).parent.parent / "results").glob("*/*/config.json"))
    assert len(paths) > 60
    assert all(isinstance(read_config(path), Config) for path in paths)


def test_contradictions_are_refused() -> None:
    with pytest.raises(UserError, match=r"masked_variance belongs to a space of components"):
        Config(space=SpaceConfig("pixels"), masking=MaskingConfig(masked_variance=0.2))
    with pytest.raises(UserError, match=r"masked_patches belongs to space\.name 'pixels'"):
        Config(masking=MaskingConfig(masked_patches=0.2))
    with pytest.raises(UserError, match="does not fit space"):
        replace(Config(), objective__target="patches")
    with pytest.raises(UserError, match="warmup_steps must be unset"):
        OptimConfig(warmup_epochs=1.0, warmup_steps=5)
    with pytest.raises(UserError, match=r"encoder\.width, depth and heads"):
        replace(Config(), encoder__name="resnet18", encoder__width=64)


@given(st.integers(max_value=0))
def test_counts_are_positive(value: int) -> None:
    with pytest.raises(UserError, match="at least 1"):
        TrainConfig(epochs=value)


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(), lambda s: st.dictionaries(st.text(), s)))
def test_arbitrary_json_is_read_or_refused_never_crashes(value: object) -> None:
    with contextlib.suppress(UserError):
        assert isinstance(from_dict(value), Config)
