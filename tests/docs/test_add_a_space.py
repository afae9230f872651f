"""The page on adding a space: its example runs as printed, passes the contract's suite, and trains."""

import importlib.util
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from pmae import api
from pmae.cli import main
from pmae.config import Config, SpaceConfig, replace
from pmae.errors import UserError
from pmae.spaces import SPACES, build_space

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "add-a-space.md").read_text(), flags=re.DOTALL)


@pytest.fixture(autouse=True)
def page(registry: None) -> dict[str, Any]:
    """What the page's blocks define, run one after another; the name goes with the test."""
    names: dict[str, Any] = {"__name__": "my_spaces"}
    for block in BLOCKS:
        exec(block, names)
    return names


def contract() -> ModuleType:
    spec = importlib.util.spec_from_file_location("contract", ROOT / "tests" / "contracts" / "test_spaces.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_is_short_and_registers_itself(page: dict[str, Any]) -> None:
    assert SPACES["hadamard"] is page["Hadamard"]
    body = page["Hadamard"].__dict__
    assert {"forward_transform", "inverse_transform"} <= body.keys()
    written = next(block for block in BLOCKS if "class Hadamard" in block).partition("class Hadamard")[2]
    assert len([line for line in written.splitlines() if line.strip()]) <= 20
    assert page["config"].space.name == "hadamard"


@pytest.mark.parametrize("shape", [(1, 8, 8), (4, 2, 8), (2, 1, 16)], ids=str)
def test_it_passes_every_check_of_the_contract(shape: tuple[int, int, int], tmp_path: Path) -> None:
    suite, space = contract(), build_space(SpaceConfig("hadamard"), shape)
    x = suite.images(shape)
    space.fit(x.split(64))
    streamed = build_space(space.config, space.shape)
    streamed.fit(x.double().split(64))
    given = {"fitted": (space, x), "streamed": streamed, "tmp_path": tmp_path}
    checks = [check for name, check in vars(suite).items() if name.startswith("test_")]
    fitting = [check for check in checks if "fitted" in inspect.signature(check).parameters]
    for check in fitting:
        check(**{name: given[name] for name in inspect.signature(check).parameters})
    suite.test_one_image_is_refused("hadamard")
    assert len(fitting) >= 7


def test_two_steps_of_pretraining(tiny: Config, tmp_path: Path) -> None:
    images = np.random.default_rng(0).normal(size=(36, 16, 16)).astype(np.float32)
    config = replace(tiny, space__name="hadamard", train__epochs=1, train__batch_size=16, train__log_every=1)
    run = api.pretrain(config, images, tmp_path / "run", quiet=True)
    lines = [line for line in run.metrics() if "loss" in line]
    assert [line["step"] for line in lines] == [1, 2]
    assert all(np.isfinite(line["loss"]) for line in lines)
    assert run.config.space.name == "hadamard"
    assert lines[-1]["masked_share"] == pytest.approx(0.2, abs=0.02)


def test_a_size_that_it_cannot_take_and_a_name_that_nobody_imported_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match=r"a power of two of pixels for 'hadamard', got \(3, 4, 4\)"):
        build_space(SpaceConfig("hadamard"), (3, 4, 4))
    del SPACES["hadamard"]
    command = ["pretrain", "--data", "digits", "--space", "hadamard", "--out", str(tmp_path / "run")]
    assert main([*command, "--epochs", "1", "--device", "cpu"]) == 2
    assert "--space: unknown name 'hadamard'" in capsys.readouterr().err


def test_the_closed_form_is_that_of_the_walsh_hadamard_transform() -> None:
    space = build_space(SpaceConfig("hadamard"), (1, 1, 4))
    z = space.project(torch.tensor([[[[1.0, 2.0, 3.0, 5.0]]]]))
    # Sums with the signs ++++, +-+-, ++--, +--+, over the root of 4.
    torch.testing.assert_close(z, torch.tensor([[5.5, -1.5, -2.5, 0.5]]))
