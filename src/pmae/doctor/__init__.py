"""Is this machine ready? Versions, devices, compiler, communication, memory and disk, in plain words.

Nothing here hangs (whatever might is asked in a process with a time limit) and nothing leaves the machine.
"""

import functools
import platform
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

from packaging.requirements import Requirement
from rich.filesize import decimal

from pmae.data.decode import available_bytes
from pmae.doctor.probes import Answer, ask

PATIENCE = {"devices": 60.0, "compiled": 240.0, "all_reduce": 90.0, "data": 300.0}
"""Seconds that each probe has; a slow disk and a busy machine included."""


class Finding(NamedTuple):
    """One line of the examination: how bad, about what, what was found and what to do."""

    level: Literal["ok", "warning", "problem"]
    subject: str
    words: str
    advice: str = ""


def examine(data: str | None = None, root: str = "data") -> Iterator[Finding]:
    """Every finding, as soon as it is there; with `data`, what training on that set needs."""
    yield from versions()
    yield from extras()
    answer = ask("devices", seconds=PATIENCE["devices"])
    yield from devices(answer)
    on_gpu = bool(answer.values.get("devices"))
    yield compiler(on_gpu)
    yield communication()
    if data is not None:
        free = [device["free"] for device in answer.values.get("devices", [])]
        yield from room(ask("data", data, root, seconds=PATIENCE["data"]), free[0] if free else None)


def versions() -> Iterator[Finding]:
    """Python and the packages that pmae always needs, against what it asks for."""
    yield Finding("ok", "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    wrong = [_unmet(need) for need in _requirements() if need.marker is None and _unmet(need)]
    if wrong:
        yield Finding("problem", "packages", "; ".join(wrong), "pip install --upgrade pmae")
    else:
        shown = ", ".join(f"{name} {metadata.version(name)}" for name in ("pmae", "torch", "torchvision", "timm"))
        yield Finding("ok", "packages", shown)


def extras() -> Iterator[Finding]:
    """Which optional parts are installed; a missing one is no fault."""
    for extra in metadata.metadata("pmae").get_all("Provides-Extra") or []:
        needs = [need for need in _requirements() if need.marker and need.marker.evaluate({"extra": extra})]
        wrong = [_unmet(need) for need in needs if _unmet(need)]
        words = f"not installed: {'; '.join(wrong)}" if wrong else "installed"
        yield Finding("ok", f"extra {extra}", words, f"pip install 'pmae[{extra}]' if you want it" if wrong else "")


def _requirements() -> list[Requirement]:
    return [Requirement(line) for line in metadata.requires("pmae") or []]


def _unmet(need: Requirement) -> str:
    """What is wrong with a required package, or nothing."""
    try:
        version = metadata.version(need.name)
    except metadata.PackageNotFoundError:
        return f"{need.name} is missing"
    fits = need.specifier.contains(version, prereleases=True)
    return "" if fits else f"{need.name} {version} is not {need.specifier}"


def devices(answer: Answer) -> Iterator[Finding]:
    """The GPUs and whether they know bfloat16, or the CPU."""
    if answer.trouble:
        yield Finding("problem", "devices", f"torch could not list them: {answer.trouble}", "reinstall torch")
        return
    for number, device in enumerate(answer.values["devices"]):
        words = f"{device['name']}, {decimal(device['free'])} free"
        if device["capability"] >= 8:
            yield Finding("ok", f"cuda:{number}", f"{words}, bfloat16")
        else:
            yield Finding("warning", f"cuda:{number}", f"{words}, no bfloat16", "use --train.precision float32")
    if not answer.values["devices"]:
        yield _without_gpu(answer.values)


def _without_gpu(values: dict[str, Any]) -> Finding:
    why = ", for it has matrix units for that (AMX)" if values["precision"] == "bfloat16" else ""
    words = f"no GPU that torch can use; CPU with {values['threads']} threads, trains in {values['precision']}{why}"
    if shutil.which("nvidia-smi") is None:
        return Finding("ok", "cpu", words, "small images train well here; large sets want a GPU")
    why = "this torch is built without CUDA" if values["cuda"] is None else "its driver may be older than this torch"
    return Finding("warning", "cpu", f"{words}, though there is an NVIDIA driver: {why}", "install torch for your CUDA")


def compiler(on_gpu: bool) -> Finding:
    """Whether torch.compile works, and Triton is there; the fast engine on a GPU needs both."""
    triton = "Triton is there" if find_spec("triton") else "no Triton"
    with tempfile.TemporaryDirectory() as folder:
        # An empty cache, so that something is really compiled; one thread, so that no worker outlives it.
        fresh = {"TORCHINDUCTOR_CACHE_DIR": folder, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        answer = ask("compiled", "cuda" if on_gpu else "cpu", seconds=PATIENCE["compiled"], **fresh)
    if answer.values.get("same"):
        return Finding("ok", "compiler", f"torch.compile works ({answer.values['seconds']:.0f} s); {triton}")
    words = f"torch.compile does not: {answer.trouble or 'it gives other numbers'}; {triton}"
    if on_gpu:
        return Finding("problem", "compiler", words, "use --train.engine plain, or install a C++ compiler and Triton")
    return Finding("warning", "compiler", words, "training on a CPU does without it")


def communication() -> Finding:
    """Two processes that add their numbers, as several GPUs do with gradients."""
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    environment = {"GLOO_SOCKET_IFNAME": loopback[0]} if loopback else {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        one = functools.partial(ask, "all_reduce", seconds=PATIENCE["all_reduce"], **environment)
        answers = list(pool.map(one, ("0", "1"), (folder, folder)))
    if all(answer.values.get("sum") == 3.0 for answer in answers):
        seconds = max(answer.values["seconds"] for answer in answers)
        return Finding("ok", "all-reduce", f"two processes over Gloo agree after {seconds:.1f} s")
    trouble = next((answer.trouble for answer in answers if answer.trouble), "they disagree")
    advice = "one process trains all the same; for several, see that a firewall lets 127.0.0.1 through"
    return Finding("problem", "all-reduce", f"two processes over Gloo do not agree: {trouble}", advice)


def room(answer: Answer, on_gpu: int | None) -> Iterator[Finding]:
    """The data set against memory, the device and the disk."""
    found = answer.values
    if answer.trouble:
        yield Finding("problem", "data", re.sub(r"\s+", " ", answer.trouble), "see what --data names")
        return
    channels, height, width = found["shape"]
    words = f"{found['name']}: {found['images']:,} training images of {height}x{width}, {channels} channels"
    yield Finding("ok", "data", f"{words}, {found['dtype']}")
    yield from (Finding("ok", "data", note) for note in found["notes"])
    memory = available_bytes()
    if found["mapped"]:
        yield Finding("ok", "set", f"{decimal(found['set'])}, read from disk as it is needed")
    else:
        yield _fits("set", found["set"], memory, "memory", "save it as one .npy file, which is read from disk")
    if on_gpu is not None and found["set"] > on_gpu // 2:
        words = "more than half of the GPU, so images wait on the host, which is slower"
        yield Finding("warning", "set", words, "use smaller images (--data.resize)")
    smaller = "use smaller images (--data.resize) or another --space"
    yield _fits("pca fit", found["fit"], memory if on_gpu is None else on_gpu, "memory", smaller)
    yield _fits("disk", found["disk"], shutil.disk_usage(".").free, "disk", "free some, or write to another --out")


def _fits(subject: str, need: int, free: int, where: str, advice: str) -> Finding:
    words = f"needs about {decimal(need)} of {where}, {decimal(free)} are free"
    return Finding("ok", subject, words) if need <= free else Finding("problem", subject, words, advice)
