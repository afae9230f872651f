"""The explorer's page, in Gradio, and its server: for this machine alone, and nothing of it leaves the machine."""

import functools
import os
import signal
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from pmae.app import panels
from pmae.app.material import LARGEST_FILE, Material, read_upload
from pmae.errors import UserError, optional, require
from pmae.report.watch import HOSTS, LOOPBACK
from pmae.runs import PARTS

FONTS = ["system-ui", "Segoe UI", "Roboto", "Helvetica", "Arial", "sans-serif"]
MONO = ["ui-monospace", "Menlo", "Consolas", "monospace"]
QUIET = {"show_progress": "hidden"}


def explore(
    material: Any, port: int | None, browser: bool, say: Callable[[str], None], make: Callable[[Any], Any] | None = None
) -> None:
    """Serve until Ctrl-C; uploads and pictures live in a folder that goes with the server."""
    with tempfile.TemporaryDirectory(prefix="pmae-explore-") as folder:
        os.environ["GRADIO_TEMP_DIR"] = folder
        page, address = open_page(material, port, browser, make)
        say(f"exploring at {address} (Ctrl-C ends it)")
        with suppress(KeyboardInterrupt):
            wait()
        page.close(verbose=False)


def wait() -> None:
    """Until Ctrl-C, or the signal that ends a process kindly."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    threading.Event().wait()


def open_page(
    material: Any, port: int | None = None, browser: bool = True, make: Callable[[Any], Any] | None = None
) -> tuple[Any, str]:
    """Start the server in the background; returns what has a `close`, and the address. `make` builds another page."""
    require(port is None or 1 <= port <= 65535, "port", "between 1 and 65535", port)
    gr, page = gradio(), (make or build)(material)
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    try:
        _, address, _ = page.launch(
            server_name=LOOPBACK,
            server_port=port,
            share=False,
            inbrowser=browser,
            prevent_thread_lock=True,
            quiet=True,
            ssr_mode=False,
            max_file_size=LARGEST_FILE,
            footer_links=[],
            # Fonts that the machine has: any other would be asked for over the network.
            theme=gr.themes.Base(primary_hue="sky", neutral_hue="slate", font=FONTS, font_mono=MONO, radius_size="sm"),
            css=(Path(__file__).parent / "page.css").read_text(encoding="utf-8"),
            app_kwargs={"middleware": [Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS)]},
        )
    except OSError as error:
        raise UserError(f"port must be one that nobody uses, got {port}") from error
    return page, address


def gradio() -> Any:
    """Gradio, told before it is imported to report to nobody and to find this machine without a proxy."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    # It would keep each answer, uploads in it, in the browser, and every update would rewrite all that were kept.
    os.environ["GRADIO_RUN_HISTORY"] = "False"
    for name in ("NO_PROXY", "no_proxy"):
        others = [host for host in os.environ.get(name, "").split(",") if host not in ("", LOOPBACK)]
        os.environ[name] = ",".join([*others, LOOPBACK])
    return optional("pmae explore", "app", "gradio")


def build(material: Material) -> Any:
    """The page, not yet served: an image and a space on the left, four tabs on the right."""
    gr, (channels, height, width) = gradio(), material.shape
    about = f"{material.name}: {len(material.train):,} training images of {channels}x{height}x{width}; "
    about += "with a trained run" if material.model else "no run given: masks without predictions"
    with gr.Blocks(title="pmae explorer", analytics_enabled=False, fill_width=True) as page:
        gr.HTML(f"<h1>pmae explorer</h1>{panels.words(about)}", elem_id="heading")
        with gr.Row(elem_id="whole"):
            with gr.Column(scale=2, min_width=280, elem_id="choice"):
                chosen, space = _choice(material)
                opened = gr.State("Masks")
            with gr.Column(scale=7, min_width=320), gr.Tabs():
                with gr.Tab("Masks") as tab:
                    inputs, shown = [chosen, space, *_mask_controls(material)], gr.HTML(elem_id="masks")
                    _keep_shown(tab, opened, panels.masks, material, inputs, shown, page.load)
                with gr.Tab("Spectrum") as tab:
                    inputs, shown = [chosen, space, *_band_controls()], gr.HTML(elem_id="walk")
                    _keep_shown(tab, opened, panels.walk, material, inputs, shown)
                with gr.Tab("Neighbours") as tab:
                    shown = gr.HTML(panels.words("Comparing with the training images …"), elem_id="neighbours")
                    _keep_shown(tab, opened, panels.neighbours, material, [chosen], shown)
                with gr.Tab("Patches") as tab:
                    shown = gr.HTML(elem_id="patches")
                    _keep_shown(tab, opened, panels.patches, material, [chosen], shown)
    return page


def _choice(material: Material) -> tuple[Any, Any]:
    gr, images = gradio(), material.picked.images
    pictures = (255 * material.view.pictures(np.asarray(images, np.float64))).round().astype(np.uint8)
    chosen = gr.State(images[0])
    offered = [(words, name) for name, words in material.offered().items()]
    space = gr.Dropdown(offered, value=material.own_space, label="Space", elem_id="space")
    upload = gr.UploadButton("Upload an image", size="sm", elem_id="upload")
    message = gr.HTML(elem_id="message")
    look = {"columns": 6, "height": "auto", "format": "png", "buttons": [], "object_fit": "cover"}
    look |= {"show_label": False, "allow_preview": False, "interactive": False}
    gallery = gr.Gallery(list(pictures), elem_id="gallery", **look)

    def pick(event: Any) -> tuple[np.ndarray, str]:
        return images[event.index], ""

    # Gradio goes by the annotation, and its name is known only here.
    pick.__annotations__["event"] = gr.SelectData
    gallery.select(pick, None, [chosen, message], **QUIET)
    upload.upload(functools.partial(take, material), [upload, chosen], [chosen, message], **QUIET)
    return chosen, space


def take(material: Material, path: str, before: np.ndarray) -> tuple[np.ndarray, str]:
    """The uploaded image and a word about it; the one before, and what is wrong, if the file cannot be read."""
    low, high = float(np.min(material.view.low)), float(np.max(material.view.high))
    try:
        image = read_upload(Path(path), material.shape, material.dtype, low, high)
    except UserError as error:
        return before, panels.words(str(error), kind="problem")
    return image, panels.words(f"{Path(path).name}, resized to {image.shape[1]}x{image.shape[2]}")


def _mask_controls(material: Material) -> tuple[Any, Any]:
    gr, begin = gradio(), material.masked_share
    with gr.Row():
        # From 0, though nothing is hidden there: whoever types 0.35 begins with a 0.
        share = gr.Slider(0, 1, begin, step=0.01, label="Masked share", elem_id="share", min_width=200, scale=4)
        seed = gr.Number(0, label="Seed", precision=0, elem_id="seed", min_width=80, scale=1)
        again = gr.Button("Another mask", size="sm", elem_id="again", min_width=100, scale=1)
    again.click(lambda value: int(value or 0) + 1, seed, seed, **QUIET)
    return share, seed


def _band_controls() -> tuple[Any, Any]:
    gr = gradio()
    with gr.Row():
        low = gr.Slider(0, 1, 0.0, step=0.01, label="From this share of the variance", elem_id="low", min_width=220)
        high = gr.Slider(0, 1, 0.8, step=0.01, label="to this one", elem_id="high", min_width=220)
    with gr.Row(elem_id="parts"):
        for part, ends in PARTS.items():
            button = gr.Button(part.capitalize(), size="sm", min_width=80)
            button.click(functools.partial(tuple, ends), None, [low, high], **QUIET)
    return low, high


def _keep_shown(
    tab: Any, opened: Any, panel: Callable[..., str], material: Material, inputs: list[Any], shown: Any, *first: Any
) -> None:
    """Draw a panel when its tab is opened, at `first` events, and while it is open whenever an input changes."""
    gr, title = gradio(), tab.label

    def draw(*values: Any) -> str:
        try:
            return panel(material, *values)
        except UserError as error:
            return panels.words(str(error), kind="problem")

    def draw_if_open(current: str, *values: Any) -> Any:
        return draw(*values) if current == title else gr.skip()

    # What is shown stays as it is until the new comes: a sign of progress would fade it.
    how = {"trigger_mode": "always_last", "queue": False, **QUIET}
    tab.select(lambda: title, None, opened, **QUIET)
    gr.on([tab.select, *first], draw, inputs, shown, **how)
    gr.on([one.change for one in inputs], draw_if_open, [opened, *inputs], shown, **how)
