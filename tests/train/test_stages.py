"""Large patches first: a run in two stages is the two runs that it says it is, and goes on wherever it was stopped."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from pmae import api
from pmae.budget import Pace
from pmae.config import Config, replace
from pmae.data.images import ImageSet, Splits
from pmae.derive import resolve
from pmae.errors import Interrupted, UserError
from pmae.flops import flops_per_image
from pmae.plugins import register
from pmae.pretraining import resolved
from pmae.runs import FIRST, Run
from pmae.spaces import PCA
from pmae.train.callbacks import Callback, Training
from pmae.train.setup import locked
from pmae.train.stages import first_stage
from pmae.train.step import Plain

pytestmark = pytest.mark.usefixtures("no_figures")


@pytest.fixture
def staged(tiny: Config) -> Config:
    return replace(tiny, encoder__first_patch_size=8, train__epochs=1, optim__warmup_epochs=0.2)


def encoder_of(run: Run) -> dict[str, Tensor]:
    return load_file(run.checkpoint() / "encoder.safetensors")


def same(mine: Run, theirs: Run) -> bool:
    pairs = (encoder_of(mine), encoder_of(theirs))
    return all(torch.equal(pairs[0][name], pairs[1][name]) for name in pairs[0].keys() | pairs[1].keys())


def test_it_is_a_run_with_large_patches_and_one_that_goes_on(staged: Config, toy: Splits, tmp_path: Path) -> None:
    run = api.pretrain(staged, toy, out=tmp_path / "both", quiet=True)
    assert (run.config.encoder.weights, run.config.encoder.first_patch_size) == (None, 8)
    first, _ = resolve(first_stage(run.config), 128, toy.train.shape, gpu=False)
    assert (first.encoder.patch_size, first.train.epochs, first.optim.warmup_epochs) == (8, 4, 0.8)
    large = api.pretrain(first, toy, out=tmp_path / "large", quiet=True)
    assert same(large, Run(run.path / FIRST))
    then = replace(run.config, encoder__first_patch_size=None, encoder__weights=str(large.path))
    small = api.pretrain(then, toy, out=tmp_path / "small", quiet=True)
    assert small.config.optim.encoder_rate == 1.0
    assert same(small, run)
    spent = [each.results["pretrain"]["operations"] for each in (run, large, small)]
    assert spent[0] == spent[1] + spent[2] > spent[2] == 128 * 1 * flops_per_image(small.config, toy.train.shape)
    assert not same(small, api.pretrain(replace(then, encoder__weights=None), toy, out=tmp_path / "alone", quiet=True))
    assert [line["epoch"] for line in Run(run.path / FIRST).metrics() if "linear" in line] == [4.0]
    # One schedule: the rate is kept while patches are large, and goes to 0 when they are small.
    rates = [[line["lr"] for line in each.metrics() if "lr" in line] for each in (large, small)]
    assert rates[0][-1] == max(rates[0]) > rates[1][0] > rates[1][-1] == 0


def test_a_warm_up_that_is_given_is_that_of_both_stages(staged: Config, toy: Splits, tmp_path: Path) -> None:
    run = api.pretrain(replace(staged, optim__warmup_epochs=0.0), toy, out=tmp_path / "run", quiet=True)
    rates = [line["lr"] for line in Run(run.path / FIRST).metrics() if "lr" in line]
    assert rates == [max(rates)] * len(rates)


def test_operations_are_of_the_images_that_fill_a_batch(tiny: Config, toy: Splits, tmp_path: Path) -> None:
    run = api.pretrain(replace(tiny, train__batch_size=80, train__epochs=2), toy, out=tmp_path / "run", quiet=True)
    seen = 80 * max(line["step"] for line in run.metrics())
    assert run.results["pretrain"]["operations"] == seen * flops_per_image(run.config, toy.train.shape)


@pytest.mark.usefixtures("registry")
def test_decoder_and_heads_go_on_too_as_far_as_they_fit(tiny: Config, toy: Splits, tmp_path: Path) -> None:
    def begun(run: Path, **changes: object) -> tuple[dict[str, Tensor], str]:
        changed = {"train__callbacks": ("sees_start",), "train__epochs": 1, "encoder__weights": str(run), **changes}
        made = api.pretrain(
            replace(tiny, **changed), toy, out=tmp_path / str(len(list(tmp_path.iterdir()))), quiet=True
        )
        return seen.pop(), made.environment["start"][-1]

    class SeesStart(Callback):
        """Keeps the decoder as it is before the first step."""

        def on_start(self, training: Training) -> None:
            seen.append({name: each.clone() for name, each in training.model.decoder.state_dict().items()})

    seen: list[dict[str, Tensor]] = []
    register("callback", "sees_start")(SeesStart)
    first = api.pretrain(tiny, toy, out=tmp_path / "first", quiet=True)
    known = load_file(first.checkpoint() / "decoder.safetensors")
    for changes, new in (
        ({}, []),
        ({"encoder__patch_size": 8}, ["head"]),
        ({"decoder__depth": 2}, ["blocks"]),
    ):
        found, said = begun(first.path, **changes)
        assert said == "and its decoder" + (f", but a new {', '.join(new)}" if new else "")
        for name in known:
            if name.split(".")[0] not in new:
                assert torch.equal(found[name], known[name]), name
    for nothing in (begun(first.path, decoder__width=16), begun(first.checkpoint() / "encoder.safetensors")):
        assert "its decoder" not in nothing[1]  # nothing fits, or weights alone have none


class Stops(Callback):
    """Asks the process to end, as a cluster does, once at one step of one kind of patches."""

    at: tuple[int, int] | None = None

    def on_step(self, training: Training) -> None:
        if (training.config.encoder.patch_size, training.step) == Stops.at:
            Stops.at = None
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.usefixtures("registry")
def test_a_stopped_run_goes_on_where_it_was(staged: Config, toy: Splits, tmp_path: Path) -> None:
    register("callback", "stops")(Stops)
    config, out = replace(staged, train__callbacks=("stops",)), tmp_path / "run"
    whole = api.pretrain(config, toy, out=tmp_path / "whole", quiet=True)
    Stops.at = (8, 6)
    with pytest.raises(Interrupted, match=f"pmae pretrain --out {out} --resume"):
        api.pretrain(config, toy, out=out, quiet=True)
    with pytest.raises(UserError, match="must hold a checkpoint; its first stage has yet to end"):
        api.load_encoder(out)
    with pytest.raises(UserError, match="out must be a folder without a run"):
        api.pretrain(config, toy, out=out, quiet=True)
    Stops.at = (4, 2)
    with pytest.raises(Interrupted, match=f"pmae pretrain --out {out} --resume"):
        api.pretrain(Run(out).config, toy, out=out, resume=True, quiet=True)
    again = api.pretrain(Run(out).config, toy, out=out, resume=True, quiet=True)
    assert same(again, whole)
    assert again.metrics()[-1]["held_out_r2"] == whole.metrics()[-1]["held_out_r2"]
    # As a process leaves it that is killed between the stages.
    shutil.rmtree(out / "checkpoints")
    for name in ("metrics.jsonl", "results.json", "fitted.safetensors", "samples.safetensors"):
        (out / name).unlink()
    logged = Run(out / FIRST).metrics()
    assert same(api.pretrain(Run(out).config, toy, out=out, resume=True, quiet=True), whole)
    # Where all checkpoints are damaged the second stage begins with the first one once more.
    for path in Run(out).checkpoints():
        (path / "encoder.safetensors").write_bytes(b"")
    with pytest.warns(UserWarning, match="no checkpoint of .* is whole: its training begins anew"):
        again = api.pretrain(Run(out).config, toy, out=out, resume=True, quiet=True)
    assert same(again, whole)
    assert Run(out / FIRST).metrics() == logged


class Ends(Callback):
    """Ends the first stage early."""

    def on_step(self, training: Training) -> None:
        if (training.config.encoder.patch_size, training.step) == (8, 6):
            training.stop("it is enough")


@pytest.mark.usefixtures("registry")
def test_a_first_stage_that_a_callback_ended_stays_as_it_is(staged: Config, toy: Splits, tmp_path: Path) -> None:
    register("callback", "ends")(Ends)
    run = api.pretrain(replace(staged, train__callbacks=("ends",)), toy, out=tmp_path / "run", quiet=True)
    whole = {name: tensor.clone() for name, tensor in encoder_of(run).items()}
    shutil.rmtree(run.path / "checkpoints")  # as if it had been killed before it wrote one
    again = encoder_of(api.pretrain(run.config, toy, out=run.path, resume=True, quiet=True))
    assert Run(run.path / FIRST).metrics()[-1]["step"] == 6
    assert all(torch.equal(again[name], whole[name]) for name in whole)


@pytest.mark.parametrize("first", [4, 6, 12])
def test_patches_that_do_not_fit_are_refused(first: int, staged: Config, toy: Splits, tmp_path: Path) -> None:
    rule = r"first_patch_size must be a larger multiple of encoder.patch_size \(4\) that divides images of 8x8"
    with pytest.raises(UserError, match=f"{rule}, got {first}"):
        api.pretrain(replace(staged, encoder__first_patch_size=first), toy, out=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_networks_without_patches_are_refused(tiny: Config, toy: Splits, tmp_path: Path) -> None:
    sizes = {"encoder__width": None, "encoder__depth": None, "encoder__heads": None}
    config = replace(tiny, encoder__name="resnet10t", **sizes, encoder__first_patch_size=8)
    with pytest.raises(UserError, match=r"first_patch_size must be 0 unless encoder\.name is a ViT, got 8"):
        api.pretrain(config, toy, out=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_first_stage_that_cannot_begin_leaves_nothing(staged: Config, toy: Splits, tmp_path: Path) -> None:
    narrow = replace(staged, encoder__first_patch_size=None, encoder__width=16)
    weights = str(api.pretrain(narrow, toy, out=tmp_path / "narrow", quiet=True).path)
    with pytest.raises(UserError, match="does not fit the encoder"):
        api.pretrain(replace(staged, encoder__weights=weights), toy, out=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_run_that_another_process_begins_is_left_alone(staged: Config, toy: Splits, tmp_path: Path) -> None:
    run = api.pretrain(staged, toy, out=tmp_path / "run", quiet=True)
    shutil.rmtree(run.path / FIRST)
    (run.path / "metrics.jsonl").unlink()
    with locked(run.path), pytest.raises(UserError, match="no other process is training"):
        api.pretrain(run.config, toy, out=run.path, resume=True, quiet=True)
    assert run.config.encoder.first_patch_size == 8


def test_given_weights_and_their_second_stage_are_not_compared(staged: Config, toy: Splits, tmp_path: Path) -> None:
    given = api.pretrain(replace(staged, encoder__first_patch_size=None), toy, out=tmp_path / "given", quiet=True)
    run = api.pretrain(replace(staged, encoder__weights=str(given.path)), toy, out=tmp_path / "run", quiet=True)
    # The second stage alone has the patches that remain, but begins with what the first one made of the weights.
    assert "adaptation" not in run.results


def test_a_second_stage_without_enough_memory_is_refused_before_the_first(
    staged: Config, toy: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, patches = Plain.measure, list[int]()

    def on_a_small_card(self: Plain, *inputs: Any) -> tuple[Tensor, Tensor]:
        patches.append(self.model.patch)
        if self.model.patch == 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return measure(self, *inputs)

    monkeypatch.setattr(Plain, "measure", on_a_small_card)
    with pytest.raises(UserError, match=r"train.batch_size must fit in the memory of cpu, got 32"):
        api.pretrain(staged, toy, out=tmp_path / "run", quiet=True)
    assert patches == [4]
    assert not (tmp_path / "run").exists()


def test_the_pace_of_both_stages_is_that_of_each() -> None:
    assert Pace(3.0, 2.0, 0.5, 1.0).after(Pace(1.0, 0.25, 0.5, 2.0), 4) == Pace(4.0, 3.0, 1.0, 3.0)


class EndsAtOnce(Callback):
    """Ends each stage after its first step, but for the trials, which have no callbacks."""

    def on_step(self, training: Training) -> None:
        training.stop("it has begun")


@pytest.mark.usefixtures("registry")
def test_both_stages_and_their_trials_share_one_fit(
    staged: Config, toy: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit, fits = PCA.fit, list[int]()

    def counted(self: PCA, batches: Any) -> None:
        fits.append(self.size)
        fit(self, batches)

    monkeypatch.setattr(PCA, "fit", counted)
    register("callback", "ends_at_once")(EndsAtOnce)
    config = replace(staged, train__callbacks=("ends_at_once",))
    timed = api.pretrain(config, toy, out=tmp_path / "timed", quiet=True, minutes=0.5)
    run = api.pretrain(config, toy, out=tmp_path / "run", quiet=True)
    assert fits == [192, 192]
    for each in (timed, run):
        first = Run(each.path / FIRST)
        assert first.config.train.epochs == 4 * (each.config.train.epochs or 0) > 0
        assert (first.path / "fitted.safetensors").read_bytes() == (each.path / "fitted.safetensors").read_bytes()
        assert first.environment["fit_seconds"] == each.environment["fit_seconds"] > 0
    known = (run.path / "fitted.safetensors").read_bytes()
    for name in ("metrics.jsonl", "fitted.safetensors"):  # as if it had been killed before it had a fit of its own
        (run.path / name).unlink()
    again = api.pretrain(run.config, toy, out=run.path, resume=True, quiet=True)
    assert (again.path / "fitted.safetensors").read_bytes() == known
    assert len(fits) == 2


def test_the_epochs_of_both_stages_are_told_before_they_begin() -> None:
    """With epochs that were given, the first stage comes on top of them."""
    images = np.zeros((8, 3, 16, 16), np.uint8)
    asked = replace(Config(), objective__contrastive_weight=1.0, train__epochs=150, encoder__patch_size=4)
    config, reasons = resolved(replace(asked, train__device="cpu"), Splits("toy", ImageSet(images)))
    assert config.encoder.first_patch_size == 8
    assert first_stage(config).train.epochs == 600
    assert reasons["encoder.first_patch_size"].endswith("; 600 epochs with them and then 150, each as long")


def test_what_is_derived_for_two_stages_takes_no_longer() -> None:
    plain, _ = resolve(replace(Config(), encoder__first_patch_size=0), 50_000, (3, 32, 32))
    both, _ = resolve(Config(), 50_000, (3, 32, 32))
    assert (plain.train.epochs, both.train.epochs, first_stage(both).train.epochs) == (150, 75, 300)
    assert both.optim.warmup_epochs == 3.75
    assert resolve(first_stage(both), 50_000, (3, 32, 32)) == (first_stage(both), {})
