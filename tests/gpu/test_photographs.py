"""Photographs on the card: crops from files as the CPU cuts them, and a run whose crops are cut there."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tests.conftest import smooth_images
from tests.gpu.conftest import Within

from pmae import api
from pmae.config import AugmentConfig, Config, DataConfig, replace
from pmae.data import jpeg
from pmae.data.augment import boxes_of, draw_crops
from pmae.data.crops import crop_ragged
from pmae.data.ragged import ragged
from pmae.data.sets import load
from pmae.fast.graph import Replay
from pmae.runs import Run

CUDA = torch.device("cuda")


def test_crops_on_the_card_are_those_of_the_cpu(assert_within: Within) -> None:
    rng = np.random.default_rng(0)
    sizes = np.column_stack([rng.integers(80, 320, 100), rng.integers(80, 420, 100), np.full(100, 3)])
    pixels = torch.from_numpy(rng.integers(0, 256, int(sizes.prod(1).sum()), dtype=np.uint8))
    images, places = ragged(pixels, sizes), np.tile(np.arange(100), 2).tolist()
    heights, widths = torch.from_numpy(images.sizes[places]).float().T
    noise = draw_crops(200, torch.Generator().manual_seed(0), torch.device("cpu"))
    boxes = boxes_of(noise, heights, widths, AugmentConfig())
    given = (places, boxes, (96, 96), "bicubic")
    ours, plain = crop_ragged(images.to(torch.device("cuda")), *given), crop_ragged(images, *given)
    assert_within("crops from files, grey levels", float((ours.cpu().int() - plain.int()).abs().max()), 1)


def test_a_folder_trains_alike_from_the_device_and_from_the_host(tmp_path: Path, tiny: Config) -> None:
    (tmp_path / "images").mkdir()
    for number, image in enumerate(smooth_images(32, (3, 48, 64))):
        Image.fromarray(image.transpose(1, 2, 0)).save(tmp_path / "images" / f"{number:02d}.png")
    changes = {"data__source": str(tmp_path / "images"), "data__resize": 32, "train__device": "cuda"}
    config = replace(tiny, **changes, train__batch_size=8, train__epochs=4, objective__contrastive_weight=1.0)
    losses = []
    for place in ("device", "host"):
        run = api.pretrain(replace(config, data__keep_on=place), out=tmp_path / place, quiet=True, figures=False)
        losses.append([line["loss"] for line in run.metrics() if "loss" in line])
    np.testing.assert_allclose(*losses, rtol=2e-2)


def test_photographs_train_by_what_is_derived_for_them(tmp_path: Path) -> None:
    # A tenth is held out, which has to leave 4,096.
    images = np.tile(smooth_images(512, (3, 160, 160)).transpose(0, 2, 3, 1), (10, 1, 1, 1))
    run = api.pretrain(replace(Config(), train__epochs=2), images, tmp_path / "run", quiet=True, figures=False)
    settled = run.config
    assert (settled.space.name, settled.objective.local_views, settled.train.batch_size) == ("cosine", 2, 256)
    assert (settled.augment.extra, settled.optim.name) == (("color_jitter", "grayscale"), "muon")
    assert Run(run.path / "first").config.encoder.patch_size == 32
    for stage in (Run(run.path / "first"), run):
        losses = [line["loss"] for line in stage.metrics() if "loss" in line]
        assert np.isfinite(losses).all()
        assert losses[-1] < losses[0]


def test_small_photographs_train_in_two_stages_by_what_is_derived_for_them(tmp_path: Path) -> None:
    images = np.tile(smooth_images(512, (3, 32, 32)).transpose(0, 2, 3, 1), (8, 1, 1, 1))
    config = replace(Config(), encoder__first_patch_size=8, train__epochs=1)
    run = api.pretrain(config, images, tmp_path / "run", quiet=True, figures=False)
    for stage, epochs, patch in ((Run(run.path / "first"), 4, 8), (run, 1, 4)):
        assert (stage.config.train.epochs, stage.config.encoder.patch_size) == (epochs, patch)
        losses = [line["loss"] for line in stage.metrics() if "loss" in line]
        assert np.isfinite(losses).all()
        assert losses[-1] < losses[0]


@pytest.mark.skipif(not torch.cuda.is_available() or not jpeg.has_nvjpeg(CUDA), reason="torchvision without nvJPEG")
def test_nvjpeg_decodes_what_pillow_does(tmp_path: Path, assert_within: Within) -> None:
    for number, image in enumerate(smooth_images(16, (3, 96, 128))):
        turned = Image.Exif()
        turned[0x0112] = 3 if number == 1 else 1
        photograph = Image.fromarray(image.transpose(1, 2, 0)).resize((128 + number, 96), Image.Resampling.BICUBIC)
        # All of the color kept: where it is halved, decoders differ in how they blow it up again.
        photograph.save(tmp_path / f"{number:02d}.jpg", quality=95, subsampling=0, exif=turned)
    data = load(DataConfig(str(tmp_path), resize=32)).train
    assert data.originals is not None
    images, places = data.originals.capped(200), np.arange(16)
    found, plain = jpeg.decode_on(CUDA, images, places, 400), images.ragged(places)
    assert found.pixels.is_cuda
    ours = [found.window(i, 0, 0, *image.shape[1:]).cpu().numpy() for i, image in enumerate(plain)]
    apart = [np.abs(a.astype(int) - b).mean() for a, b in zip(ours, plain, strict=True)]
    assert_within("nvJPEG against Pillow, grey levels on average", max(apart), 2)


def test_a_thread_may_pin_memory_while_a_step_is_captured() -> None:
    stop, pinned = threading.Event(), list[torch.Tensor]()

    def read() -> None:  # as the thread does that reads images; a size of its own each time, so that none is reused
        while not stop.is_set():
            pinned.append(torch.empty(2**20 + len(pinned) * 2**16).pin_memory())

    def step(x: torch.Tensor) -> None:
        time.sleep(0.2)
        x.add_(1)

    replay, x = Replay(step, lambda: None), torch.zeros(4, device="cuda")
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        for _ in range(5):
            replay(x)
        stop.set()
        reading.result()
    assert len(pinned) > 5
