"""How quick and how large the pages are: python -m benchmarks.pages runs/demo, which writes results/pages.md.

An update of the explorer is timed in a real browser, from the slider's event to the new words on the page. The report
is about ten runs that differ in predictions and features; the live page is asked again and again about the same ten.
What it costs a training is measured by trainings in turns, without it and with it open in a browser beside them.
"""

import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file
from selenium import webdriver

import pmae
from pmae.app.explorer import open_page
from pmae.app.material import Material
from pmae.app.panels import masks
from pmae.config import replace
from pmae.data.sets import load
from pmae.files import write_text
from pmae.report.page import write_report
from pmae.report.watch import Watched
from pmae.runs import Run

PAGE = Path(__file__).parents[1] / "results" / "pages.md"
UPDATES, RUNS, TRAININGS, IMAGES = 20, 10, 6, 1000
SLIDE = """const done = arguments[arguments.length - 1], share = arguments[0], began = performance.now();
const field = document.querySelector('#share input[type=range]'), place = document.querySelector('#masks');
const seen = new MutationObserver(() => {
  if (!place.innerText.includes(`${Math.round(100 * share)}% asked`)) return;
  seen.disconnect();
  done(performance.now() - began);
});
seen.observe(place, {childList: true, subtree: true, characterData: true});
field.value = share;
for (const kind of ['input', 'pointerup']) field.dispatchEvent(new Event(kind, {bubbles: true}))"""


def updates(run: Run, folder: str) -> tuple[list[float], list[float]]:
    """Milliseconds of each update: of the panel alone, and as the browser sees it."""
    material = Material(load(run.config.data), run)
    material.space(material.own_space)
    image, alone = material.picked.images[0], []
    for seed in range(UPDATES):
        began = time.perf_counter()
        masks(material, image, material.own_space, 0.3, seed)
        alone.append(1000 * (time.perf_counter() - began))
    page, address = open_page(material, browser=False)
    driver = browser(folder)
    try:
        driver.get(address)
        while driver.execute_script("return document.querySelectorAll('#masks figure img').length") != 5:
            time.sleep(0.1)
        seen = [driver.execute_async_script(SLIDE, round(0.1 + 0.03 * step, 2)) for step in range(UPDATES)]
    finally:
        driver.quit()
        page.close(verbose=False)
    return alone[1:], seen[1:]


def browser(folder: str) -> Any:
    """A Chromium without a window."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or ""
    for flag in ("--headless=new", "--no-sandbox", f"--user-data-dir={folder}/profile"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    driver.set_script_timeout(60)
    return driver


def watched_trainings(run: Run, folder: Path) -> list[float]:
    """Seconds of an epoch with the live page open in a browser, by those without it, of trainings in turns."""
    config = replace(run.config, train__epochs=1, optim__warmup_epochs=0, train__log_every=1)
    images, ratios = load(run.config.data).train.images[:IMAGES], []
    for number in range(TRAININGS):
        seconds = dict[bool, float]()
        for is_open in (False, True) if number % 2 else (True, False):
            with live_page(folder) if is_open else contextlib.nullcontext():
                made = pmae.pretrain(config, images, folder / f"{number}-{is_open}", quiet=True, figures=False)
            lines = [line for line in made.metrics() if "loss" in line]
            seconds[is_open] = statistics.median(1 / line["images_per_second"] for line in lines)
        ratios.append(seconds[True] / seconds[False])
    return ratios


@contextlib.contextmanager
def live_page(folder: Path) -> Iterator[None]:
    """`pmae watch` in a process of its own, and a browser that looks at it."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "pmae", "watch", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server, tempfile.TemporaryDirectory() as own:
        assert server.stdout is not None
        driver = browser(own)
        try:
            driver.get(server.stdout.readline().split(" at ")[1].split()[0])
            yield
        finally:
            driver.quit()
            server.terminate()


def ten_runs(run: Run, folder: Path) -> list[Path]:
    """Copies in which predictions, features and neighbours differ, as those of ten trainings on the same images."""
    made = []
    for number in range(RUNS):
        path, rng = folder / f"run-{number}", np.random.default_rng(number)
        shutil.copytree(run.path, path, ignore=shutil.ignore_patterns("checkpoints", "figures", "report*"))
        (path / "checkpoints").mkdir()
        samples, features = (load_file(path / f"{name}.safetensors") for name in ("samples", "features"))
        samples["prediction"] += 0.1 * rng.normal(size=samples["prediction"].shape).astype(np.float32)
        features["features"] += 0.1 * rng.normal(size=features["features"].shape).astype(np.float32)
        for name in ("neighbours", "random_neighbours"):
            features[name] = rng.permutation(features[name])
        save_file(samples, path / "samples.safetensors")
        save_file(features, path / "features.safetensors")
        made.append(path)
    return made


def main(run: Run) -> None:
    """Measure everything and print the table."""
    git = ["git", "-C", str(PAGE.parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        os.environ["GRADIO_TEMP_DIR"] = f"{temporary}/gradio"
        alone, seen = updates(run, temporary)
        cost = watched_trainings(run, folder / "trainings")
        runs, out = ten_runs(run, folder / "runs"), folder / "report.html"
        sizes = {}
        for count in (1, RUNS):
            write_report(runs[:count], out)
            sizes[count] = out.stat().st_size / 2**20
        watched = Watched(folder / "runs")
        began = time.process_time()
        watched.state()
        first, began = time.process_time() - began, time.process_time()
        for _ in range(UPDATES):
            watched.state()
        again = (time.process_time() - began) / UPDATES
    busy = f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    rows = {
        "explorer, one update in the browser, median": f"{statistics.median(seen):.0f} ms",
        "explorer, its panel alone, median": f"{statistics.median(alone):.0f} ms",
        "report of one run": f"{sizes[1]:.2f} MiB",
        "report of ten runs": f"{sizes[RUNS]:.2f} MiB",
        "live page, first look at ten runs, CPU time": f"{1000 * first:.0f} ms",
        "live page, each look after it, CPU time": f"{1000 * again:.1f} ms",
        "training with the live page open by one without it, median": f"{statistics.median(cost):.3f}",
        "the same, each pair": ", ".join(f"{ratio:.2f}" for ratio in sorted(cost)),
    }
    table = "".join(f"| {name} | {value} |\n" for name, value in rows.items())
    text = f"# Pages\n\nMade by `python -m benchmarks.pages RUN` at {commit}, on a CPU with a load of {busy}.\n\n"
    _, _, words = PAGE.read_text(encoding="utf-8").partition("|\n\n")  # what was written below the table stays
    write_text(PAGE, f"{text}| what | measured |\n|---|---:|\n{table}\n{words}")
    print(table)


if __name__ == "__main__":
    main(Run(sys.argv[1]))
