"""Published runs can still be repeated: their settings load, and every number in the README's table is in results/."""

import json
from pathlib import Path

import pytest

from pmae.config import Config
from pmae.config_file import from_dict
from pmae.derive import resolve

RESULTS = Path(__file__).parent.parent / "results"
RUNS = sorted((RESULTS / "runs").iterdir())


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_a_published_run_can_be_repeated(run: Path) -> None:
    config = from_dict(json.loads((run / "config.json").read_text()))
    assert isinstance(config, Config)
    data = json.loads((run / "environment.json").read_text())["data"]
    # Nothing was left to derive: a later change of the rules cannot change what the file means.
    assert resolve(config, data["counts"]["train"], tuple(data["shape"])) == (config, {})


ROWS = {"cifar10": "CIFAR-10", "dermamnist": "DermaMNIST 64x64", "bloodmnist": "BloodMNIST 64x64"}


@pytest.mark.parametrize(("data", "row"), ROWS.items())
def test_the_table_in_the_readme_is_what_was_measured(data: str, row: str) -> None:
    found = []
    labels = {"pmae": ("random weights", "pca features", "pmae epoch 100"), "mae": ("mae epoch 100",)}
    for method in ("pmae", "mae"):
        results = json.loads((RESULTS / "runs" / f"{data}-{method}-100" / "results.json").read_text())["evaluation"]
        for label in labels[method]:
            entries = results[f"{label} [strong]"]["results"]
            wanted = [e for e in entries if (e["protocol"], e["split"]) == ("linear", "test") and e["pooling"] != "cls"]
            found.append(f"{100 * wanted[0]['metrics']['accuracy']['value']:.1f}")
    random_weights, pca, pmae, mae = found
    page = (RESULTS.parent / "README.md").read_text().splitlines()
    line = next(line for line in page if line.startswith(f"| {row} |"))
    assert line == f"| {row} | {random_weights} | {pca} | {mae} | **{pmae}** |"
