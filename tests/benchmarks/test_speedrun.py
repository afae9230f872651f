"""The speedrun on embedded images: stages go on with the encoder before, and the test images are scored once."""

import json
from pathlib import Path

import pytest
import torch
from benchmarks.speedrun import Look, main, write
from safetensors.torch import load_file
from timm.layers.patch_embed import resample_patch_embed

from pmae.runs import Run

STILL = ["--set", "optim.base_lr", "1e-30", "--set", "optim.weight_decay", "0"]
"""So small a rate that what training begins with is what it ends with."""
TWO = ["--patches", "8", "4", "--schedules", "constant", "cosine", "--rates", "1", "1"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("speedrun")
    arguments = [
        *TWO,
        "--tiny",
        "--epochs",
        "2",
        "1",
        "--target",
        "0.01",
        "--set",
        "objective.temperature",
        "0.3",
        *STILL,
    ]
    assert main([*arguments, "--out", str(out)]) == 0
    assert main([*arguments, "--out", str(out)]) == 2  # the folder is taken
    return out


def test_it_runs_to_its_end_and_writes_what_it_found(made: Path) -> None:
    found, runs = json.loads((made / "speedrun.json").read_text()), [Run(made / f"patch_{n}") for n in (8, 4)]
    looks = [(look["patch_size"], look["epoch"], look["images"]) for look in found["looks"]]
    assert looks == [(8, 1, 192), (8, 2, 384), (4, 0, 384), (4, 1, 576)]
    assert found["reached"] == found["looks"][0]
    logged = [line["linear"] for run in runs for line in run.metrics() if "linear" in line]
    assert [look["linear"] for look in found["looks"]] == logged
    assert found["test"].keys() == {"linear", "knn"}
    assert [run.config.objective.temperature for run in runs] == [0.3, 0.3]
    assert [len(run.evaluations) for run in runs] == [0, 1]  # the test images were looked at once
    page = (made / "speedrun.md").read_text()
    assert page.startswith("# Speedrun: 1% after ")
    assert "objective.contrastive" in page
    assert f"{found['test']['linear']:.1%}" in page


def test_a_target_that_is_not_reached_is_said_to_be(tmp_path: Path) -> None:
    write(tmp_path, "cpu", [], 0.9, [Look(1.0, 8, 1, 192, 0.89, 0.8, 3.0)], {"linear": 0.88})
    assert (tmp_path / "speedrun.md").read_text().startswith("# Speedrun: 90% not reached\n")
    assert json.loads((tmp_path / "speedrun.json").read_text())["reached"] is None


def test_a_stage_goes_on_with_the_encoder_before_it_at_the_full_rate(made: Path) -> None:
    first, second = (Run(made / f"patch_{n}") for n in (8, 4))
    large, small = (load_file(run.checkpoint() / "encoder.safetensors") for run in (first, second))
    torch.testing.assert_close(large["blocks.1.mlp.fc1.weight"], small["blocks.1.mlp.fc1.weight"])
    embedding = "patch_embed.proj.weight"
    torch.testing.assert_close(small[embedding], resample_patch_embed(large[embedding], [4, 4]))
    assert second.config.encoder.weights == str(first.path)
    large, small = (load_file(run.checkpoint() / "decoder.safetensors") for run in (first, second))
    carried = {name for name in large if large[name].shape == small[name].shape}
    assert large.keys() - carried == {"head.weight", "head.bias"}  # of patches of another size
    for name in carried:
        torch.testing.assert_close(large[name], small[name])
    assert [run.config.optim.encoder_rate for run in (first, second)] == [None, 1.0]
    assert second.config.optim.layer_decay == 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "2"], "target must be an accuracy in (0, 1], got 2.0"),
        (["--epochs", "3"], "epochs must be one for each of the patches (3), got [3]"),
        (["--schedules", "constant", "slow", "cosine"], "optim.schedule"),
        (["--rates", "1"], "rates must be one for each of the patches (3), got [1.0]"),
        (["--rates", "1", "0", "1"], "optim.base_lr must be above 0, got 0.0"),
        (["--patches", "4", "8", "4"], "patches must be no two alike, got [4, 8, 4]"),
        (["--set", "masking.rate", "1"], "masking.rate"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("speedrun: error: ")
    assert message in said
    assert said.count("\n") == 1
