"""Training on shards: in less memory than the set, and after a kill as if nothing had happened."""

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import webdataset
from PIL import Image
from safetensors.torch import load_file
from tests.commands import started

from pmae import api
from pmae.config import DataConfig, replace
from pmae.data.images import ImageSet, Splits
from pmae.derive import resolve
from pmae.embed import embed
from pmae.evaluate.protocols import only, preset
from pmae.runs import Run
from pmae.train.loop import pretrain

from . import streamed


def packed(pixels: np.ndarray) -> bytes:
    """A file without loss that takes little time to decode."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "BMP")
    return file.getvalue()


def smooth(count: int, side: int) -> np.ndarray:
    coarse = np.random.default_rng(0).integers(0, 256, (count, side // 4, side // 4, 3), dtype=np.uint8)
    return coarse.repeat(4, 1).repeat(4, 2)


def write(folder: Path, files: list[bytes], count: int, shards: int) -> Path:
    """So many samples of these files in turn."""
    folder.mkdir(exist_ok=True)
    for shard in range(shards):
        with webdataset.TarWriter(str(folder / f"{shard:03d}.tar")) as writer:
            for i in range(shard * count // shards, (shard + 1) * count // shards):
                writer.write({"__key__": f"{i:06d}", "bmp": files[i % len(files)], "cls": i % 2})
    return folder


def bounded(shards: Path, out: Path, room: int) -> subprocess.CompletedProcess[str]:
    # Arenas reserve addresses by the dozen of megabytes for every thread; they would count, and are not memory. What is
    # freed goes back at once: a heap that keeps it may have room for the whole set in spite of the limit.
    alone = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    alone |= {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
    command = [sys.executable, streamed.__file__, str(shards), str(out), str(room)]
    return subprocess.run(command, capture_output=True, text=True, env=alone, check=False)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the memory of a process is read from /proc")
def test_a_set_larger_than_memory_trains(tmp_path: Path) -> None:
    shards = write(tmp_path / "shards", [packed(one) for one in smooth(8, 128)], 200, 1)
    for number in range(1, 6):
        os.link(shards / "000.tar", shards / f"{number:03d}.tar")
    room = 40 * 2**20
    done = bounded(shards, tmp_path / "run", room)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["decoded"] == 1200 * 3 * 128 * 128 > room
    assert found["grown"] < room
    assert found["whole_set_refused"], found
    assert Run(tmp_path / "run").checkpoints()


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """64 samples of 8x8 in three shards."""
    return write(tmp_path / "shards", [packed(one) for one in smooth(64, 8)], 64, 3)


def weights(run: Path) -> dict[str, bytes]:
    tensors = load_file(Run(run).checkpoint() / "encoder.safetensors")
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Arithmetic as in the process that is killed: with another number of threads, sums are rounded otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_a_killed_run_ends_as_an_uninterrupted_one_and_as_one_in_memory(tmp_path: Path, small: Path) -> None:
    config = streamed.config_for(str(small))
    streamed.train(config, tmp_path / "whole")
    cut = started(streamed.killed, str(small), tmp_path / "cut", 11)
    cut.join()
    assert cut.exitcode == -signal.SIGKILL
    assert Run(tmp_path / "cut").checkpoint().name == "epoch_0001"
    # Another number of threads is no other run.
    streamed.train(replace(config, data__threads=1), tmp_path / "cut", resume=True)
    assert weights(tmp_path / "cut") == weights(tmp_path / "whole")
    images = ImageSet(smooth(64, 8).transpose(0, 3, 1, 2).copy())
    settled, _ = resolve(config, 64, images.shape)
    pretrain(settled, Splits("array", images), tmp_path / "array", quiet=True)
    assert weights(tmp_path / "array") == weights(tmp_path / "whole")


@pytest.mark.usefixtures("no_figures")
def test_everything_after_training_takes_shards(tmp_path: Path, small: Path) -> None:
    config = streamed.config_for(str(small), data__resize=12, train__epochs=1, data__channels=1)
    run = api.pretrain(config, out=tmp_path / "run", quiet=True)
    api.evaluate(run.path, only(preset("plain"), ["knn"]), baselines=False, device="cpu")
    assert run.evaluations[0].scores
    data = DataConfig(source=str(small), resize=12, channels=1)
    assert embed(run, data, tmp_path / "features.npz", device="cpu", batch_size=24) == 64
    with np.load(tmp_path / "features.npz") as found:
        assert found["name"].tolist() == [f"{i:06d}.bmp" for i in range(64)]
        assert found["label"].tolist() == [i % 2 for i in range(64)]
