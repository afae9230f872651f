"""Run folders are input: old, edited or damaged ones are read or refused in one sentence."""

import contextlib
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from pmae.config import Config, EncoderConfig, SpaceConfig
from pmae.config_file import to_dict
from pmae.errors import UserError
from pmae.export.source import load_source
from pmae.files import write_tensors
from pmae.models import build_encoder
from pmae.report.contents import load
from pmae.runs import Run, create_run
from pmae.spaces import build_space
from pmae.train.checkpoint import load_encoder, load_space

SHAPE = (1, 4, 4)
CONFIG = Config(
    space=SpaceConfig("pca"), encoder=EncoderConfig(patch_size=2, width=8, depth=1, heads=1, first_patch_size=0)
)
DATA = {"name": "toy", "shape": list(SHAPE), "dtype": "uint8", "counts": {"train": 9}, "classes": ["a"], "notes": []}
STATE = "checkpoints/epoch_0001/state.json"
JUNK: list[Any] = [
    *(None, True, -1, 0, 1.5, 10**6, 10**30, 10**400, 1e308, float("nan"), float("inf"), "", "x", "\ud800", "3", "1e9"),
    *([], {}, [[]], {"a": 1}, [1, 2], [1, 2, 3], ["a", None], {"train": []}, "../../x", "\x00"),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run folder, as if trained."""
    run = create_run(tmp_path_factory.mktemp("whole") / "run", CONFIG, {"data": DATA, "device": "CPU"})
    space = {f"space.{key}": value for key, value in build_space(CONFIG.space, SHAPE).state_dict().items()}
    scale = {"standardize.mean": torch.zeros(1, 1, 1), "standardize.std": torch.ones(1, 1, 1)}
    write_tensors(run.path / "fitted.safetensors", space | scale)
    folder = run.path / "checkpoints/epoch_0001"
    folder.mkdir(parents=True)
    write_tensors(folder / "encoder.safetensors", build_encoder(CONFIG.encoder, SHAPE).net.state_dict())
    size = (folder / "encoder.safetensors").stat().st_size
    (folder / "state.json").write_text(json.dumps({"epoch": 1, "step": 4, "files": {"encoder.safetensors": size}}))
    lines = [{"step": n, "epoch": n / 4, "loss": 0.5, "images_per_second": 9.0} for n in (1, 2, 4)]
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run.add_results(pretrain={"epoch": 1, "linear": 0.5, "held_out_r2": None}, held_out=["a.png"])
    return run.path


def read_all(path: Path) -> None:
    """Every file of a run, through every door that embed, export, report and resumption use."""
    run = Run(path)
    doors: list[Callable[[], object]] = [
        lambda: run.config,
        lambda: run.shape,
        lambda: run.evaluations,
        run.metrics,
        run.checkpoints,
        lambda: load_encoder(run),
        lambda: load_space(run),
        lambda: load_source(run, None),
        lambda: load(path),
    ]
    for door in doors:
        with contextlib.suppress(UserError):
            door()


def damaged(value: Any, random: Random) -> Any:
    """A JSON value with one place, at any depth, replaced, removed, or given a neighbour."""
    if isinstance(value, dict | list) and value and random.random() < 0.8:
        key: Any = random.choice(list(value)) if isinstance(value, dict) else random.randrange(len(value))
        changed = dict(value) if isinstance(value, dict) else list(value)
        if random.random() < 0.2:
            del changed[key]
        else:
            changed[key] = damaged(changed[key], random)
        return changed
    return random.choice(JUNK)


def damage_folder(path: Path, random: Random) -> str:
    """Damage one file of a run, as values or as bytes; returns which."""
    name = random.choice(["config.json", "environment.json", "results.json", "metrics.jsonl", STATE])
    text = (path / name).read_text()
    if random.random() < 0.2:
        data, at = text.encode(), random.randrange(len(text))
        (path / name).write_bytes(data[:at] + random.randbytes(random.randrange(4)) + data[at + random.randrange(9) :])
    elif name == "metrics.jsonl":
        lines = [json.dumps(damaged(json.loads(line), random)) for line in text.splitlines()]
        (path / name).write_text("\n".join(lines) + "\n")
    else:
        (path / name).write_text(json.dumps(damaged(json.loads(text), random)))
    return name


def fuzz(whole: Path, folder: Path, count: int) -> int:
    """Damage a copy of the folder so many times; returns how often every door came to an end."""
    shutil.copytree(whole, folder)
    survived = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in range(count):
            name = damage_folder(folder, Random(seed))
            try:
                read_all(folder)
            except Exception as error:
                raise AssertionError(f"seed {seed}, {name}: {(folder / name).read_bytes()[:2000]!r}") from error
            shutil.copy(whole / name, folder / name)
            survived += 1
    return survived


def test_a_whole_folder_is_read(whole: Path) -> None:
    run = Run(whole)
    assert run.config == CONFIG
    assert run.shape == SHAPE
    assert load_encoder(run)[1].width == 8
    assert load_source(run, None).epoch == 1
    assert run.results["pretrain"] == {"epoch": 1, "linear": 0.5, "held_out_r2": None}


def test_a_hundred_damaged_folders_are_read_or_refused(whole: Path, tmp_path: Path) -> None:
    assert fuzz(whole, tmp_path / "run", 100) == 100


@pytest.mark.slow
def test_a_hundred_thousand_damaged_folders_are_read_or_refused(whole: Path, tmp_path: Path) -> None:
    assert fuzz(whole, tmp_path / "run", 100_000) == 100_000


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("environment.json", {}, "must have 'data'"),
        ("environment.json", {"data": []}, r"data must be an object, got \[\]"),
        ("environment.json", {"data": {**DATA, "shape": [1, 4]}}, "shape must be channels, height and width"),
        ("environment.json", {"data": {**DATA, "shape": [1, 4, "4"]}}, r"shape\[2\] must be a whole number, got '4'"),
        (
            "environment.json",
            {"data": {**DATA, "shape": [3, 10**6, 10**6]}},
            "shape must be channels, height and width",
        ),
        ("environment.json", {"data": {**DATA, "dtype": "object"}}, "dtype must be one of"),
        ("config.json", {"encoder": {"width": 10**6}}, r"encoder\.width must be from 1 to 65,536"),
        ("config.json", {"encoder": {"width": 60_000, "heads": 1, "patch_size": 2}}, "does not fit the settings"),
        (STATE, {"step": "4", "epoch": 1}, "must hold a checkpoint"),
        (STATE, [], "must hold a checkpoint"),
    ],
)
def test_a_damage_is_named(whole: Path, tmp_path: Path, name: str, values: Any, message: str) -> None:
    shutil.copytree(whole, tmp_path / "run")
    (tmp_path / "run" / name).write_text(json.dumps(values))
    with pytest.raises(UserError, match=message):
        load_encoder(Run(tmp_path / "run"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1]", r"line 4 must be a JSON object, got \[1\]"),
        ('{"loss": 1}', r"line 4 must be a JSON object with a step, got \['loss'\]"),
        ('{"step": -1}', "line 4: step must be at least 0, got -1"),
        ('{"step": 5, "loss": "low"}', "line 4: loss must be a number, got 'low'"),
        ('{"step": 1' + "0" * 400 + "}", "line 4: step must be below 2"),
        ('{"step"', "must hold a JSON object a line"),
    ],
)
def test_a_damaged_journal_is_named(whole: Path, tmp_path: Path, line: str, message: str) -> None:
    shutil.copytree(whole, tmp_path / "run")
    with (tmp_path / "run/metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(UserError, match=message):
        Run(tmp_path / "run").metrics()


def test_settings_of_a_run_read_as_they_were_written(whole: Path) -> None:
    assert json.loads((whole / "config.json").read_text()) == json.loads(json.dumps(to_dict(Run(whole).config)))
