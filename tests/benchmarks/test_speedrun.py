"""The speedrun on embedded images: stages go on with the encoder before, and the test images are scored once."""

import json
from pathlib import Path

import pytest
import torch
from benchmarks.speedrun import main
from safetensors.torch import load_file
from timm.layers.patch_embed import resample_patch_embed

from pmae.runs import Run


def test_it_runs_to_its_end_and_writes_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--tiny", "--epochs", "2", "1", "--target", "1", "--set", "masking.whole_view", "true"]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    found, runs = json.loads((tmp_path / "speedrun.json").read_text()), [Run(tmp_path / f"patch_{n}") for n in (8, 4)]
    assert found["reached"] is None
    looks = [(look["patch_size"], look["epoch"], look["images"]) for look in found["looks"]]
    assert looks == [(8, 1, 192), (8, 2, 384), (4, 0, 384), (4, 1, 576)]
    logged = [line["linear"] for run in runs for line in run.metrics() if "linear" in line]
    assert [look["linear"] for look in found["looks"]] == logged
    assert found["test"].keys() == {"linear", "knn"}
    assert [run.config.masking.whole_view for run in runs] == [True, True]
    assert [run.config.optim.encoder_rate for run in runs] == [None, 1.0]
    assert [len(run.evaluations) for run in runs] == [0, 1]  # the test images were looked at once
    page, said = (tmp_path / "speedrun.md").read_text(), capsys.readouterr().out
    assert page.startswith("# Speedrun: 100% not reached\n")
    assert "objective.contrastive" in said
    assert f"{found['test']['linear']:.1%}" in page
    assert main([*arguments, "--out", str(tmp_path)]) == 2  # the folder is taken


def test_a_stage_goes_on_with_the_encoder_before_it_at_the_full_rate(tmp_path: Path) -> None:
    # So small a rate that what training begins with is what it ends with.
    still = ["--set", "optim.base_lr", "1e-30", "--set", "optim.weight_decay", "0"]
    assert main(["--tiny", "--epochs", "1", "1", "--target", "0.01", *still, "--out", str(tmp_path)]) == 0
    first, second = (Run(tmp_path / f"patch_{n}") for n in (8, 4))
    large, small = (load_file(run.checkpoint() / "encoder.safetensors") for run in (first, second))
    torch.testing.assert_close(large["blocks.1.mlp.fc1.weight"], small["blocks.1.mlp.fc1.weight"])
    embedding = "patch_embed.proj.weight"
    torch.testing.assert_close(small[embedding], resample_patch_embed(large[embedding], [4, 4]))
    assert second.config.encoder.weights == str(first.path)
    assert (second.config.optim.encoder_rate, second.config.optim.layer_decay) == (1.0, 1.0)
    assert json.loads((tmp_path / "speedrun.json").read_text())["reached"]["epoch"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "2"], "target must be an accuracy in (0, 1], got 2.0"),
        (["--epochs", "3"], "epochs must be as many numbers as patches (2), got [3]"),
        (["--encoder-rate", "0"], "optim.encoder_rate must be above 0, got 0.0"),
        (["--patches", "4", "4"], "patches must be no two alike, got [4, 4]"),
        (["--set", "masking.rate", "1"], "masking.rate"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("speedrun: error: ")
    assert message in said
    assert said.count("\n") == 1
