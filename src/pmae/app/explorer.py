"""Serves the explorer to this machine alone, and nothing of it leaves the machine."""

import os
import signal
import socket
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from pmae.app.material import LARGEST_FILE, Material
from pmae.config import DataConfig
from pmae.data.sets import load
from pmae.errors import UserError, missing_extra, require
from pmae.runs import Run

LOOPBACK = "127.0.0.1"
PORT = 7860


def gather(run: Run | None, data: DataConfig, say: Callable[[str], None] = lambda message: None) -> Material:
    """The images and, with a run, its model; the space that the page opens with is fitted here."""
    material = Material(load(data), run)
    if run is None:
        say(f"fitting {material.own_space} on {len(material.sample):,} images of {material.name}")
    material.space(material.own_space)
    return material


def open_page(material: Material, port: int | None = None, browser: bool = True) -> tuple[Any, str]:
    """Start the server in the background; returns what has a `close`, and the address."""
    layout = import_layout()
    page = layout.build(material)
    _, address, _ = page.launch(
        server_name=LOOPBACK,
        server_port=free_port(port),
        share=False,
        inbrowser=browser,
        prevent_thread_lock=True,
        quiet=True,
        ssr_mode=False,
        max_file_size=LARGEST_FILE,
        footer_links=[],
        theme=layout.theme(),
        css=layout.CSS,
    )
    return page, address


def explore(
    material: Material, port: int | None, browser: bool, say: Callable[[str], None] = lambda message: None
) -> None:
    """Serve until Ctrl-C; uploads and pictures live in a folder that goes with the server."""
    with tempfile.TemporaryDirectory(prefix="pmae-explore-") as folder:
        os.environ["GRADIO_TEMP_DIR"] = folder
        page, address = open_page(material, port, browser)
        say(f"exploring at {address} (Ctrl-C ends it)")
        with suppress(KeyboardInterrupt):
            wait()
        page.close(verbose=False)


def wait() -> None:
    """Until Ctrl-C, or the signal that ends a process kindly."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    threading.Event().wait()


def import_layout() -> Any:
    """Gradio, told before it is imported to report to nobody and to find this machine without a proxy."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    for name in ("NO_PROXY", "no_proxy"):
        os.environ[name] = ",".join(filter(None, [os.environ.get(name), LOOPBACK]))
    try:
        from pmae.app import layout
    except ImportError as error:
        raise missing_extra("pmae explore", "app", error) from error
    return layout


def free_port(wanted: int | None) -> int:
    """The port asked for if nobody has it; without one the usual, or any that is free."""
    require(wanted is None or 1 <= wanted <= 65535, "port", "between 1 and 65535", wanted)
    for port in (PORT, 0) if wanted is None else (wanted,):
        with socket.socket() as probe, suppress(OSError):
            # A server that ended a moment ago does not count.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((LOOPBACK, port))
            return int(probe.getsockname()[1])
    raise UserError(f"port must be one that nobody uses, got {wanted}")
