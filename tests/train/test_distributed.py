"""Several processes train one run: the curve of one process, one writer, and nobody left waiting for the dead."""

import dataclasses
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.commands import started

from pmae.config import TrainConfig
from pmae.errors import UserError
from pmae.runs import Run
from pmae.train.distributed import ONE_PROCESS, World, is_main, was_restarted

from .processes import try_all


class Tried(NamedTuple):
    """Where the runs are, how their processes ended, and what they said."""

    folder: Path
    codes: dict[str, list[int]]
    errors: str

    def run(self, name: str) -> Run:
        return Run(self.folder / name)


def _tried(folder: Path, most: int) -> Tried:
    process = started(try_all, folder, most, said=str(folder / "said"))
    process.join(1200)  # a guard against processes that wait for each other; alone it takes one minute
    said = (folder / "said").read_text()
    assert process.exitcode == 0, said
    return Tried(folder, json.loads((folder / "codes.json").read_text()), said)


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> Tried:
    return _tried(tmp_path_factory.mktemp("processes"), 2)


def lines(run: Run) -> list[dict[str, float]]:
    return [{key: value for key, value in line.items() if key != "images_per_second"} for line in run.metrics()]


def losses(run: Run) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in run.metrics() if "loss" in line}


def tensors(run: Run) -> dict[str, torch.Tensor]:
    files = sorted(run.checkpoint().glob("*.safetensors"))
    return {f"{file.name}/{key}": value for file in files for key, value in load_file(file).items()}


@pytest.mark.parametrize(
    ("one", "several"),
    [
        ("of-1", "of-2"),
        ("of-1", "parts"),
        ("mae", "mae-of-2"),
        ("contrast-1", "contrast-2"),
        ("teacher-1", "teacher-2"),
        ("muon-1", "muon-2"),
        ("contrast-1", "sharded-contrast"),
    ],
)
def test_two_processes_have_the_losses_of_one(tried: Tried, one: str, several: str) -> None:
    assert tried.codes[several] == [0, 0]
    assert len(losses(tried.run(one))) == 6
    assert losses(tried.run(several)) == pytest.approx(losses(tried.run(one)), rel=1e-5)


def test_two_processes_train_both_stages_as_one_does(tried: Tried) -> None:
    assert tried.codes["staged-2"] == [0, 0]
    for stage in ("", "first"):
        one, two = (losses(Run(tried.folder / f"staged-{count}" / stage)) for count in (1, 2))
        assert two == pytest.approx(one, rel=1e-5)
    assert len(losses(Run(tried.folder / "staged-2" / "first"))) == 8
    assert tried.codes["staged occupied"] == [2, 2]


def test_gradients_in_bfloat16_are_close(tried: Tried) -> None:
    assert tried.codes["bf16"] == [0, 0]
    one, rounded = (losses(tried.run(name)) for name in ("of-1", "bf16"))
    assert rounded != one
    assert rounded == pytest.approx(one, rel=0.02)


@pytest.mark.slow
def test_four_processes_have_the_losses_of_one(tmp_path: Path) -> None:
    tried = _tried(tmp_path, 4)
    assert tried.codes["of-4"] == [0, 0, 0, 0]
    assert losses(tried.run("of-4")) == pytest.approx(losses(tried.run("of-1")), rel=1e-5)


def test_the_fit_of_two_processes_is_that_of_one(tried: Tried) -> None:
    one, two = (load_file(tried.folder / name / "fitted.safetensors") for name in ("of-1", "of-2"))
    for name in ("standardize.mean", "standardize.std", "space.mean", "space.variance"):
        torch.testing.assert_close(two[name], one[name], rtol=1e-6, atol=1e-6)
    # Float32 products leave an axis free to turn a little where a neighbour's variance is near; their sum does not.
    spectra = [part["space.components"].T * part["space.variance"] @ part["space.components"] for part in (one, two)]
    torch.testing.assert_close(spectra[1], spectra[0], rtol=1e-5, atol=1e-6)


def test_one_process_writes_and_leaves_what_a_single_one_leaves(tried: Tried) -> None:
    names = [{str(p.relative_to(r)) for p in r.rglob("*")} for r in (tried.folder / "of-1", tried.folder / "of-2")]
    assert names[0] == names[1]
    steps = [line["step"] for line in tried.run("of-2").metrics() if "loss" in line]
    assert steps == sorted(set(steps))


def test_sigterm_to_one_process_stops_all_and_the_resumed_run_is_the_same(tried: Tried) -> None:
    assert tried.codes["stopped"] == [143, 143]
    assert tried.codes["resumed"] == [0, 0]
    # The signal came after 8 steps; they agree when they log, after 9.
    assert (tried.folder / "stopped" / "checkpoints" / "epoch_0003").is_dir()
    whole, resumed = tensors(tried.run("of-2")), tensors(tried.run("stopped"))
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())
    assert lines(tried.run("stopped")) == lines(tried.run("of-2"))


def test_a_killed_process_ends_the_job_with_a_message_and_one_process_can_go_on(tried: Tried) -> None:
    assert tried.codes["killed"] == [2, -9]
    assert "killed: process 0 of 2 lost another one" in tried.errors
    assert tried.codes["seconds until all knew"][0] < 60
    assert tried.codes["resumed by one"] == [0]
    assert losses(tried.run("killed")) == pytest.approx(losses(tried.run("of-1")), rel=1e-5)


def test_a_silent_process_ends_the_job_after_the_timeout(tried: Tried) -> None:
    assert tried.codes["silent"] == [2, 2]
    assert "silent for 4 s (PMAE_TIMEOUT)" in tried.errors


def test_what_cannot_be_divided_or_is_taken_is_refused_by_all(tried: Tried) -> None:
    assert tried.codes["odd"] == [2, 2, 2]
    assert "train.batch_size must be a multiple of the number of processes, 3, got 32" in tried.errors
    assert not (tried.folder / "odd").exists()
    assert tried.codes["occupied"] == [2, 2]
    assert "of-2: out must be a folder without a run" in tried.errors
    assert tried.codes["counted"] == tried.codes["learned"] == tried.codes["normalized"] == [2, 2]
    assert "counted: objective.scale must be constant or sum in several processes" in tried.errors
    assert "learned: space.name must be a space that does not learn" in tried.errors
    assert "normalized: encoder.name must be a network without batch normalization" in tried.errors


def without_keys(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A bias of keys changes no attention: its gradient is rounding alone, of which Adam makes steps of full length."""
    return torch.cat([*tensor.chunk(3)[::2]]) if name.endswith("qkv.bias") else tensor


@pytest.mark.parametrize(("whole", "divided"), [("clipped", "sharded"), ("mae-of-2", "sharded-mae")])
def test_a_divided_model_trains_as_a_whole_one_and_leaves_the_same_files(
    tried: Tried, whole: str, divided: str
) -> None:
    assert tried.codes[divided] == [0, 0]
    assert losses(tried.run(divided)) == pytest.approx(losses(tried.run(whole)), rel=1e-5)
    expected, found = tensors(tried.run(whole)), tensors(tried.run(divided))
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        torch.testing.assert_close(without_keys(name, found[name]), without_keys(name, value), rtol=1e-3, atol=2e-5)
    r2 = [tried.run(name).results["pretrain"]["held_out_r2"] for name in (whole, divided)]
    assert r2[0] == pytest.approx(r2[1], rel=1e-4)


def test_a_divided_run_goes_on_in_one_process_and_divided_again(tried: Tried) -> None:
    assert tried.codes["sharded-killed"] == [2, -9]
    assert "sharded-killed: process 0 of 2 lost another one" in tried.errors
    assert tried.codes["whole again"] == [143]
    assert tried.codes["divided again"] == [0, 0]
    expected, found = losses(tried.run("of-1")), losses(tried.run("sharded-killed"))
    # One process stops where it is, at step 11: that line and the next have other steps behind them.
    assert found.keys() - expected.keys() == {11}
    assert {step: found[step] for step in expected if step != 12} == pytest.approx(
        {step: loss for step, loss in expected.items() if step != 12}, rel=1e-5
    )


def test_one_process_has_nobody_to_divide_a_model_with(tried: Tried) -> None:
    assert tried.codes["sharded-alone"] == [2]
    assert "train.shard must be off in one process" in tried.errors
    assert not (tried.folder / "sharded-alone").exists()
    with pytest.raises(UserError, match=r"train\.engine must be plain or auto where train\.shard is on, got 'graph'"):
        TrainConfig(shard=True, engine="graph")


def test_two_processes_evaluate_as_one_does(tried: Tried) -> None:
    assert tried.codes["scored-1"] == [0]
    assert tried.codes["scored-2"] == [0, 0]
    found = [tried.run(name).evaluations for name in ("scored-1", "scored-2")]
    assert len(found[0]) == 4
    for one, two in zip(*found, strict=True):
        assert len(one.scores) >= 2
        assert dataclasses.replace(one, seconds={}) == dataclasses.replace(two, seconds={})
    assert tried.codes["finetuned"] == [2, 2]
    assert "protocols must be linear, mlp or knn in several processes (2), got 'finetune'" in tried.errors


@pytest.mark.parametrize(("source", "count"), [("array.npy", 96), ("files", 49), ("few", 1)])
def test_two_processes_embed_as_one_does(tried: Tried, source: str, count: int) -> None:
    assert tried.codes[f"{source}-2.npz"] == [0, 0]
    assert (tried.folder / f"{source}-2.npz").read_bytes() == (tried.folder / f"{source}-1.npz").read_bytes()
    with np.load(tried.folder / f"{source}-2.npz") as found:
        assert len(found["features"]) == count


def test_what_one_process_cannot_embed_leaves_nothing_behind(tried: Tried) -> None:
    assert tried.codes["refused.npz"] == [2, 2]
    assert "refused.npz: data.max_unreadable is 0" in tried.errors
    assert not [path for path in tried.folder.iterdir() if "refused" in path.name or "of-process" in path.name]


def test_torchrun_restarts_a_run_whose_process_was_killed(tried: Tried) -> None:
    assert tried.codes["restarted"] == [0]
    assert "exitcode: -9" in tried.errors
    # Nobody asked for --resume: without a restart the existing folder is refused.
    assert list(losses(tried.run("restarted"))) == list(range(3, 19, 3))


def test_a_process_alone_is_its_own_world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WORLD_SIZE", "RANK", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    assert is_main()
    assert not was_restarted(tmp_path)
    assert ONE_PROCESS.all_gather(3) == [3]
    tensor = torch.ones(2)
    assert ONE_PROCESS.all_reduce(tensor) is tensor
    assert ONE_PROCESS.rank_slice(8) == slice(0, 8)
    assert [World(rank, 4).rank_slice(8) for rank in range(4)] == [slice(0, 2), slice(2, 4), slice(4, 6), slice(6, 8)]
