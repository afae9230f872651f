"""The example that joins lightly and the component mask runs from end to end."""

import importlib.util
import math
from pathlib import Path

import pytest

from pmae.data.images import Splits

EXAMPLE = Path(__file__).parents[2] / "examples" / "simclr_with_components.py"


@pytest.mark.parametrize("views", ["components", "crops"])
def test_two_steps_of_simclr(
    toy: Splits, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], views: str
) -> None:
    pytest.importorskip("lightly")
    spec = importlib.util.spec_from_file_location("simclr_with_components", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    monkeypatch.setattr(example, "load_photos", lambda: toy)
    found = example.main(["--steps", "2", "--batch", "16", "--views", views])
    assert math.isfinite(found["loss"])
    assert 0 <= found["knn"] <= 1
    assert "k-NN" in capsys.readouterr().out
