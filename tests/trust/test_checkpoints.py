"""A damaged checkpoint is told from a whole one and passed over; one process at a time holds a run."""

import json
import multiprocessing
import os
import random
import shutil
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pmae.config import Config, replace
from pmae.data.images import Splits
from pmae.derive import resolve
from pmae.errors import UserError
from pmae.runs import Run
from pmae.train.checkpoint import load_encoder
from pmae.train.loop import pretrain
from pmae.train.setup import locked

FILES = ("encoder.safetensors", "decoder.safetensors", "optimizer.safetensors", "state.json")


@pytest.fixture(scope="module")
def config(tiny: Config, toy: Splits) -> Config:
    return resolve(replace(tiny, train__epochs=2), len(toy.train), toy.train.shape)[0]


@pytest.fixture(scope="module")
def whole(config: Config, toy: Splits, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pretrain(config, toy, tmp_path_factory.mktemp("whole") / "run", quiet=True).path


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Run:
    """A copy that a test may damage."""
    return Run(shutil.copytree(whole, tmp_path / "run"))


def weights(run: Run) -> dict[str, torch.Tensor]:
    # Copies: what is loaded is a view of the file, and the file is about to be damaged.
    return {key: value.clone() for key, value in load_file(run.checkpoint() / "encoder.safetensors").items()}


def flip_a_bit(path: Path) -> None:
    """Damage that changes neither the size nor the shape of anything."""
    data = bytearray(path.read_bytes())
    data[len(data) * 3 // 4] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["bit", "cut", "gone"])
def test_a_damaged_checkpoint_is_told_of_and_the_one_before_it_used(
    run: Run, config: Config, toy: Splits, name: str, damage: str
) -> None:
    expected, file = weights(run), run.checkpoint() / name
    if damage == "bit":
        flip_a_bit(file)
    elif damage == "cut":
        os.truncate(file, file.stat().st_size // 2)
    else:
        file.unlink()
    with pytest.warns(UserWarning, match="checkpoint epoch_0002 is damaged and the one before it is used"):
        resumed = pretrain(config, toy, run.path, resume=True, quiet=True)
    assert all(torch.equal(value, expected[key]) for key, value in weights(resumed).items())


def test_a_damaged_encoder_is_not_evaluated(run: Run) -> None:
    flip_a_bit(run.checkpoint() / "encoder.safetensors")
    with pytest.raises(UserError, match=r"checkpoint must be whole, .*encoder\.safetensors missing or not as written"):
        load_encoder(run)
    assert load_encoder(run, 1)[0] == run.config


@pytest.mark.parametrize("damage", ["bit", "cut", "gone"])
def test_damaged_statistics_are_refused(run: Run, config: Config, toy: Splits, damage: str) -> None:
    file = run.path / "fitted.safetensors"
    if damage == "bit":
        flip_a_bit(file)
    elif damage == "cut":
        os.truncate(file, file.stat().st_size // 2)
    else:
        file.unlink()
    words = "whose checksum differs: it is damaged" if damage == "bit" else "must be a readable safetensors file"
    with pytest.raises(UserError, match=words):
        load_encoder(run)
    if damage != "gone":
        with pytest.raises(UserError, match=words):
            pretrain(config, toy, run.path, resume=True, quiet=True)


def test_flipped_bits_in_the_statistics_are_seen(run: Run) -> None:
    file = run.path / "fitted.safetensors"
    whole, draw = file.read_bytes(), random.Random(0)
    for _ in range(20):
        damaged, place = bytearray(whole), draw.randrange(len(whole))
        damaged[place] ^= 1 << draw.randrange(8)
        file.write_bytes(damaged)
        with pytest.raises(UserError, match=r"fitted\.safetensors"):
            load_encoder(run)


def test_statistics_from_before_there_were_checksums_still_load(run: Run) -> None:
    file = run.path / "fitted.safetensors"
    mean = load_encoder(run)[2].mean.clone()
    save_file({key: value.clone() for key, value in load_file(file).items()}, file)
    assert torch.equal(load_encoder(run)[2].mean, mean)


def test_a_checkpoint_from_before_there_were_checksums_still_loads(run: Run, config: Config, toy: Splits) -> None:
    expected, state = weights(run), run.checkpoint() / "state.json"
    values = json.loads(state.read_text())
    state.write_text(json.dumps({key: values[key] for key in ("epoch", "step", "files")}))
    longer = pretrain(config, toy, run.path, resume=True, quiet=True)
    assert all(torch.equal(value, expected[key]) for key, value in weights(longer).items())


def test_only_the_last_checkpoints_can_be_resumed_from(config: Config, toy: Splits, tmp_path: Path) -> None:
    run = pretrain(replace(config, train__epochs=4, train__keep=3), toy, tmp_path / "run", quiet=True)
    kept = [path.name for path in run.checkpoints() if (path / "optimizer.safetensors").exists()]
    assert kept == ["epoch_0002", "epoch_0003", "epoch_0004"]


def hold(folder: Path, held: Connection) -> None:
    with locked(folder):
        held.send("held")
        time.sleep(600)


def test_the_second_process_is_refused_until_the_first_dies(run: Run, config: Config, toy: Splits) -> None:
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    here, there = multiprocessing.Pipe()
    holder = multiprocessing.get_context("fork").Process(target=hold, args=(run.path, there))
    holder.start()
    try:
        assert here.recv() == "held"
        with pytest.raises(UserError, match=f"no other process is training, .* held by process {holder.pid} on"):
            pretrain(config, toy, run.path, resume=True, quiet=True)
        assert before.items() <= {p: p.read_bytes() for p in run.path.rglob("*") if p.is_file()}.items()
    finally:
        holder.kill()
        holder.join()
    assert pretrain(config, toy, run.path, resume=True, quiet=True).results["pretrain"]["epoch"] == 2
    assert not list(run.path.rglob(".*"))


def test_a_lock_leaves_nothing_behind_and_clears_what_the_dead_left(tmp_path: Path) -> None:
    with locked(tmp_path / "new" / "run"):
        assert (tmp_path / "new" / "run" / ".lock").read_text().startswith(f"{os.getpid()} on ")
    assert not (tmp_path / "new" / "run").exists()
    dead = multiprocessing.get_context("spawn").Process(target=os.getpid)
    dead.start()
    dead.join()
    (tmp_path / f".results.json.{os.getpid()}.part").touch()
    (tmp_path / f".metrics.jsonl.{dead.pid}.part").touch()
    (tmp_path / "checkpoints" / f".epoch_0001.{dead.pid}.part").mkdir(parents=True)
    with locked(tmp_path):
        left = sorted(path.name for path in tmp_path.rglob("*.part"))
    assert left == [f".results.json.{os.getpid()}.part"]
