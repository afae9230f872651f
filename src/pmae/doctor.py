"""Is this machine ready? Versions, devices, compiler, memory and disk, in plain words.

Nothing leaves the machine and nothing here hangs: what might hang or crash is a check, run in a process of its own with
a time limit (`python -m pmae.doctor NAME`), which answers with its findings as JSON.
"""

import contextlib
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from packaging.requirements import Requirement
from rich.filesize import decimal

from pmae.errors import UserError
from pmae.system import available_bytes, end_family

if TYPE_CHECKING:  # torch is slow to import, and the first lines need none
    from pmae.config import Config
    from pmae.data.images import Splits
    from pmae.method import MaskedAutoencoder

KEPT_ON_CPU, COPIES_ON_CPU = 1.3, 11
"""What a step on a CPU holds: so many times what the networks keep for the backward pass, as gradients come to it, and
so many times the image's own numbers (crops, components, masks, errors, their gradients); as measured for sides of 32
to 224, within a sixth."""


REFUSED = 2
"""The exit code of a check that a user's mistake ends, as everywhere."""


class Finding(NamedTuple):
    """One line of the examination: how bad, about what, what was found and what to do."""

    level: Literal["ok", "warning", "problem"]
    subject: str
    words: str
    advice: str = ""


def examine(
    data: str | None = None, root: str = "data", encoder: str = "vit_tiny", resize: int | None = None
) -> Iterator[Finding]:
    """Every finding, as soon as it is there; with `data`, what training an encoder on that set needs."""
    yield Finding("ok", "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    yield from packages()
    devices = ask("devices")
    yield from devices
    if any(finding.subject.startswith("cuda") for finding in devices):
        with tempfile.TemporaryDirectory() as folder:
            # An empty cache, so that something is really compiled; one thread, so that no worker outlives it.
            yield from ask("compiler", TORCHINDUCTOR_CACHE_DIR=folder, TORCHINDUCTOR_COMPILE_THREADS="1")
    if data is not None:
        yield from ask("data", data, root, encoder, *([] if resize is None else [str(resize)]))


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


def ask(name: str, *arguments: str, **environment: str) -> list[Finding]:
    """Run a check with extra environment variables, and end it with whatever it started."""
    check = CHECKS[name]
    command = [sys.executable, "-m", "pmae.doctor", name, *arguments]
    # Into files: a pipe stays open as long as any grandchild lives, and reading it could wait for ever.
    with tempfile.TemporaryFile("w+", errors="replace") as out, tempfile.TemporaryFile("w+", errors="replace") as err:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err}
        process = subprocess.Popen(command, env=os.environ | environment, start_new_session=True, **streams)
        try:
            code = process.wait(check.seconds)
        except subprocess.TimeoutExpired:
            return [Finding("problem", name, f"no answer within {check.seconds:g} s", check.advice)]
        finally:
            with contextlib.suppress(ProcessLookupError):
                end_family(process)
                process.wait()
        out.seek(0), err.seek(0)
        said, complaint = out.read().splitlines(), err.read().split("\n")
    if code == 0 and said:
        return [Finding(*found) for found in json.loads(said[-1])]
    trouble = next((line for line in reversed(complaint) if line), f"the process ended with code {code}")
    # A UserError is whole: it tells the rule that the value breaks.
    return [Finding("problem", name, " ".join(trouble.split()), "" if code == REFUSED else check.advice)]


def check_devices() -> Iterator[Finding]:
    """The GPUs and whether they know bfloat16, or the CPU and what it trains in."""
    import torch

    from pmae.train.environment import pick_precision

    for number in range(torch.cuda.device_count()):
        device, (free, _) = torch.cuda.get_device_properties(number), torch.cuda.mem_get_info(number)
        words = f"{device.name}, {decimal(free)} free"
        if device.major >= 8:
            yield Finding("ok", f"cuda:{number}", f"{words}, bfloat16")
        else:
            yield Finding("warning", f"cuda:{number}", f"{words}, no bfloat16", "use --train.precision float32")
    if torch.cuda.device_count():
        return
    precision = pick_precision("auto", torch.device("cpu"))
    words = f"no GPU that torch can use; CPU with {torch.get_num_threads()} threads, "
    words += f"trains in {str(precision).removeprefix('torch.')}"
    words += ", for it has matrix units for that (AMX)" if precision == torch.bfloat16 else ""
    if shutil.which("nvidia-smi") is None:
        yield Finding("ok", "cpu", words, "small images train well here; large sets want a GPU")
        return
    older = "its driver may be older than this torch"
    why = "this torch is built without CUDA" if torch.version.cuda is None else older
    words += f", though there is an NVIDIA driver: {why}"
    yield Finding("warning", "cpu", words, "install torch for your CUDA")


def check_compiler() -> Iterator[Finding]:
    """A tiny function through torch.compile, compared with itself uncompiled; long runs on a GPU are compiled."""
    import torch

    x = torch.linspace(-1, 1, 64, device="cuda" if torch.cuda.is_available() else "cpu")
    small = torch.nn.Sequential(torch.nn.GELU(), torch.nn.Softmax(0))
    if not torch.allclose(torch.compile(small)(x), small(x)):
        raise RuntimeError("torch.compile gives other numbers")
    triton = "Triton is there" if find_spec("triton") else "no Triton"
    yield Finding("ok", "compiler", f"torch.compile works; {triton}")


def check_data(source: str, root: str, encoder: str = "vit_tiny", resize: str | None = None) -> Iterator[Finding]:
    """What training an encoder with the default settings takes, against memory, the device and the disk."""
    import torch

    from pmae.config import Config, DataConfig, replace
    from pmae.data.crops import plan_crops
    from pmae.data.sets import load_settled
    from pmae.derive import resolve
    from pmae.spaces import build_space

    _, splits = load_settled(DataConfig(source, root, resize=int(resize) if resize else None))
    gpu = torch.cuda.is_available()
    train, (channels, height, width) = splits.train, splits.train.shape
    words = f"{splits.name}: {len(train):,} training images of {height}x{width}, {channels} channels"
    for told in (f"{words}, {train.images.dtype}", *splits.notes):
        yield Finding("ok", "data", told)
    memory = torch.cuda.mem_get_info()[0] if gpu else available_bytes()
    yield from _check_set(splits, memory, gpu)
    seen = (train.shape, train.vectors, gpu, train.images.dtype.name)
    config, _ = resolve(replace(Config(), encoder__name=encoder), len(train), *seen)
    if plan := plan_crops(train, config, torch.device("cuda" if gpu else "cpu")):
        yield Finding("ok", "crops", str(plan))
    with torch.device("meta"):  # no memory is asked for
        space = build_space(config.space, train.shape)
    basis, advice = sum(4 * b.numel() for b in space.buffers()), "use smaller images (--data.resize) or another --space"
    yield _fits(f"{config.space.name} fit", space.fit_cost(len(train)).bytes, memory, "memory", advice)
    yield from _check_training(config, train.shape, memory, basis, gpu)


def _check_set(splits: "Splits", memory: int, gpu: bool) -> Iterator[Finding]:
    """Whether the images fit where they are to wait."""
    import numpy as np

    images = splits.train.images
    whole = sum(part.images.nbytes for part in splits.parts.values())
    if not isinstance(images, np.ndarray) or isinstance(images, np.memmap):
        yield Finding("ok", "set", f"{decimal(whole)}, read from disk as it is needed")
    else:
        yield _fits("set", whole, available_bytes(), "memory", "save it as one .npy file, which is read from disk")
    if gpu and whole > memory // 2:
        words = "more than half of the GPU, so images wait on the host, which is slower"
        yield Finding("warning", "set", words, "use smaller images (--data.resize)")


def _check_training(
    config: "Config", shape: tuple[int, int, int], memory: int, basis: int, gpu: bool
) -> Iterator[Finding]:
    """The memory of a step and the disk of a run."""
    import torch

    from pmae.method import build_method
    from pmae.spaces import Pixels
    from pmae.train.environment import pick_precision

    # A space without a basis: the networks are the same.
    model = build_method(config, shape, Pixels(shape)).train()
    model.precision = pick_precision(config.train.precision, torch.device("cuda" if gpu else "cpu"))
    views, batch = 2 if model.contrastive else 1, config.train.batch_size or 1
    image = view_bytes(model, shape, gpu)
    weights, kept = (sum(p.numel() * 4 for p in part.parameters()) for part in (model, model.encoder))
    # Weights, gradients and the two moments of AdamW.
    need = basis + 4 * weights + views * batch * image
    local = f" with {config.objective.local_views} local ones" if config.objective.local_views else ""
    each = f"{views} view{'s' * (views > 1)}{local}"
    told = f"{config.encoder.name}, batches of {batch}, {each} of {decimal(image)} each: "
    parts = "" if views > 1 else " or --train.accumulate,"  # a contrastive loss needs its batch whole
    advice = f"use a smaller --batch-size,{parts} or --train.activation-checkpointing"
    found = _fits("training", need, memory, "memory", advice)
    yield found._replace(words=told + found.words)
    saved = (config.train.epochs or 1) // (config.train.checkpoint_every or 1)
    # The basis; full checkpoints hold weights and two moments, the older ones the encoder alone.
    disk = basis + 3 * weights * config.train.keep + kept * saved
    yield _fits("disk", disk, shutil.disk_usage(".").free, "disk", "free some, or write to another --out")


def view_bytes(model: "MaskedAutoencoder", shape: tuple[int, int, int], gpu: bool) -> int:
    """The memory of a step for each view of an image, beside weights and their gradients."""
    local = model.contrastive.windows if model.contrastive and model.config.objective.local_views else None
    model.contrastive = None  # it compares images, so a batch of them costs other than its images one by one
    kept = (saved_bytes(model, shape, 3, local) - saved_bytes(model, shape, 1, local)) // 2
    return kept if gpu else int(KEPT_ON_CPU * kept + COPIES_ON_CPU * 4 * math.prod(shape))


def saved_bytes(
    model: "MaskedAutoencoder", shape: tuple[int, int, int], images: int, local: Callable[[Any], object] | None = None
) -> int:
    """What a forward pass of so many images keeps for the backward pass, beside the weights; it is run, on the CPU."""
    import torch

    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    draw = model.draw(images, float(model.ratio), torch.Generator().manual_seed(0))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(x := torch.randn(images, *shape), draw)
        if local:
            local(x)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def _fits(subject: str, need: int, free: int, where: str, advice: str) -> Finding:
    words = f"needs about {decimal(need)} of {where}, {decimal(free)} are free"
    return Finding("ok", subject, words) if need <= free else Finding("problem", subject, words, advice)


class Check(NamedTuple):
    """What runs in a process of its own, for how many seconds at most, and what to do where it gives no answer."""

    run: Callable[..., Iterator[Finding]]
    seconds: float
    advice: str


CHECKS = {
    "devices": Check(check_devices, 120, "reinstall torch"),
    "compiler": Check(check_compiler, 240, "use --train.engine graph or plain, or install a C++ compiler and Triton"),
    "data": Check(check_data, 300, "see what --data names"),
}
"""A slow disk and a busy machine included."""

if __name__ == "__main__":
    try:
        print(json.dumps(list(CHECKS[sys.argv[1]].run(*sys.argv[2:]))))
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(REFUSED)
