"""Training: it learns, it repeats itself, it resumes bit for bit, and it loses nothing when it is stopped."""

import json
import os
import shutil
import signal
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from pmae.config import Config, replace
from pmae.data.images import ImageSet, Splits
from pmae.derive import resolve
from pmae.errors import Interrupted, UserError
from pmae.evaluate.probes import online_probe
from pmae.runs import Run
from pmae.train import checkpoint, environment
from pmae.train.loop import Pretraining, pretrain
from pmae.train.schedule import step_seed


def settled(config: Config, splits: Splits, **changes: object) -> Config:
    return resolve(replace(config, **changes), len(splits.train), splits.train.shape)[0]


def weights(run: Run) -> dict[str, torch.Tensor]:
    last = run.checkpoint()
    return {f"{f.name}/{k}": v.clone() for f in sorted(last.glob("*.safetensors")) for k, v in load_file(f).items()}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def lines(run: Run) -> list[dict[str, float]]:
    return [{k: v for k, v in line.items() if k != "images_per_second"} for line in run.metrics()]


@pytest.mark.parametrize("space", ["pca", "pixels"])
def test_a_run_learns_and_leaves_a_whole_folder(tiny: Config, toy: Splits, tmp_path: Path, space: str) -> None:
    config = settled(tiny, toy, space__name=space, train__epochs=12)
    run = pretrain(config, toy, tmp_path / "run", quiet=True)
    logged = [line for line in run.metrics() if "loss" in line]
    assert logged[-1]["loss"] < logged[0]["loss"]
    assert {"loss", "r2", "masked_share", "images_per_second", "lr", "epoch", "step"} <= logged[0].keys()
    assert logged[-1]["step"] == 12 * 4
    assert logged[-1]["masked_share"] == pytest.approx(0.2 if space == "pca" else 0.75, abs=0.06)
    assert run.config == config
    assert run.environment["data"]["counts"] == {"train": 128, "test": 32}
    assert -1 < run.results["pretrain"]["held_out_r2"] < 1
    assert {p.name for p in run.checkpoint().iterdir()} == {
        "encoder.safetensors", "decoder.safetensors", "optimizer.safetensors", "state.json",
    }  # fmt: skip
    # Older checkpoints keep the encoder alone.
    assert {p.name for p in run.checkpoint(3).iterdir()} == {"encoder.safetensors", "state.json"}
    samples = load_file(run.path / "samples.safetensors")
    assert samples["visible"].shape == (8, 3, 8, 8)
    assert (samples["token_colours"].shape, samples["attention"].shape) == ((8, 2, 2, 3), (8, 2, 2))


def test_a_run_killed_before_it_thinned_out_does_so_when_it_is_resumed(
    tiny: Config, toy: Splits, tmp_path: Path
) -> None:
    config = settled(tiny, toy, train__epochs=4, train__keep=1)
    run = pretrain(config, toy, tmp_path / "run", quiet=True)
    kept = sorted(run.path.rglob("*.safetensors"))
    for name in ("decoder.safetensors", "optimizer.safetensors"):
        shutil.copy(run.checkpoint() / name, run.checkpoint(3) / name)
    pretrain(config, toy, run.path, resume=True, quiet=True)
    assert sorted(run.path.rglob("*.safetensors")) == kept


def test_a_copy_without_its_repository_is_told_the_commit(toy: Splits, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setenv("PMAE_COMMIT", "0a1b2c")
    assert environment.describe_environment(toy, cpu)["commit"] == "0a1b2c"
    monkeypatch.delenv("PMAE_COMMIT")
    monkeypatch.setenv("PATH", "")  # no git
    assert environment.describe_environment(toy, cpu)["commit"].startswith("version ")


def test_an_installed_copy_says_nothing_of_the_repository_it_lies_in(
    toy: Splits, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", tmp_path, *author, "commit", "-q", "--allow-empty", "-m", "theirs"], check=True)
    copy = tmp_path / ".venv/lib/python3/site-packages/pmae/train/environment.py"
    copy.parent.mkdir(parents=True)
    monkeypatch.delenv("PMAE_COMMIT", raising=False)
    monkeypatch.setattr(environment, "__file__", str(copy))
    assert environment.describe_environment(toy, torch.device("cpu"))["commit"].startswith("version ")


@pytest.fixture(scope="module")
def whole(tiny: Config, toy: Splits, tmp_path_factory: pytest.TempPathFactory) -> Run:
    config = settled(tiny, toy, masking__ratio_schedule="uniform", optim__clip_norm=1.0)
    return pretrain(config, toy, tmp_path_factory.mktemp("whole") / "run", quiet=True)


def test_the_same_seed_repeats_the_run_and_another_does_not(whole: Run, toy: Splits, tmp_path: Path) -> None:
    again = pretrain(whole.config, toy, tmp_path / "again", quiet=True)
    other = pretrain(replace(whole.config, train__seed=1), toy, tmp_path / "other", quiet=True)
    assert_equal(weights(again), weights(whole))
    assert lines(again) == lines(whole)
    assert lines(other) != lines(whole)


@pytest.mark.parametrize("after", [1, 4, 7, 12])
def test_a_stopped_run_resumes_bit_for_bit(whole: Run, toy: Splits, tmp_path: Path, after: int) -> None:
    config = whole.config
    _stop_after(config, toy, tmp_path / "halves", after, signal.SIGTERM)
    stopped = Run(tmp_path / "halves")
    assert json.loads((stopped.checkpoint() / "state.json").read_text())["step"] == after
    resumed = pretrain(config, toy, tmp_path / "halves", resume=True, quiet=True)
    assert_equal(weights(resumed), weights(whole))
    # A stop inside a logging interval splits that interval's line in two; all others are the same.
    if after % 2 == 0:
        assert lines(resumed) == lines(whole)
    later = [[line for line in lines(run) if line["step"] > after + 1] for run in (whole, resumed)]
    assert later[0] == later[1]
    assert resumed.results == whole.results


def _stop_after(config: Config, splits: Splits, out: Path, steps: int, number: signal.Signals) -> None:
    """Send a real signal to this process while step number `steps` is taken."""
    original = Pretraining.inputs

    def inputs(self: Pretraining, *arguments: object) -> object:
        if self.step == steps - 1:
            os.kill(os.getpid(), number)
        return original(self, *arguments)  # type: ignore[arg-type]

    Pretraining.inputs = inputs  # type: ignore[method-assign, assignment]
    try:
        with pytest.raises(Interrupted, match=r"continue with: pmae pretrain --out .* --resume") as stop:
            pretrain(config, splits, out, quiet=True)
    finally:
        Pretraining.inputs = original  # type: ignore[method-assign]
    assert stop.value.code == 128 + number


def test_ctrl_c_saves_and_the_old_handler_returns(tiny: Config, toy: Splits, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    _stop_after(settled(tiny, toy), toy, tmp_path / "run", 2, signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_training_works_off_the_main_thread(tiny: Config, toy: Splits, tmp_path: Path) -> None:
    found: list[Run] = []
    config = settled(tiny, toy, train__epochs=1)
    thread = threading.Thread(target=lambda: found.append(pretrain(config, toy, tmp_path / "run", quiet=True)))
    thread.start()
    thread.join()
    assert found[0].results["pretrain"]["epoch"] == 1


def test_resuming_a_finished_run_changes_nothing(tiny: Config, toy: Splits, tmp_path: Path) -> None:
    config = settled(tiny, toy)
    run = pretrain(config, toy, tmp_path / "run", quiet=True)
    before = (run.path / "metrics.jsonl").read_bytes()
    pretrain(config, toy, tmp_path / "run", resume=True, quiet=True)
    assert (run.path / "metrics.jsonl").read_bytes() == before


def test_a_folder_with_a_run_is_refused_and_untouched(tiny: Config, toy: Splits, tmp_path: Path) -> None:
    config = settled(tiny, toy, train__epochs=1)
    run = pretrain(config, toy, tmp_path / "run", quiet=True)
    before = {p: p.stat().st_mtime_ns for p in run.path.rglob("*")}
    with pytest.raises(UserError, match="must be a folder without a run"):
        pretrain(config, toy, tmp_path / "run", quiet=True)
    assert {p: p.stat().st_mtime_ns for p in run.path.rglob("*")} == before


def test_resuming_with_other_settings_or_data_is_refused(tiny: Config, toy: Splits, tmp_path: Path) -> None:
    config = settled(tiny, toy, train__epochs=1)
    pretrain(config, toy, tmp_path / "run", quiet=True)
    with pytest.raises(UserError, match=r"encoder\.depth must stay 2 when a run is resumed, got 3"):
        pretrain(replace(config, encoder__depth=3), toy, tmp_path / "run", resume=True, quiet=True)
    fewer = Splits("toy", toy.train.take(np.arange(64)), None, toy.test)
    with pytest.raises(UserError, match="data must be what the run began with"):
        pretrain(config, fewer, tmp_path / "run", resume=True, quiet=True)


def test_a_checkpoint_of_another_model_names_the_tensor(tiny: Config, toy: Splits, tmp_path: Path) -> None:
    run = pretrain(settled(tiny, toy, train__epochs=1), toy, tmp_path / "run", quiet=True)
    path = run.path / "config.json"
    values = json.loads(path.read_text())
    values["encoder"]["width"] = 64
    path.write_text(json.dumps(values))
    with pytest.raises(UserError, match=r"does not fit the settings: .* must be \(.*64.*\), got"):
        checkpoint.load_encoder(Run(run.path))


def test_a_resumed_run_may_be_saved_more_often(tiny: Config, toy: Splits, tmp_path: Path) -> None:
    rarely = settled(tiny, toy, train__checkpoint_every=2)
    whole = pretrain(rarely, toy, tmp_path / "whole", quiet=True)
    pretrain(rarely, toy, tmp_path / "run", quiet=True, until=1)
    resumed = pretrain(replace(rarely, train__checkpoint_every=1), toy, tmp_path / "run", resume=True, quiet=True)
    assert [path.name for path in resumed.checkpoints()] == ["epoch_0001", "epoch_0002", "epoch_0003"]
    assert_equal(weights(resumed), weights(whole))


def test_not_a_number_stops_the_run_and_saves_the_batch(tiny: Config, toy: Splits, tmp_path: Path) -> None:
    config = settled(tiny, toy, optim__base_lr=1e30, optim__warmup_epochs=0.0)
    with pytest.raises(UserError, match=r"loss must be finite, got NaN or infinity at step (\d+)") as stop:
        pretrain(config, toy, tmp_path / "run", quiet=True)
    assert "there is no checkpoint yet" in str(stop.value)
    saved = next((tmp_path / "run").glob("failure_step_*.safetensors"))
    assert saved.name in str(stop.value)
    tensors = load_file(saved)
    index, images = tensors["index"].numpy(), tensors["images"].numpy()
    np.testing.assert_array_equal(images, toy.train.images[index])
    assert tensors["hidden"].dtype == torch.bool
    assert tensors["hidden"].shape == (32, 192)
    assert not Run(tmp_path / "run").checkpoints()


def test_a_last_step_that_leaves_no_numbers_is_not_saved(tiny: Config, toy: Splits, tmp_path: Path) -> None:
    rates = {"optim__base_lr": 1e39, "optim__warmup_epochs": 0.0, "optim__schedule": "constant"}
    config = settled(tiny, toy, **rates, train__epochs=1, train__batch_size=128)
    told = r"weights must be finite after step 1, got NaN or infinity; there is no checkpoint yet"
    with pytest.raises(UserError, match=told):
        pretrain(config, toy, tmp_path / "run", quiet=True)
    assert not Run(tmp_path / "run").checkpoints()


@pytest.mark.parametrize("hides", [True, False])
def test_what_training_in_the_last_step_made_useless_is_told_in_a_sentence(
    tiny: Config, toy: Splits, tmp_path: Path, hides: bool
) -> None:
    changes = {"masking__enabled": False, "objective__contrastive_weight": 1.0, "objective__reconstruction_weight": 0}
    last = {"train__epochs": 1, "train__batch_size": 128, "optim__warmup_epochs": 0.0, "optim__schedule": "constant"}
    last |= {"encoder__first_patch_size": 0}
    config = settled(replace(tiny, **last, optim__base_lr=1e25), toy, **({} if hides else changes))
    told = "R2 must be finite after step 1" if hides else "features must be finite"
    with pytest.raises(UserError, match=f"{told}: a lower optim.base_lr or an optim.clip_norm may help, got"):
        pretrain(config, toy, tmp_path / "run", quiet=True, online_probe=online_probe(toy))
    assert not Run(tmp_path / "run").results


def test_a_full_disk_is_one_sentence_and_keeps_the_last_checkpoint(
    tiny: Config, toy: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, calls, original = settled(tiny, toy), [0], checkpoint.save_file

    def full(*arguments: object) -> None:
        calls[0] += 1
        if calls[0] > 3:
            raise OSError(28, "No space left on device")
        original(*arguments)

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(UserError, match="the disk is full"):
        pretrain(config, toy, tmp_path / "run", quiet=True)
    run = Run(tmp_path / "run")
    assert [p.name for p in run.checkpoints()] == ["epoch_0001"]
    assert not list(run.path.rglob("*.part"))
    monkeypatch.setattr(checkpoint, "save_file", original)
    assert pretrain(config, toy, run.path, resume=True, quiet=True).results["pretrain"]["epoch"] == 3


@pytest.mark.parametrize(
    "images",
    [
        np.random.default_rng(0).integers(0, 65_535, (40, 1, 8, 12), dtype=np.uint16),
        np.random.default_rng(0).random((40, 5, 8, 8), dtype=np.float32),
        np.random.default_rng(0).integers(-900, 900, (40, 2, 12, 8)).astype(np.int16),
    ],
    ids=["16-bit grey, not square", "float, five channels", "signed, two channels"],
)
def test_any_channels_sizes_and_dtypes_train(tiny: Config, tmp_path: Path, images: np.ndarray) -> None:
    splits = Splits("odd", ImageSet(images))
    config = settled(tiny, splits, train__batch_size=20, train__epochs=2, optim__warmup_epochs=0.5)
    run = pretrain(config, splits, tmp_path / "run", quiet=True)
    assert np.isfinite(run.results["pretrain"]["train_r2"])  # nothing was held out
    _, encoder, standardize = checkpoint.load_encoder(run)
    assert encoder.features(standardize(torch.from_numpy(images[:2].astype(np.float32))))["cls"].shape == (2, 32)


def test_seeds_of_steps_do_not_repeat() -> None:
    drawn = {step_seed(seed, epoch, position) for seed in range(5) for epoch in range(20) for position in range(-1, 50)}
    assert len(drawn) == 5 * 20 * 51


@pytest.mark.parametrize(("has_units", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_a_cpu_rounds_by_itself_only_where_it_has_units_for_it(
    monkeypatch: pytest.MonkeyPatch, has_units: bool, expected: torch.dtype
) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_units, raising=False)
    assert environment.pick_precision("auto", cpu) is expected
    assert environment.pick_precision("float32", cpu) is torch.float32
    assert environment.pick_precision("bfloat16", cpu) is torch.bfloat16
