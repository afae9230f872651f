"""A live page about all runs of a folder, served to this machine alone: it reads run folders and writes nothing."""

import contextlib
import io
import json
import math
import socket
import statistics
import time
from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np

from pmae.errors import UserError, require
from pmae.report import samples
from pmae.report.charts import curve_data
from pmae.report.contents import BROKEN, Contents, distinct_names, load
from pmae.report.page import render
from pmae.report.pictures import reconstructed_pictures
from pmae.report.style import sheet
from pmae.system import lives

LOOPBACK = "127.0.0.1"
HOSTS = (LOOPBACK, "localhost", "::1", "[::1]")
"""Names under which a browser on this machine asks; any other is a foreign page's (DNS rebinding), and refused."""
WATCHED = ("metrics.jsonl", "results.json", "config.json", ".lock")
QUIET_SECONDS = 600  # without a line, after which a run on another machine counts as stopped


class Watched:
    """The runs below a folder, each read again only when its files have changed."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder).expanduser()
        require(self.folder.is_dir(), "folder", "a folder with runs", str(folder))
        self._read: dict[Path, tuple[object, Contents]] = {}

    def paths(self) -> dict[str, Path]:
        """Run folders by their names, at most two levels down."""
        found = [self.folder / "config.json", *self.folder.glob("*/config.json"), *self.folder.glob("*/*/config.json")]
        runs = sorted(path.parent for path in found if (path.parent / "environment.json").is_file())
        return dict(zip(distinct_names(runs), runs, strict=True))

    def runs(self) -> list[Contents]:
        """Every run that can be read; one that is just being made may come a moment later."""
        found = []
        for name, path in self.paths().items():
            stamp = name, *(_stamp(path / file) for file in WATCHED)
            if self._read.get(path, (None,))[0] != stamp:
                try:
                    self._read[path] = stamp, load(path, name, whole=False)
                except BROKEN:
                    continue
            found.append(self._read[path][1])
        return found

    def state(self) -> dict[str, Any]:
        """All that the page shows, as plain values."""
        runs = self.runs()
        return {"folder": str(self.folder), "runs": list(map(described, runs)), "curves": curve_data(runs)}

    def picture(self, name: str) -> bytes | None:
        """Hidden, predicted and restored parts of a run's sample images as a PNG; None while there are none."""
        path = self.paths().get(name)
        if path is None or not (path / "samples.safetensors").is_file():
            return None
        run = load(path, name)
        if "target" not in run.samples or samples.is_signal(run):
            return None
        from PIL import Image

        pixels, _, _ = sheet(list(reconstructed_pictures(run, samples.MASKS).values()))
        buffer = io.BytesIO()
        Image.fromarray((255 * pixels).round().astype(np.uint8)).save(buffer, "PNG")
        return buffer.getvalue()


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def described(run: Contents) -> dict[str, Any]:
    """One run as a row: its state, how far it is, how long it still takes, and its last scores."""
    last = run.training[-1] if run.training else {}
    measured: dict[str, Any] = {}
    for line in run.signals:
        measured |= {key: value for key, value in line.items() if value is not None}
    speeds = [line["images_per_second"] for line in run.training[-9:]]
    state, left = state_of(run), None
    if state == "training" and speeds and run.epoch:
        images = last["step"] / run.epoch * (run.config.train.batch_size or 0)
        left = (run.config.train.epochs or 0) - run.epoch
        left = left * images / max(statistics.median(speeds), 1e-9)
    told = {
        "name": run.name,
        "state": state,
        "epoch": round(run.epoch, 2),
        "epochs": run.config.train.epochs,
        "left": left,
        "speed": statistics.median(speeds) if speeds else None,
        "loss": last.get("loss"),
        "r2": measured.get(run.r2_name),
        "knn": measured.get("knn"),
        "linear": measured.get("linear"),
        "pictures": _stamp(run.path / "samples.safetensors"),
    }
    # JSON has no NaN: a browser would refuse the state of all runs for the sake of one that diverged.
    return {key: None if isinstance(it, float) and not math.isfinite(it) else it for key, it in told.items()}


def state_of(run: Contents) -> str:
    """Finished, training, failed or stopped: by what was logged, and by who holds the folder."""
    if run.finished:
        return "finished"
    if _held(run.path):
        return "training"
    return "failed" if any(run.path.glob("failure_*")) else "stopped"


def _held(path: Path) -> bool:
    """Whether the process that its lock names lives; on another machine, whether it wrote a line lately."""
    try:
        number, _, host = (path / ".lock").read_text(encoding="utf-8").strip().partition(" on ")
    except (OSError, ValueError):
        return False
    if host == socket.gethostname() and number.isdecimal():
        return lives(int(number))
    wrote = _stamp(path / "metrics.jsonl") or _stamp(path / "config.json")
    return wrote is not None and time.time() - wrote[0] / 1e9 < QUIET_SECONDS


class Handler(BaseHTTPRequestHandler):
    """Answers for the page, the state of all runs and the pictures of one."""

    def __init__(self, watched: Watched, page: bytes, *request: Any) -> None:
        self.watched, self.page = watched, page
        super().__init__(*request)  # which answers at once

    def do_GET(self) -> None:
        asked, host = urlsplit(self.path), self.headers.get("Host", "")
        if {host, host.rpartition(":")[0]}.isdisjoint(HOSTS):  # a browser names no port where it is 80
            return self.answer(400, "text/plain", b"this page is for this machine alone")
        if asked.path == "/":
            return self.answer(200, "text/html; charset=utf-8", self.page)
        if asked.path == "/runs.json":
            return self.answer(200, "application/json", json.dumps(self.watched.state()).encode())
        found = None
        if asked.path == "/picture.png":
            with contextlib.suppress(*BROKEN):  # half of a file that is being replaced
                found = self.watched.picture(parse_qs(asked.query).get("run", [""])[0])
        return self.answer(200, "image/png", found) if found else self.answer(404, "text/plain", b"not here")

    def answer(self, status: int, kind: str, body: bytes) -> None:
        """Send it, to be kept by nobody."""
        self.send_response(status)
        headers = {"Content-Type": kind, "Content-Length": str(len(body)), "Cache-Control": "no-store"}
        for name, value in {**headers, "X-Content-Type-Options": "nosniff"}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing of every request."""


def serve(folder: Path | str, port: int | None, say: Callable[[str], None]) -> ThreadingHTTPServer:
    """A server on this machine's own address, not yet running: `serve_forever` starts it."""
    require(port is None or 1 <= port <= 65535, "port", "between 1 and 65535", port)
    handler = partial(Handler, Watched(folder), render("watch.html.j2", "watch.js").encode())
    try:
        server = ThreadingHTTPServer((LOOPBACK, port or 0), handler)
    except OSError as error:
        raise UserError(f"port must be one that nobody uses, got {port}") from error
    server.daemon_threads = True
    say(f"watching {folder} at http://{LOOPBACK}:{server.server_address[1]}/ (Ctrl-C ends it)")
    return server
