"""Is this machine ready? Versions, devices, compiler, communication, memory and disk, in plain words.

Nothing leaves the machine and nothing here hangs: what might hang or crash is a probe, run in a process of its own with
a time limit (`python -m pmae.doctor NAME`), which answers with one line of JSON.
"""

import contextlib
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib import metadata
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

from packaging.requirements import Requirement
from rich.filesize import decimal

from pmae.data.decode import available_bytes
from pmae.errors import UserError

PATIENCE = {"devices": 120.0, "compiled": 240.0, "all_reduce": 90.0, "data": 300.0}
"""Seconds that each probe has; a slow disk and a busy machine included."""

Answer = dict[str, Any]
"""What a probe said, or why it said nothing, as `trouble`."""


class Finding(NamedTuple):
    """One line of the examination: how bad, about what, what was found and what to do."""

    level: Literal["ok", "warning", "problem"]
    subject: str
    words: str
    advice: str = ""


def examine(data: str | None = None, root: str = "data") -> Iterator[Finding]:
    """Every finding, as soon as it is there; with `data`, what training on that set needs."""
    yield Finding("ok", "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    yield from packages()
    answer = ask("devices")
    yield from devices(answer)
    free = [device["free"] for device in answer.get("devices", [])]
    yield compiler(on_gpu=bool(free))
    yield communication()
    if data is not None:
        yield from room(ask("data", data, root), free[0] if free else None)


def packages() -> Iterator[Finding]:
    """The packages that pmae always needs, against what it asks for, and its extras; a missing one is no fault."""
    needs = [Requirement(line) for line in metadata.requires("pmae") or []]
    wrong = _unmet([need for need in needs if need.marker is None])
    if wrong:
        yield Finding("problem", "packages", wrong, "pip install --upgrade pmae")
    else:
        shown = (f"{name} {metadata.version(name)}" for name in ("pmae", "torch", "torchvision", "timm"))
        yield Finding("ok", "packages", ", ".join(shown))
    for extra in metadata.metadata("pmae").get_all("Provides-Extra") or []:
        wrong = _unmet([need for need in needs if need.marker and need.marker.evaluate({"extra": extra})])
        advice = f"pip install 'pmae[{extra}]' if you want it" if wrong else ""
        yield Finding("ok", f"extra {extra}", f"not installed: {wrong}" if wrong else "installed", advice)


def _unmet(needs: list[Requirement]) -> str:
    wrong = []
    for need in needs:
        try:
            version = metadata.version(need.name)
            if not need.specifier.contains(version, prereleases=True):
                wrong.append(f"{need.name} {version} is not {need.specifier}")
        except metadata.PackageNotFoundError:
            wrong.append(f"{need.name} is missing")
    return "; ".join(wrong)


def devices(answer: Answer) -> Iterator[Finding]:
    """The GPUs and whether they know bfloat16, or the CPU."""
    if "trouble" in answer:
        yield Finding("problem", "devices", f"torch could not list them: {answer['trouble']}", "reinstall torch")
        return
    for number, device in enumerate(answer["devices"]):
        words = f"{device['name']}, {decimal(device['free'])} free"
        if device["capability"] >= 8:
            yield Finding("ok", f"cuda:{number}", f"{words}, bfloat16")
        else:
            yield Finding("warning", f"cuda:{number}", f"{words}, no bfloat16", "use --train.precision float32")
    if not answer["devices"]:
        yield _without_gpu(answer)


def _without_gpu(answer: Answer) -> Finding:
    why = ", for it has matrix units for that (AMX)" if answer["precision"] == "bfloat16" else ""
    words = f"no GPU that torch can use; CPU with {answer['threads']} threads, trains in {answer['precision']}{why}"
    if shutil.which("nvidia-smi") is None:
        return Finding("ok", "cpu", words, "small images train well here; large sets want a GPU")
    why = "this torch is built without CUDA" if answer["cuda"] is None else "its driver may be older than this torch"
    return Finding("warning", "cpu", f"{words}, though there is an NVIDIA driver: {why}", "install torch for your CUDA")


def compiler(on_gpu: bool) -> Finding:
    """Whether torch.compile works, and Triton is there; the fast engine on a GPU needs both."""
    triton = "Triton is there" if find_spec("triton") else "no Triton"
    with tempfile.TemporaryDirectory() as folder:
        # An empty cache, so that something is really compiled; one thread, so that no worker outlives it.
        fresh = {"TORCHINDUCTOR_CACHE_DIR": folder, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        answer = ask("compiled", "cuda" if on_gpu else "cpu", **fresh)
    if answer.get("same"):
        return Finding("ok", "compiler", f"torch.compile works; {triton}")
    words = f"torch.compile does not: {answer.get('trouble', 'it gives other numbers')}; {triton}"
    if on_gpu:
        return Finding("problem", "compiler", words, "use --train.engine plain, or install a C++ compiler and Triton")
    return Finding("warning", "compiler", words, "training on a CPU does without it")


def communication() -> Finding:
    """Two processes that add their numbers, as several GPUs do with gradients."""
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    answer = ask("all_reduce", **({"GLOO_SOCKET_IFNAME": loopback[0]} if loopback else {}))
    if "trouble" not in answer:
        return Finding("ok", "all-reduce", "two processes over Gloo agree")
    advice = "one process trains all the same; for several, see that a firewall lets 127.0.0.1 through"
    return Finding("problem", "all-reduce", f"two processes over Gloo do not agree: {answer['trouble']}", advice)


def room(answer: Answer, on_gpu: int | None) -> Iterator[Finding]:
    """The data set against memory, the device and the disk."""
    if "trouble" in answer:
        yield Finding("problem", "data", " ".join(answer["trouble"].split()), "see what --data names")
        return
    yield from (Finding("ok", "data", words) for words in answer["words"])
    memory = available_bytes()
    if answer["mapped"]:
        yield Finding("ok", "set", f"{decimal(answer['set'])}, read from disk as it is needed")
    else:
        yield _fits("set", answer["set"], memory, "memory", "save it as one .npy file, which is read from disk")
    if on_gpu is not None and answer["set"] > on_gpu // 2:
        words = "more than half of the GPU, so images wait on the host, which is slower"
        yield Finding("warning", "set", words, "use smaller images (--data.resize)")
    smaller = "use smaller images (--data.resize) or another --space"
    yield _fits("pca fit", answer["fit"], memory if on_gpu is None else on_gpu, "memory", smaller)
    yield _fits("disk", answer["disk"], shutil.disk_usage(".").free, "disk", "free some, or write to another --out")


def _fits(subject: str, need: int, free: int, where: str, advice: str) -> Finding:
    words = f"needs about {decimal(need)} of {where}, {decimal(free)} are free"
    return Finding("ok", subject, words) if need <= free else Finding("problem", subject, words, advice)


def ask(probe: str, *arguments: str, **environment: str) -> Answer:
    """Run a probe with extra environment variables, and end it with whatever it started."""
    command = [sys.executable, "-m", "pmae.doctor", probe, *arguments]
    # Into files: a pipe stays open as long as any grandchild lives, and reading it could wait for ever.
    with tempfile.TemporaryFile("w+", errors="replace") as out, tempfile.TemporaryFile("w+", errors="replace") as err:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err}
        process = subprocess.Popen(command, env=os.environ | environment, start_new_session=True, **streams)
        try:
            code = process.wait(PATIENCE[probe])
        except subprocess.TimeoutExpired:
            return {"trouble": f"no answer within {PATIENCE[probe]:g} s"}
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL) if hasattr(os, "killpg") else process.kill()
                process.wait()
        out.seek(0), err.seek(0)
        said, complaint = out.read().splitlines(), err.read().split("\n")
    if code == 0 and said:
        found: Answer = json.loads(said[-1])
        return found
    return {"trouble": next((line for line in reversed(complaint) if line), f"the process ended with code {code}")}


def probe_devices() -> Answer:
    """CUDA devices, as torch sees them, and what a CPU would train in."""
    import torch

    from pmae.train.environment import pick_precision

    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    free = [torch.cuda.mem_get_info(i)[0] for i in range(len(found))]
    rows = [{"name": p.name, "capability": p.major, "free": f} for p, f in zip(found, free, strict=True)]
    precision = str(pick_precision("auto", torch.device("cpu"))).removeprefix("torch.")
    return {"cuda": torch.version.cuda, "threads": torch.get_num_threads(), "precision": precision, "devices": rows}


def probe_compiler(device: str) -> Answer:
    """A tiny function through torch.compile, compared with itself uncompiled."""
    import torch

    x = torch.linspace(-1, 1, 64, device=device)
    small = torch.nn.Sequential(torch.nn.GELU(), torch.nn.Softmax(0))
    return {"same": bool(torch.allclose(torch.compile(small)(x), small(x)))}


def probe_all_reduce() -> Answer:
    """Two processes that add 1 and 2 over Gloo; they meet in a file, and talk over the loopback device."""
    from torch.multiprocessing.spawn import spawn

    with tempfile.TemporaryDirectory() as folder:
        spawn(_add, (f"file://{folder}/meeting",), nprocs=2)
    return {}


def _add(rank: int, where: str) -> None:
    import torch
    from torch import distributed

    value = torch.tensor([1.0 + rank])
    distributed.init_process_group("gloo", where, rank=rank, world_size=2, timeout=timedelta(seconds=30))
    distributed.all_reduce(value)
    distributed.destroy_process_group()
    if float(value) != 3.0:
        raise RuntimeError(f"1 and 2 make {float(value)}")


def probe_data(source: str, root: str) -> Answer:
    """Read a data set and measure what training on it with the default settings takes, in bytes."""
    import numpy as np
    import torch

    from pmae.config import Config, DataConfig
    from pmae.data.sets import load
    from pmae.derive import resolve
    from pmae.method import build_method
    from pmae.spaces import Pixels
    from pmae.spaces.pca import cost_of_exact

    splits = load(DataConfig(source=source, root=root))
    train, (channels, height, width) = splits.train, splits.train.shape
    config, _ = resolve(Config(), len(train), train.shape, gpu=torch.cuda.is_available())
    with torch.device("meta"):
        # A space without a basis: the networks are the same, and no memory is asked for.
        model = build_method(config, train.shape, Pixels(train.shape))
    weights, kept = (sum(p.numel() * 4 for p in part.parameters()) for part in (model, model.encoder))
    saved, size = (config.train.epochs or 1) // (config.train.checkpoint_every or 1), channels * height * width
    words = f"{splits.name}: {len(train):,} training images of {height}x{width}, {channels} channels"
    return {
        "words": [f"{words}, {train.images.dtype}", *splits.notes],
        "set": sum(part.images.nbytes for part in (train, splits.val, splits.test) if part is not None),
        "mapped": not isinstance(train.images, np.ndarray) or isinstance(train.images, np.memmap),
        "fit": cost_of_exact(0, size).bytes,
        # The basis; full checkpoints hold weights and two moments, the older ones the encoder alone.
        "disk": 4 * size * size + 3 * weights * config.train.keep + kept * saved,
    }


PROBES: dict[str, Callable[..., Answer]] = {
    "devices": probe_devices,
    "compiled": probe_compiler,
    "all_reduce": probe_all_reduce,
    "data": probe_data,
}

if __name__ == "__main__":
    try:
        print(json.dumps(PROBES[sys.argv[1]](*sys.argv[2:])))
    except UserError as error:
        sys.exit(str(error))
