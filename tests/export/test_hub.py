"""Sharing an encoder: the real library against a hub on this machine that keeps what it is sent."""

import base64
import hashlib
import json
import os
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
from PIL import Image

import pmae
from pmae.cli import main
from pmae.errors import UserError
from pmae.export import export, push
from pmae.runs import Run
from pmae.train.checkpoint import load_encoder

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_of_nobody"


class Hub:
    """The part of the hub's interface that uploads of small files and downloads use."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.made: list[dict[str, Any]] = []
        self.tokens: set[str | None] = set()

    def post(self, path: str, body: bytes) -> dict[str, Any]:
        if path == "/api/repos/create":
            self.made.append(json.loads(body))
            return {"url": "http://127.0.0.1/me/shared"}
        if "/preupload/" in path:
            files = [{"path": file["path"], "uploadMode": "regular"} for file in json.loads(body)["files"]]
            return {"files": [{**file, "shouldIgnore": False, "oid": None} for file in files]}
        if "/commit/" in path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            return {"commitUrl": f"http://127.0.0.1/me/shared/commit/{COMMIT}", "commitOid": COMMIT}
        return {"warnings": [], "errors": []}

    def about(self) -> dict[str, Any]:
        siblings = [{"rfilename": name} for name in self.files]
        return {"id": "me/shared", "sha": COMMIT, "siblings": siblings, "private": True, "tags": [], "downloads": 0}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    own = Hub()

    class Handler(BaseHTTPRequestHandler):
        def reply(self, content: bytes, status: int = 200, **headers: str) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def do_POST(self) -> None:
            own.tokens.add(self.headers["Authorization"])
            body = self.rfile.read(int(self.headers["Content-Length"] or 0))
            if self.headers["Authorization"] != f"Bearer {TOKEN}":
                return self.reply(b'{"error": "Invalid token"}', 401, Content_Type="application/json")
            return self.reply(json.dumps(own.post(self.path, body)).encode(), Content_Type="application/json")

        def do_GET(self) -> None:
            if self.path.startswith("/api/"):
                listed = [{"type": "file", "path": p, "size": len(c), "oid": "0"} for p, c in own.files.items()]
                found = listed if "/tree/" in self.path else own.about()
                return self.reply(json.dumps(found).encode(), Content_Type="application/json")
            content = own.files.get(self.path.partition(f"/resolve/{COMMIT}/")[2])
            if content is None:
                return self.reply(b"", 404)
            etag = hashlib.sha1(content).hexdigest()
            return self.reply(content, ETag=f'"{etag}"', X_Repo_Commit=COMMIT)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, args=(0.01,)).start()
        address = f"http://127.0.0.1:{server.server_port}"
        constants = huggingface_hub.constants
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        try:
            yield own
        finally:
            server.shutdown()


@pytest.mark.parametrize("kind", ["timm", "huggingface"])
@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_what_is_pushed_is_what_is_loaded(
    make_run: Any, hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, dtype: str
) -> None:
    if kind == "huggingface":
        pytest.importorskip("transformers")
    run, out = make_run(dtype=dtype), str(tmp_path / "out")
    licence = ["--data-licence", "cc-by-4.0"]
    assert main(["export", str(run.path), "--format", kind, "-o", out, "--push", "me/shared", *licence]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("/me/shared")
    assert hub.made[0].get("private") or hub.made[0].get("visibility") == "private"  # the library's versions differ
    assert set(hub.files) == {path.name for path in Path(out).iterdir()}
    assert "## Licence of the images\n\ncc-by-4.0" in hub.files["README.md"].decode()
    assert '"me/shared"' in hub.files["README.md"].decode().replace("hf-hub:", "")
    assert not any(name.endswith((".bin", ".pt", ".pkl")) for name in hub.files)
    _, ours, mine = load_encoder(run)
    pixels = torch.rand(2, 3, 16, 16) * 100
    for place in ("hf://me/shared", f"hf://me/shared@{COMMIT}", out):
        _, theirs, their = pmae.load_encoder(place)
        torch.testing.assert_close(theirs.features(their(pixels)), ours.features(mine(pixels)), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("no_figures")
def test_what_is_on_the_hub_embeds_and_is_a_start(make_run: Any, hub: Hub, tmp_path: Path) -> None:
    run, data = make_run(), tmp_path / "labelled"
    export(run, "timm", tmp_path / "out")
    hub.files = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    for number, level in enumerate(range(0, 240, 10)):
        (data / f"{number % 2}").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), (level, 99, 200 * (number % 2))).save(data / f"{number % 2}" / f"{number}.png")
    for place, out in (("hf://me/shared", "theirs.npz"), (str(run.path), "ours.npz")):
        assert main(["embed", place, "--data", str(data), "-o", str(tmp_path / out), "--device", "cpu"]) == 0
    found = [np.load(tmp_path / name)["features"] for name in ("theirs.npz", "ours.npz")]
    np.testing.assert_allclose(*found, atol=1e-4)
    clf, adapted = tmp_path / "clf", tmp_path / "adapted"
    assert main(["finetune", "hf://me/shared", "--data", str(data), "--method", "linear", "--out", str(clf)]) == 0
    ours, kept = load_encoder(run)[1].net, pmae.load_classifier(clf, "cpu").encoder.net
    torch.testing.assert_close(kept.state_dict(), ours.state_dict())
    few = ["--epochs", "1", "--space", "cosine", "--device", "cpu"]
    assert main(["pretrain", "--init", "hf://me/shared", "--data", str(data), "--out", str(adapted), *few]) == 0
    assert Run(adapted).config.encoder.weights == "hf://me/shared"
    assert "from model.safetensors" in Run(adapted).environment["start"][0]


def test_a_dry_run_shows_what_would_go_and_sends_nothing(
    make_run: Any, hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    command = ["export", str(make_run().path), "--format", "timm", "-o", str(tmp_path / "out"), "--push", "me/shared"]
    assert main([*command, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "would be uploaded to me/shared, private if it is new:" in said
    size = (tmp_path / "out/model.safetensors").stat().st_size
    assert f"{size:>12,} bytes  model.safetensors" in said
    assert not hub.made
    assert not hub.tokens


def test_what_is_missing_is_told_before_anything_is_written(
    make_run: Any, hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["export", str(make_run().path), "--format", "timm", "-o", str(tmp_path / "out")]
    assert main([*command, "--push", "shared"]) == 2
    assert "push must be a repository, USER/NAME, got 'shared'" in capsys.readouterr().err
    assert main([*command, "--dry-run"]) == 2
    assert "push must be given" in capsys.readouterr().err
    monkeypatch.delenv("HF_TOKEN")
    assert main([*command, "--push", "me/shared"]) == 2
    assert "push to 'me/shared' needs a token of the Hugging Face hub: `hf auth login`" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_hub_that_refuses_is_one_sentence_and_the_folder_stays(
    make_run: Any, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(make_run(), "timm", tmp_path / "out")
    monkeypatch.setenv("HF_TOKEN", "hf_expired")
    with pytest.raises(UserError, match=r"^the repository me/shared cannot be reached: .*401"):
        push(tmp_path / "out", "me/shared")
    assert (tmp_path / "out/model.safetensors").exists()
    with pytest.raises(UserError, match="folder must be one that export wrote"):
        push(tmp_path, "me/shared")


def test_addresses_and_folders_that_hold_no_encoder(make_run: Any, hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"an address on the hub must be hf://USER/NAME or hf://USER/NAME@REVISION, got 'hf://me'"
    ):
        load_encoder("hf://me")
    hub.files["notes.json"] = b"{}"
    with pytest.raises(UserError, match="run must be a folder that pretraining wrote"):
        load_encoder("hf://me/shared")
    export(make_run(), "torch", tmp_path / "out")
    (tmp_path / "out/encoder.pt2").write_bytes(os.urandom(10))
    with pytest.raises(UserError, match=r"or weights that timm or Hugging Face did .*, got '.*out'"):
        load_encoder(tmp_path / "out")
    export(make_run(name="other"), "timm", tmp_path / "timm")
    with pytest.raises(UserError, match="epoch must be left out"):
        load_encoder(tmp_path / "timm", epoch=1)
