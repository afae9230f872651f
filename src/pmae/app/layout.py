"""The page itself, in Gradio: an image and a space on the left, three tabs on the right."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gradio as gr
import numpy as np

from pmae.app import panels
from pmae.app import panels as markup
from pmae.app.material import Material, read_upload
from pmae.errors import UserError

FONTS = ["system-ui", "Segoe UI", "Roboto", "Helvetica", "Arial", "sans-serif"]
MONO = ["ui-monospace", "Menlo", "Consolas", "monospace"]
CSS = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")


def theme() -> Any:
    """Fonts that the machine has: any other would be asked for over the network."""
    return gr.themes.Base(primary_hue="sky", neutral_hue="slate", font=FONTS, font_mono=MONO, radius_size="sm")


def build(material: Material) -> Any:
    """The page, not yet served."""
    with gr.Blocks(title="pmae explorer", analytics_enabled=False, fill_width=True) as page:
        gr.HTML(_heading(material), elem_id="heading")
        with gr.Row(elem_id="whole"):
            with gr.Column(scale=2, min_width=280, elem_id="choice"):
                chosen, space = _choice(material)
                opened = gr.State("Masks")
            with gr.Column(scale=7, min_width=320), gr.Tabs():
                with gr.Tab("Masks") as tab:
                    inputs, shown = _masks_tab(material)
                    _keep_shown(tab, opened, panels.masks, material, [chosen, space, *inputs], shown, page.load)
                with gr.Tab("Spectrum") as tab:
                    inputs, shown = _spectrum_tab()
                    _keep_shown(tab, opened, panels.walk, material, [chosen, space, *inputs], shown)
                with gr.Tab("Neighbours") as tab:
                    shown = gr.HTML(markup.words("Comparing with the training images …"), elem_id="neighbours")
                    _keep_shown(tab, opened, panels.neighbours, material, [chosen], shown)
    return page


def _heading(material: Material) -> str:
    channels, height, width = material.shape
    size = f"{height}x{width}, {channels} channel{'s' * (channels > 1)}"
    with_run = "no run given: masks without predictions" if material.model is None else "with a trained run"
    about = markup.words(f"{material.name}: {len(material.train):,} training images of {size}; {with_run}")
    return f"<h1>pmae explorer</h1>{about}"


def _choice(material: Material) -> tuple[Any, Any]:
    """Pick or upload an image, and choose the space."""
    pictures = (255 * material.view.pictures(np.asarray(material.picked.images, np.float64))).round().astype(np.uint8)
    chosen = gr.State(material.picked.images[0])
    space = gr.Dropdown(
        [(words, name) for name, words in material.offered().items()],
        value=material.own_space,
        label="Space",
        elem_id="space",
    )
    gallery = gr.Gallery(
        list(pictures),
        label="Images",
        show_label=False,
        columns=6,
        height="auto",
        allow_preview=False,
        interactive=False,
        format="png",
        buttons=[],
        object_fit="cover",
        elem_id="gallery",
    )
    upload = gr.UploadButton("Upload an image", size="sm", elem_id="upload")
    message = gr.HTML(elem_id="message")

    def pick(event: gr.SelectData) -> tuple[np.ndarray, str]:
        return material.picked.images[event.index], ""

    def take(path: str, before: np.ndarray) -> tuple[np.ndarray, str]:
        low, high = float(np.min(material.view.low)), float(np.max(material.view.high))
        try:
            image = read_upload(Path(path), material.shape, material.dtype, low, high)
        except UserError as error:
            return before, markup.words(str(error), kind="problem")
        return image, markup.words(f"{Path(path).name}, resized to {image.shape[1]}x{image.shape[2]}")

    gallery.select(pick, None, [chosen, message], show_progress="hidden")
    upload.upload(take, [upload, chosen], [chosen, message], show_progress="hidden")
    return chosen, space


def _masks_tab(material: Material) -> tuple[list[Any], Any]:
    """What is hidden of the image: its controls, and the place for the pictures."""
    with gr.Row():
        share = gr.Slider(
            0.01, 0.99, material.masked_share, step=0.01, label="Masked share", elem_id="share", min_width=200, scale=4
        )
        seed = gr.Number(0, label="Seed", precision=0, minimum=0, elem_id="seed", min_width=80, scale=1)
        again = gr.Button("Another mask", size="sm", elem_id="again", min_width=100, scale=1)
    shown = gr.HTML(elem_id="masks")
    again.click(lambda value: int(value or 0) + 1, seed, seed, show_progress="hidden")
    return [share, seed], shown


def _spectrum_tab() -> tuple[list[Any], Any]:
    """A band of the spectrum: its controls, and the place for the pictures."""
    with gr.Row():
        low = gr.Slider(0, 1, 0.0, step=0.01, label="From this share of the variance", elem_id="low", min_width=220)
        high = gr.Slider(0, 1, 0.8, step=0.01, label="to this one", elem_id="high", min_width=220)
    with gr.Row(elem_id="parts"):
        for part, (first, last) in panels.PARTS.items():
            button = gr.Button(part.capitalize(), size="sm", min_width=80)
            button.click(functools.partial(tuple, (first, last)), None, [low, high], show_progress="hidden")
    return [low, high], gr.HTML(elem_id="walk")


def _keep_shown(
    tab: Any, opened: Any, panel: Callable[..., str], material: Material, inputs: list[Any], shown: Any, *first: Any
) -> None:
    """Draw a panel when its tab is opened and, while it is, whenever an input changes; of many changes the last counts.

    `first` are other events to draw at. A tab that nobody looks at costs nothing.
    """
    title = tab.label

    def draw(*values: Any) -> str:
        try:
            return panel(material, *values)
        except UserError as error:
            return markup.words(str(error), kind="problem")

    def draw_if_open(current: str, *values: Any) -> Any:
        return draw(*values) if current == title else gr.skip()

    how = {"trigger_mode": "always_last", "show_progress": "minimal"}
    tab.select(lambda: title, None, opened, show_progress="hidden")
    gr.on([tab.select, *first], draw, inputs, shown, **how)
    gr.on([one.change for one in inputs], draw_if_open, [opened, *inputs], shown, **how)
