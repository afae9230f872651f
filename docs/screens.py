"""Take the pictures of report, live page and explorer in a real browser: python docs/screens.py runs/demo

Needs Chromium with its driver, selenium and gradio; `pmae demo` makes the run.
"""

import os
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from selenium import webdriver

from pmae.app.explorer import open_page
from pmae.app.material import Material
from pmae.data.sets import load
from pmae.report.page import write_report
from pmae.report.watch import serve
from pmae.runs import Run

IMAGES = Path(__file__).parent / "images"
MAP = """const map = document.querySelector('svg.map'); map.scrollIntoView({block: 'start', behavior: 'instant'});
window.scrollBy({top: -60, behavior: 'instant'});
const at = map.querySelector('[data-i="5"]').getBoundingClientRect();
map.dispatchEvent(new MouseEvent('click', {clientX: at.x + 2, clientY: at.y + 2}));
document.querySelectorAll('[data-map]').forEach(cell => cell.dataset.cell === '0,2' && cell.click())"""


def browser(folder: str) -> Any:
    """A Chromium without a window, with a profile of its own."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or ""
    for flag in ("--headless=new", "--no-sandbox", "--hide-scrollbars", f"--user-data-dir={folder}/profile"):
        options.add_argument(flag)
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))


def take(driver: Any, address: str, name: str, height: int, wait: str = "return true", act: str = "") -> None:
    """One picture, 1280 pixels wide, once the page says that it is ready."""
    size = {"width": 1280, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    driver.get(address)
    while not driver.execute_script(wait):
        time.sleep(0.2)
    if act:
        driver.execute_script(act)
    time.sleep(1)
    driver.save_screenshot(str(IMAGES / f"{name}.png"))
    print(IMAGES / f"{name}.png")


def main(run: Run) -> None:
    """All pictures of one run."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["GRADIO_TEMP_DIR"] = folder
        driver = browser(folder)
        try:
            write_report([run.path], f"{folder}/report.html")
            report = Path(folder, "report.html").as_uri()
            take(driver, report, "report", 900)
            take(driver, report, "report-map", 900, act=MAP)
            server = serve(run.path.parent, None, print)
            threading.Thread(target=server.serve_forever, daemon=True).start()
            address = f"http://127.0.0.1:{server.server_address[1]}/"
            take(driver, address, "watch", 1000, "return document.querySelectorAll('#pictures img').length > 0")
            server.shutdown()
            page, address = open_page(Material(load(run.config.data), run), browser=False)
            take(driver, address, "explorer", 900, "return document.querySelectorAll('#masks figure img').length == 5")
            page.close(verbose=False)
        finally:
            driver.quit()


if __name__ == "__main__":
    main(Run(sys.argv[1] if len(sys.argv) > 1 else "runs/demo"))
