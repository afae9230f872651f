"""The example on signals and vectors runs from end to end."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "signals.py"


@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize("data", ["lines", "table"])
def test_one_epoch_of_each(data: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("signals", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    monkeypatch.setattr(example, "TEST_FROM", 8)
    found = example.main(["--data", data, "--epochs", "1"])
    assert np.isfinite(found["pretrain"]["r2"])
    assert all(0 <= value <= 1 for name, score in found.items() if name != "pretrain" for value in score.values())
    assert ("vectors of 30 numbers" if data == "table" else "signals of 64 numbers") in capsys.readouterr().out
