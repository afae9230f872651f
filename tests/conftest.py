"""Small data and small settings that many tests share."""

import gc
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pmae import plugins
from pmae.config import Config, DecoderConfig, EncoderConfig, OptimConfig, TrainConfig
from pmae.data.images import ImageSet, Splits

gc.disable()  # while modules are imported: an eighth of that time, for nothing
# Two cores serve one process with two threads, or two workers with one thread each; processes that tests start have as
# many, for sums depend on it in their last bits.
THREADS = 1 if "PYTEST_XDIST_WORKER" in os.environ else 2
os.environ["OMP_NUM_THREADS"] = str(THREADS)
torch.set_num_threads(THREADS)
# In the background of a shell and under nohup these are ignored; tests send them, and would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
os.fsync = lambda handle: None  # no power is cut here; thousands of times a disk would be waited for
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported: kernels run on the CPU, in this process
AXE = Path(__file__).parent / "fixtures" / "axe-core" / "axe.min.js"
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
BROWSER_FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Rooms of long files first: one at the end would leave all but one worker idle."""
    first = ("sweep", "docs", "train", "trust", "fast", "benchmarks", "paper", "tools")
    room = {item: item.path.relative_to(Path(__file__).parent).parts[0] for item in items}
    items.sort(key=lambda item: room[item] not in first)


def pytest_collection_finish() -> None:
    """What is imported by now stays: no collection of garbage, of which every run has one, looks through it again."""
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)  # a run makes thousands of objects that last, and hardly a circle
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def keep_what_is_there() -> None:
    """The same for what the file before imported, which may be as much again."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """At the end it goes, for some libraries count what is left."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def one_way_to_multiply() -> None:
    """On a CPU without bfloat16, torch turns oneDNN off at the first product of it: no test is to see what one did."""
    torch.backends.mkldnn.set_flags(True)


def smooth_images(count: int, shape: tuple[int, int, int], seed: int = 0) -> np.ndarray:
    """uint8 images whose pixels are correlated: coarse noise blown up, plus a little fine noise."""
    rng = np.random.default_rng(seed)
    channels, height, width = shape
    coarse = rng.normal(size=(count, channels, height // 4, width // 4))
    fine = np.kron(coarse, np.ones((1, 1, 4, 4))) + 0.1 * rng.normal(size=(count, *shape))
    return (fine * 30 + 128).clip(0, 255).astype(np.uint8)


@pytest.fixture(scope="session")
def toy() -> Splits:
    """128 training and 32 test images of 8x8 in two classes that differ in brightness."""
    images = smooth_images(160, (3, 8, 8))
    labels = (images.mean((1, 2, 3)) > 128).astype(np.int64)
    classes = ("dark", "bright")
    return Splits(
        "toy", ImageSet(images[:128], labels[:128], classes), None, ImageSet(images[128:], labels[128:], classes)
    )


@pytest.fixture(scope="session")
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


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A real Chromium with a profile of its own, which keeps what pages say and ask for; one for a whole module."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    if not (CHROMIUM and DRIVER):
        pytest.skip("needs chromium and chromedriver on the path")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in [*BROWSER_FLAGS.split(), f"--user-data-dir={tmp_path_factory.mktemp('profile')}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


@pytest.fixture(scope="session")
def look() -> Callable[[Any, int, str], None]:
    """A function that gives a page this width and theme."""

    def emulate(browser: Any, width: int, theme: str) -> None:
        size = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 500}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        feature = {"name": "prefers-color-scheme", "value": theme}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})

    return emulate


@pytest.fixture(scope="session")
def barriers() -> Callable[[Any], list[str]]:
    """A function that lists what axe-core finds serious or critical on the page that is open."""

    def found(browser: Any) -> list[str]:
        # Through the debugger, past the page's own policy, which lets no other script in.
        browser.execute_cdp_cmd("Runtime.evaluate", {"expression": AXE.read_text(encoding="utf-8")})
        wanted = "{resultTypes: ['violations']}"
        call = {"expression": f"axe.run({wanted}).then(r => r.violations)", "awaitPromise": True, "returnByValue": True}
        answer = browser.execute_cdp_cmd("Runtime.evaluate", call)["result"]["value"]
        return [
            f"{one['id']}: {node['html'][:120]}"
            for one in answer
            if one["impact"] in ("serious", "critical")
            for node in one["nodes"]
        ]

    return found
