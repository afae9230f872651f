"""Remote stores (`s3://`, `hf://`, whatever fsspec knows), beside which a machine keeps copies of its own.

Data is copied here before it is read. A run is trained in a folder here and copied there at every checkpoint, so that a
store that is slow, full or gone costs a sentence and no state.
"""

import glob
import re
import shutil
import threading
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from pmae.errors import failing_as, first_line, require
from pmae.files import lock, read_object, write_json, write_whole

STAGED = ".remote"
"""In data.root: the state that each copied file had in its store, one a line."""
MIRRORED = ".remote.json"
"""In a run folder: the address that it is copied to, and time and size of each file when it was."""
RUNS = Path("runs")
PATIENCE_SECONDS = 600.0  # for a store to take what is left when a run is over


def is_remote(path: object) -> bool:
    """Whether a path is an address in a store."""
    return isinstance(path, str) and re.match(r"\w[\w+.-]*(::\w[\w+.-]*)*://", path) is not None


def reaching(url: str) -> AbstractContextManager[None]:
    """Inside, whatever a store's library raises is one sentence with the address."""
    return failing_as(f"{url} cannot be reached")


def _open(url: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs

    store, path = url_to_fs(url)
    return store, path.rstrip("/")


def stage(url: str, patterns: Sequence[str], root: Path) -> str:
    """Copy the files of an address, or of the patterns it stands for, below `root`; returns its path there."""
    with reaching(url):
        store, path = _open(url)
        places = [_open(pattern)[1] for pattern in patterns]
        found = [one for place in places for one in (store.glob if glob.has_magic(place) else store.find)(place)]
        require(bool(found), "data.source", "an address with files", url)
        root.mkdir(parents=True, exist_ok=True)
        with lock(root / STAGED):
            _copy_changed(store, url, found, root)
            _remove_gone(places, found, root)
        return str(root / _below(path))


def _copy_changed(store: Any, url: str, paths: Sequence[str], root: Path) -> None:
    from rich.console import Console
    from rich.progress import track

    record, known, console = root / STAGED, _recorded(root), Console(stderr=True)
    states = {path: store.ukey(path) for path in paths}
    changed = [p for p in paths if known.get(str(_below(p))) != states[p] or not (root / _below(p)).is_file()]
    need, free = sum(store.size(path) or 0 for path in changed), shutil.disk_usage(root).free
    require(need <= free, f"data.root, where {url} is copied to,", f"on a disk with {need:,} bytes free", f"{free:,}")
    for path in track(changed, f"copying {url}", console=console, disable=not console.is_terminal):
        _copy_here(store, path, root / _below(path))
        with record.open("a", encoding="utf-8") as file:
            file.write(f"{states[path]} {_below(path)}\n")


def _recorded(root: Path) -> dict[str, str]:
    """The state in its store of each file that was copied, by its path below `root`."""
    record = root / STAGED
    lines = record.read_text(encoding="utf-8").splitlines() if record.exists() else []
    return {name: state for state, _, name in (line.partition(" ") for line in lines)}


def _remove_gone(places: Sequence[str], found: Sequence[str], root: Path) -> None:
    """Remove copies of what the store has no more: they would be read with the rest."""
    there, asked = {str(_below(path)) for path in found}, [_below(place) for place in places]
    for name in _recorded(root).keys() - there:
        copy = PurePosixPath(name)
        if any(p in copy.parents or (len(p.parts) == len(copy.parts) and copy.match(str(p))) for p in asked):
            (root / name).unlink(missing_ok=True)


def _below(path: str) -> PurePosixPath:
    """A path in a store as one below a folder; a name that would leave it is refused."""
    inner = PurePosixPath(re.sub(r"^\w+://", "", path).strip("/"))
    require(".." not in inner.parts, "a name in a store", "one below its folder", path)
    return inner


def _copy_here(store: Any, path: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    write_whole(target, lambda temporary: store.get_file(path, str(temporary)))


def local(path: Path | str) -> Path:
    """A path on this machine.

    Of hf://USER/NAME, maybe @REVISION, it is a copy, in the hub's own cache, of its JSON and safetensors files.
    """
    if not (isinstance(path, str) and path.startswith("hf://")):
        return Path(path).expanduser()
    from huggingface_hub import snapshot_download

    named = re.fullmatch(r"hf://([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", path)
    require(named is not None, "an address on the hub", "hf://USER/NAME or hf://USER/NAME@REVISION", path)
    assert named
    with reaching(path):
        return Path(snapshot_download(named[1], revision=named[2], allow_patterns=["*.json", "*.safetensors"]))


class Mirror:
    """A run folder of this machine and its copy in a store; use as a context, after which all is there."""

    def __init__(self, url: str, folder: Path | None = None) -> None:
        self.url, self.folder = url.rstrip("/"), folder or RUNS / url.rstrip("/").rpartition("/")[2]
        self._thread: threading.Thread | None = None
        self._failed: Exception | None = None
        with reaching(url):
            self._store, self._path = _open(url)
        own = mirrored(self.folder).get("url")
        vacant = own == self.url or not (self.folder / "config.json").exists()
        require(vacant, f"{self.folder}, in which {url} is kept here,", "a folder without another run", own)

    def pull(self) -> None:
        """Bring the run here, unless what is here has gone as far."""
        with reaching(self.url):
            names = [str(PurePosixPath(path).relative_to(self._path)) for path in self._store.find(self._path)]
            if "config.json" not in names:
                return
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            with lock(self.folder):
                here = list(self._states())
                if not here or _newest(names) > _newest(here):
                    for name in sorted(names, key=_completes):
                        _copy_here(self._store, f"{self._path}/{name}", self.folder / _below(name))
                    self._note(self._states())

    def require_vacant(self) -> None:
        with reaching(self.url):
            there = self._store.exists(f"{self._path}/config.json")
        require(not there, "out", "an address without a run; resume it, or name another", self.url)

    def __enter__(self) -> "Mirror":
        return self

    def __exit__(self, *_: object) -> None:
        self._wait(PATIENCE_SECONDS)
        self.push()
        self._wait(PATIENCE_SECONDS)
        self._tell()

    def push(self) -> None:
        """Begin to copy what is new; a copy that is still under way is left alone, and the next one takes it all."""
        if self._thread is None or not self._thread.is_alive():
            self._tell()
            self._thread = threading.Thread(target=self._push, daemon=True)
            self._thread.start()

    def _push(self) -> None:
        try:
            self._copy_there()
        except Exception as error:  # each library has its own
            self._failed = error

    def _copy_there(self) -> None:
        there, now = mirrored(self.folder).get("files", {}), self._states()
        try:
            for name in sorted(now, key=_completes):
                if there.get(name) != now[name]:
                    self._put(name)
                    there[name] = now[name]
            for name in list(there.keys() - now.keys()):
                with suppress(FileNotFoundError):
                    self._store.rm_file(f"{self._path}/{name}")
                del there[name]
        finally:
            if now:
                self._note(there)

    def _put(self, name: str) -> None:
        try:
            self._store.makedirs(f"{self._path}/{name}".rpartition("/")[0], exist_ok=True)
            self._store.put_file(str(self.folder / name), f"{self._path}/{name}")
        except FileNotFoundError:
            if (self.folder / name).exists():  # else an old checkpoint, thinned out meanwhile
                raise

    def _wait(self, seconds: float) -> None:
        if self._thread:
            self._thread.join(seconds)
            if self._thread.is_alive():
                self._failed = TimeoutError(f"not done after {seconds:.0f} s")

    def _tell(self) -> None:
        if self._failed:
            said, self._failed = first_line(self._failed), None
            warnings.warn(f"{self.url} was not reached ({said}); all is in {self.folder}", stacklevel=3)

    def _note(self, files: dict[str, list[int]]) -> None:
        write_json(self.folder / MIRRORED, {"url": self.url, "files": files})

    def _states(self) -> dict[str, list[int]]:
        """Time and size of every file of the run; hidden ones are locks, and half-written."""
        found = {}
        for path in self.folder.rglob("*"):
            inner = path.relative_to(self.folder)
            if path.is_file() and not any(part.startswith(".") for part in inner.parts):
                with suppress(FileNotFoundError):  # an old checkpoint, thinned out meanwhile
                    stat = path.stat()
                    found[inner.as_posix()] = [stat.st_mtime_ns, stat.st_size]
        return found if "config.json" in found else {}


def mirrored(folder: Path) -> dict[str, Any]:
    """What a folder says of its copy in a store; nothing if it has none."""
    return read_object(folder / MIRRORED) if (folder / MIRRORED).exists() else {}


def push_back(folder: Path) -> None:
    """Copy what is new in a folder to the store that it came from, if it did."""
    if url := mirrored(folder).get("url"):
        with Mirror(url, folder):
            pass


def _completes(name: str) -> bool:
    """Whether a file goes last: a checkpoint counts once its state is there, and a run once its settings are."""
    return name.endswith(("state.json", "config.json"))


def _newest(names: Sequence[str]) -> tuple[bool, int, int]:
    """Whether the last whole checkpoint is of a run's last stage, its epoch and step: names sort up to 9,999 epochs."""
    found = (re.fullmatch(r"(first/)?checkpoints/epoch_(\d+)(?:_step_(\d+))?/state\.json", name) for name in names)
    return max(((not one[1], int(one[2]), int(one[3] or 0)) for one in found if one), default=(False, -1, 0))
