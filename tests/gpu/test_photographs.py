"""Photographs on the card: crops from files as the CPU cuts them, and a run whose crops are cut there."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tests.conftest import smooth_images
from tests.gpu.conftest import Within

from pmae import api
from pmae.config import AugmentConfig, Config, replace
from pmae.data.augment import boxes_of, draw_crops
from pmae.data.crops import crop_ragged
from pmae.data.ragged import ragged


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
    assert losses[0][-1] < losses[0][0]
