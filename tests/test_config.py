"""Settings: contradictions, unknown keys and wrong types are refused; JSON round trips."""

import contextlib
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pmae.api import pretrain
from pmae.cli import parsed
from pmae.cli.pretrain import Pretrain
from pmae.config import (
    AugmentConfig,
    Config,
    DataConfig,
    DecoderConfig,
    EncoderConfig,
    MaskingConfig,
    ObjectiveConfig,
    OptimConfig,
    SpaceConfig,
    TrainConfig,
    replace,
)
from pmae.config_file import FREE, flat, from_dict, to_dict, with_settings
from pmae.derive import resolve
from pmae.errors import UserError
from pmae.runs import read_config


def test_round_trip_through_json() -> None:
    config = replace(Config(), masking__masked_variance=0.3, train__epochs=7, optim__warmup_steps=40)
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


@pytest.mark.parametrize("ratio", [0.0, 1.0, -0.1, 1.5])
def test_a_ratio_outside_the_open_interval_is_refused(ratio: float) -> None:
    with pytest.raises(UserError, match=r"masking\.masked_variance must be a share between 0 and 1"):
        MaskingConfig(masked_variance=ratio)


def test_unknown_keys_name_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'epochs'"):
        from_dict({"train": {"epoch": 3}})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"train": {"epochs": "3"}}, r"train\.epochs must be a whole number, got '3'"),
        ({"train": {"epochs": True}}, r"train\.epochs must be a whole number, got True"),
        ({"masking": {"per": "pixel"}}, r"masking\.per: unknown name 'pixel'.*batch, image"),
        ({"augment": {"crop_scale": [0.2]}}, r"augment\.crop_scale must be a list of 2 values"),
        ({"train": []}, "train must be an object"),
        ([], "config must be an object"),
    ],
)
def test_files_with_wrong_types_are_refused_by_name(values: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        from_dict(values)


WRONG: list[tuple[type, str, object, str]] = [
    (MaskingConfig, "per", "pixel", r"masking\.per: unknown name 'pixel'; .*choices: batch, image"),
    (MaskingConfig, "prefix", "longest", r"masking\.prefix: unknown name 'longest'"),
    (MaskingConfig, "ratio_schedule", "normal", r"choices: fixed, uniform"),
    (ObjectiveConfig, "scale", "huber", r"objective\.scale: unknown name 'huber'; choices: constant, mean, sum"),
    (ObjectiveConfig, "target", "tokens", r"choices: components, patches, pixels"),
    (AugmentConfig, "interpolation", "nearest", r"choices: bicubic, bilinear"),
    (AugmentConfig, "crop", 1, r"augment\.crop must be True or False, got 1"),
    (AugmentConfig, "crop_scale", (0.2, 0.5, 1.0), r"augment\.crop_scale must be a list of 2 values"),
    (AugmentConfig, "crop_scale", 0.2, r"augment\.crop_scale must be a list of 2 values, got 0\.2"),
    (AugmentConfig, "crop_scale", ("a", 1), r"augment\.crop_scale must be a number, got 'a'"),
    (DataConfig, "standardize", "image", r"choices: channel, pixel"),
    (DataConfig, "channels", True, r"data\.channels: unknown name True; choices: 1, 3"),
    (DataConfig, "source", "", r"data\.source must be a name or a path, got ''"),
    (DataConfig, "source", None, r"data\.source must be text, got None"),
    (OptimConfig, "schedule", "linear", r"choices: constant, cosine, released"),
    (OptimConfig, "base_lr", math.nan, r"optim\.base_lr must be a finite number, got nan"),
    (OptimConfig, "base_lr", 10**400, r"optim\.base_lr must be a number, got a number too large"),
    (TrainConfig, "engine", "fast", r"choices: auto, compiled, graph, plain"),
    (TrainConfig, "track", "mlfow", r"train\.track: unknown name 'mlfow'"),
    (TrainConfig, "epochs", 1.5, r"train\.epochs must be a whole number, got 1\.5"),
    (TrainConfig, "epochs", 2.0, r"train\.epochs must be a whole number, got 2\.0"),
    (TrainConfig, "epochs", "3", r"train\.epochs must be a whole number, got '3'"),
    (TrainConfig, "epochs", True, r"train\.epochs must be a whole number, got True"),
    (TrainConfig, "seed", 2**64, r"train\.seed must be below 2\*\*63, got a number of \d+ bits"),
    (TrainConfig, "device", 0, r"train\.device must be text, got 0"),
    (DecoderConfig, "name", "big", r"decoder\.name: unknown name 'big'; choices: released, small, text"),
    (EncoderConfig, "width", 10**6, r"encoder\.width must be from 1 to 65,536, got 1000000"),
    (Config, "train", {"epochs": 3}, r"train must be a TrainConfig, got \{'epochs': 3\}"),
]


@pytest.mark.parametrize(("kind", "name", "value", "message"), WRONG)
def test_a_wrong_value_is_refused_when_it_is_given(kind: type, name: str, value: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        kind(**{name: value})


def test_wrong_types_are_type_errors_and_value_errors_too() -> None:
    for expected in (TypeError, ValueError):
        with pytest.raises(expected, match="whole number"):
            TrainConfig(epochs="3")  # type: ignore[arg-type]


def test_scalars_paths_and_devices_become_plain_values() -> None:
    train: Any = {
        "epochs": np.int64(3),
        "batch_size": torch.tensor(8),
        "device": torch.device("cpu"),
        "shard": np.False_,
    }
    config = Config(
        data=DataConfig(source=Path("a") / "b", channels=np.uint8(3)),  # type: ignore[arg-type]
        augment=AugmentConfig(crop_scale=np.array([0.5, 1], np.float32)),  # type: ignore[arg-type]
        optim=OptimConfig(base_lr=np.float32(0.5), weight_decay=1, betas=[0, 0.5]),  # type: ignore[arg-type]
        train=TrainConfig(**train),
    )
    plain = {"data__source": "a/b", "data__channels": 3, "augment__crop_scale": (0.5, 1.0), "optim__base_lr": 0.5}
    plain |= {"optim__weight_decay": 1.0, "optim__betas": (0.0, 0.5)}
    plain |= {"train__epochs": 3, "train__batch_size": 8, "train__device": "cpu", "train__shard": False}
    assert config == replace(Config(), **plain)
    assert json.dumps(to_dict(config)) == json.dumps(to_dict(replace(Config(), **plain)))
    assert {type(value) for part in to_dict(config).values() for value in part.values()} <= PLAIN


PLAIN = {str, int, float, bool, tuple, type(None)}


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda: replace(Config(), trian__epochs=3), r"section: unknown name 'trian'; did you mean 'train'"),
        (lambda: replace(Config(), train__epoch=3), r"setting of train: unknown name 'epoch'; did you mean 'epochs'"),
        (lambda: replace(Config(), epochs=3), r"section: unknown name 'epochs'"),
        (lambda: TrainConfig(epoch=3), r"setting of train: unknown name 'epoch'"),  # type: ignore[call-arg]
        (lambda: Config(trian=TrainConfig()), r"section: unknown name 'trian'"),  # type: ignore[call-arg]
        (lambda: replace({"train": {}}, train__epochs=3), r"config must be a pmae\.Config .*, got a dict"),  # type: ignore[arg-type]
        (lambda: pretrain({"train": {"epochs": 3}}), r"config must be a pmae\.Config .*, got a dict"),  # type: ignore[arg-type]
    ],
)
def test_misspelt_names_and_dictionaries_are_refused_in_one_sentence(
    attempt: Callable[[], object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        attempt()


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


def older(path: Path, without: dict[str, Sequence[str]], **changes: Any) -> Config:
    """What is read of the config.json of a run of before these settings existed."""
    values = to_dict(resolve(replace(Config(), **changes), 10_000, (3, 32, 32))[0])
    for section, names in without.items():
        values[section] = {name: value for name, value in values[section].items() if name not in names}
    path.write_text(json.dumps(values))
    return read_config(path)


def test_a_run_older_than_the_contrastive_loss_leaves_it_out(tmp_path: Path) -> None:
    read = older(tmp_path / "config.json", {"objective": ["contrastive_weight", "local_views"]})
    assert read.objective.contrastive_weight == 0


def test_a_run_older_than_local_views_has_none_at_any_size(tmp_path: Path) -> None:
    read = older(tmp_path / "config.json", {"objective": ["local_views"], "augment": ["extra"]})
    config, _ = resolve(read, 10_000, (3, 224, 224))
    assert (config.objective.contrastive_weight, config.objective.local_views, config.augment.extra) == (1.0, 0, ())


def test_a_run_older_than_muon_has_adamw(tmp_path: Path) -> None:
    read = older(tmp_path / "config.json", {"optim": ["name"]})
    assert resolve(read, 10_000, (3, 32, 32))[0].optim.name == "adamw"


def test_a_run_older_than_centre_crops_squashed_its_files(tmp_path: Path) -> None:
    assert older(tmp_path / "config.json", {"data": ["crop_mode"]}, data__resize=64).data.crop_mode == "squash"
    assert older(tmp_path / "config.json", {"data": ["crop_mode"]}).data.crop_mode == "center"


@pytest.mark.parametrize(
    ("options", "values"),
    [
        (["--patch-size", "4"], {"encoder": {"patch_size": 4}}),
        (["--data.resize", "64"], {"data": {"resize": 64}}),
        (["--objective.temperature", "0.3"], {"objective": {"temperature": 0.3}}),
        (["--optim.weight-decay", "0.1"], {"optim": {"weight_decay": 0.1}}),
        (["--augment.no-flip"], {"augment": {"flip": False}}),
        (["--epochs", "3"], {"train": {"epochs": 3}}),
    ],
)
def test_what_a_file_of_ones_own_leaves_open_follows_from_the_data(
    tmp_path: Path, options: list[str], values: dict[str, Any]
) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(values))
    typed, written = Pretrain.parse(options).configured(), Pretrain.parse(["--config", str(path)]).configured()
    assert typed == written != Config()
    for gpu in (True, False):
        settled, _ = resolve(written, 20_000, (3, 32, 32), gpu=gpu)
        assert settled.objective.contrastive_weight == 1
        assert settled.optim.name == ("muon" if gpu else "adamw")
        assert settled.encoder.first_patch_size == 8


@pytest.mark.parametrize(
    ("name", "unused", "used"),
    [
        ("masking.whole_view", False, True),
        ("space.landmark_choice", "random", "kmeans"),
        ("train.self_check", True, False),
    ],
)
def test_a_setting_that_was_taken_out_is_left_out_unless_the_run_used_it(
    name: str, unused: object, used: object, tmp_path: Path
) -> None:
    file, (section, key) = tmp_path / "config.json", name.split(".")
    file.write_text(json.dumps({section: {key: unused}, "encoder": {"depth": 3}}))
    assert read_config(file) == Config(encoder=EncoderConfig(depth=3))
    file.write_text(json.dumps({section: {key: used}}))
    with pytest.raises(UserError, match=f"{name} must be {unused}, as it was taken out again, got {used!r}"):
        read_config(file)


def test_every_published_run_loads() -> None:
    paths = sorted((Path(__file__).parent.parent / "results").glob("*/*/config.json"))
    assert len(paths) > 60
    assert all(isinstance(read_config(path), Config) for path in paths)


def test_contradictions_are_refused() -> None:
    with pytest.raises(
        UserError,
        match=r"masked_variance must be left unset where space\.name is 'pixels'",
    ):
        Config(space=SpaceConfig("pixels"), masking=MaskingConfig(masked_variance=0.2))
    with pytest.raises(UserError, match=r"masked_patches must be left unset where space\.name is 'pca'"):
        Config(masking=MaskingConfig(masked_patches=0.2))
    with pytest.raises(UserError, match=r"objective\.target must be components or pixels where space\.name is 'pca'"):
        replace(Config(), objective__target="patches")
    with pytest.raises(UserError, match="warmup_steps must be unset"):
        OptimConfig(warmup_epochs=1.0, warmup_steps=5)
    with pytest.raises(UserError, match=r"encoder\.width, depth and heads"):
        replace(Config(), encoder__name="resnet18", encoder__width=64)


def test_what_a_resumed_run_may_change_are_settings() -> None:
    assert flat(Config()).keys() > FREE


@given(st.integers(-(2**62), 0))
def test_counts_are_positive(value: int) -> None:
    with pytest.raises(UserError, match="at least 1"):
        TrainConfig(epochs=value)


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(), lambda s: st.dictionaries(st.text(), s)))
def test_arbitrary_json_is_read_or_refused_never_crashes(value: object) -> None:
    with contextlib.suppress(UserError):
        assert isinstance(from_dict(value), Config)
