"""Small data and small settings that many tests share."""

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pmae import plugins
from pmae.config import Config, DecoderConfig, EncoderConfig, OptimConfig, TrainConfig
from pmae.data.images import ImageSet, Splits

# Two cores serve one process with two threads, or two workers with one thread each; processes that tests start have as
# many, for sums depend on it in their last bits.
THREADS = 1 if "PYTEST_XDIST_WORKER" in os.environ else 2
os.environ["OMP_NUM_THREADS"] = str(THREADS)
torch.set_num_threads(THREADS)
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
BROWSER_FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)


def smooth_images(count: int, shape: tuple[int, int, int], seed: int = 0) -> np.ndarray:
    """uint8 images whose pixels are correlated: coarse noise blown up, plus a little fine noise."""
    rng = np.random.default_rng(seed)
    channels, height, width = shape
    coarse = rng.normal(size=(count, channels, height // 4, width // 4))
    fine = np.kron(coarse, np.ones((1, 1, 4, 4))) + 0.1 * rng.normal(size=(count, *shape))
    return (fine * 30 + 128).clip(0, 255).astype(np.uint8)


@pytest.fixture
def toy() -> Splits:
    """128 training and 32 test images of 16x16 in two classes that differ in brightness."""
    images = smooth_images(160, (3, 16, 16))
    labels = (images.mean((1, 2, 3)) > 128).astype(np.int64)
    classes = ("dark", "bright")
    return Splits(
        "toy", ImageSet(images[:128], labels[:128], classes), None, ImageSet(images[128:], labels[128:], classes)
    )


@pytest.fixture
def tiny() -> Config:
    """A model of two narrow blocks, three epochs of four steps."""
    return Config(
        encoder=EncoderConfig(patch_size=4, width=32, depth=2, heads=4),
        decoder=DecoderConfig("small", width=32, depth=1, heads=4),
        optim=OptimConfig(base_lr=4e-3, warmup_epochs=1.0),
        train=TrainConfig(epochs=3, batch_size=32, device="cpu", log_every=2, checkpoint_every=1, precision="float32"),
    )


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test registers or imports as a plug-in goes with it."""
    monkeypatch.setenv(plugins.VARIABLE, "")
    before, modules = {kind: dict(table) for kind, table in plugins.TABLES.items()}, set(sys.modules)
    yield
    for kind, table in plugins.TABLES.items():
        table.clear()
        table.update(before[kind])
    for name in [name for name in set(sys.modules) - modules if name.startswith("my_")]:
        del sys.modules[name]


@pytest.fixture
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs without their figures, which are seconds of drawing each, for tests that do not look at them."""
    monkeypatch.setattr("pmae.api.save_figures", lambda run: [])


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Any]:
    """A real Chromium with a profile of its own, which keeps what pages say and ask for."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    if not (CHROMIUM and DRIVER):
        pytest.skip("needs chromium and chromedriver on the path")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in [*BROWSER_FLAGS.split(), f"--user-data-dir={tmp_path / 'profile'}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()
