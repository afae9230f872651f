"""Downloads from hosts on this machine that break off, ignore ranges, lie or are away."""

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from pmae.data import fetch
from pmae.data.download import Archive, download
from pmae.errors import UserError
from pmae.system import take_lock

CONTENT = bytes(range(256)) * 40
SHA256 = hashlib.sha256(CONTENT).hexdigest()
AWAY = "http://127.0.0.1:9/set.npz"


@dataclass
class Host:
    """Serves one file, at most `each` bytes a connection, and stops serving after `connections`."""

    content: bytes = CONTENT
    each: int = 10**9
    ranges: bool = True
    connections: int = 10**9
    asked: list[int] = field(default_factory=list)
    url: str = ""

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        wanted = re.fullmatch(r"bytes=(\d+)-", request.headers.get("Range", ""))
        self.asked.append(int(wanted[1]) if wanted else 0)
        if len(self.asked) > self.connections:
            return
        start = self.asked[-1] if self.ranges else 0
        request.send_response(416 if start >= len(self.content) else 206 if start else 200)
        request.send_header("Content-Length", str(max(0, len(self.content) - start)))
        request.end_headers()
        request.wfile.write(self.content[start : start + self.each])


@contextmanager
def serving(host: Host) -> Iterator[Host]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            host.answer(self)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, args=(0.01,)).start()
        host.url = f"http://127.0.0.1:{server.server_port}/set.npz"
        try:
            yield host
        finally:
            server.shutdown()


@pytest.fixture
def part(tmp_path: Path) -> Path:
    return tmp_path / "set.npz.part"


def test_a_host_that_breaks_off_is_asked_for_the_rest(part: Path) -> None:
    with serving(Host(each=3000)) as host:
        assert download(Archive((host.url,), SHA256), part) == [f"fetched {host.url}"]
    assert part.read_bytes() == CONTENT
    assert host.asked == [0, 3000, 6000, 9000]


def test_the_next_host_goes_on_where_the_last_one_broke_off(part: Path) -> None:
    with serving(Host(each=3000, connections=2)) as first, serving(Host()) as second:
        lines = download(Archive((AWAY, first.url, second.url), SHA256), part)
    assert len(lines) == 3
    assert re.match(rf"cannot fetch {AWAY}: .*refused", lines[0])
    assert lines[1].startswith(f"cannot fetch {first.url}: ")
    assert second.asked == [6000]
    assert part.read_bytes() == CONTENT


def test_the_same_command_goes_on_where_all_hosts_broke_off(part: Path) -> None:
    with serving(Host(each=3000, connections=1)) as host:
        archive = Archive((host.url,), SHA256)
        with pytest.raises(UserError, match=rf"{host.url}.*set.npz.part keeps 3,000 bytes, and the same command"):
            download(archive, part)
        host.connections, host.each = 10**9, 10**9
        download(archive, part)
    assert host.asked == [0, 3000, 3000]
    assert part.read_bytes() == CONTENT


def test_a_host_without_ranges_sends_all_again(part: Path) -> None:
    with serving(Host(ranges=False, each=3000)) as host:
        with pytest.raises(UserError, match=r"broke off after 3,000 of 10,240 bytes"):
            download(Archive((host.url,), SHA256), part)
        host.each = 10**9
        download(Archive((host.url,), SHA256), part)
    assert part.read_bytes() == CONTENT


@pytest.mark.parametrize("stale", [b"another beginning", CONTENT + b"more than there is"])
def test_a_beginning_that_does_not_fit_is_thrown_away(part: Path, stale: bytes) -> None:
    part.write_bytes(stale)
    with serving(Host()) as host:
        download(Archive((host.url,), SHA256), part)
    assert part.read_bytes() == CONTENT
    assert host.asked == [len(stale), 0]


def test_a_file_that_is_whole_already_is_not_sent_again(part: Path) -> None:
    part.write_bytes(CONTENT)
    with serving(Host(b"")) as host:
        download(Archive((host.url,), SHA256), part)
    assert part.read_bytes() == CONTENT


def test_a_host_with_another_file_is_named_and_nothing_of_it_stays(part: Path) -> None:
    with serving(Host(b"<html>moved</html>")) as host:
        with pytest.raises(UserError, match=rf"{host.url}: its SHA-256 must be {SHA256}, got "):
            download(Archive((host.url,), SHA256), part)
        assert not part.exists()
        with serving(Host()) as true:
            assert download(Archive((host.url, true.url), SHA256), part)[1] == f"fetched {true.url}"


def test_two_processes_do_not_fetch_the_same_file(part: Path) -> None:
    with part.open("ab") as other:
        take_lock(other.fileno(), wait=False)
        with pytest.raises(UserError, match="being fetched by another process"):
            download(Archive((AWAY,), SHA256), part)


def test_a_planted_link_is_not_written_through(part: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    part.symlink_to(tmp_path / "mine")
    with pytest.raises(UserError, match="must be no link"):
        download(Archive((AWAY,), SHA256), part)
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_mirror_is_asked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(Host()) as host:
        monkeypatch.setitem(fetch.MEDMNIST_64, "bloodmnist", Archive((AWAY,), SHA256))
        lines = fetch.fetch("bloodmnist", tmp_path, mirror=host.url.removesuffix("set.npz"))
    assert lines == [f"fetched {host.url}", f"{tmp_path / 'set.npz'} is there; its checksum is right"]
    assert [path.name for path in tmp_path.iterdir()] == ["set.npz"]
