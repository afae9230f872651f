"""Questions that may hang or crash a process, each asked in one of its own: `python -m pmae.doctor.probes NAME`.

A probe answers with one line of JSON. `ask` waits for it so long and no longer, then ends the process and its children.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple


class Answer(NamedTuple):
    """What a probe said, or why it said nothing."""

    values: dict[str, Any]
    trouble: str = ""


def ask(probe: str, *arguments: str, seconds: float, **environment: str) -> Answer:
    """Run a probe with extra environment variables for at most so many seconds."""
    command = [sys.executable, "-m", "pmae.doctor.probes", probe, *arguments]
    # Into files: a pipe stays open as long as any grandchild lives, and reading it could wait for ever.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        variables = os.environ | environment
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=variables, start_new_session=True
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return Answer({}, f"no answer within {seconds:g} s")
        finally:
            _end(process)
        said, complaint = (_lines(file) for file in (out, err))
    if code == 0 and said:
        return Answer(json.loads(said[-1]))
    return Answer({}, complaint[-1] if complaint else f"the process ended with code {code}")


def _lines(file: Any) -> list[str]:
    file.seek(0)
    return [line for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and whatever it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL) if hasattr(os, "killpg") else process.kill()
        process.wait()


def devices() -> dict[str, Any]:
    """CUDA devices, as torch sees them, and what a CPU would train in."""
    import torch

    from pmae.train.environment import pick_precision

    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    free = [torch.cuda.mem_get_info(i)[0] for i in range(len(found))]
    rows = [{"name": p.name, "capability": p.major, "free": f} for p, f in zip(found, free, strict=True)]
    precision = str(pick_precision("auto", torch.device("cpu"))).removeprefix("torch.")
    known = {"cuda": torch.version.cuda, "threads": torch.get_num_threads(), "precision": precision}
    return {**known, "devices": rows}


def compiled(device: str) -> dict[str, Any]:
    """A tiny function through torch.compile, compared with itself uncompiled."""
    import torch

    began = time.monotonic()
    x = torch.linspace(-1, 1, 64, device=device)
    small = torch.nn.Sequential(torch.nn.GELU(), torch.nn.Softmax(0))
    made = torch.compile(small)(x)
    return {"same": bool(torch.allclose(made, small(x))), "seconds": time.monotonic() - began}


def all_reduce(rank: str, folder: str) -> dict[str, Any]:
    """One of two processes that add 1 and 2 over Gloo; they meet in a file, and talk over the loopback device."""
    from datetime import timedelta

    import torch
    from torch import distributed

    began = time.monotonic()
    where, patience = f"file://{folder}/meeting", timedelta(seconds=30)
    distributed.init_process_group("gloo", init_method=where, rank=int(rank), world_size=2, timeout=patience)
    value = torch.tensor([1.0 + int(rank)])
    distributed.all_reduce(value)
    distributed.destroy_process_group()
    return {"sum": float(value), "seconds": time.monotonic() - began}


def data(source: str, root: str) -> dict[str, Any]:
    """Read a data set and measure what training on it with the default settings takes, in bytes."""
    import numpy as np
    import torch

    from pmae.config import Config, DataConfig
    from pmae.data.sets import load
    from pmae.derive import resolve
    from pmae.method import build_method
    from pmae.models import build_encoder
    from pmae.spaces import Pixels
    from pmae.spaces.pca import cost_of_exact

    splits = load(DataConfig(source=source, root=root))
    shape, parts = splits.train.shape, (splits.train, splits.val, splits.test)
    config, _ = resolve(Config(), len(splits.train), shape, gpu=torch.cuda.is_available())
    with torch.device("meta"):
        # A space without a basis: the networks are the same, and no memory is asked for.
        model = build_method(config, shape, Pixels(shape))
        encoder = build_encoder(config.encoder, shape)
    size = shape[0] * shape[1] * shape[2]
    weights, kept = (sum(p.numel() * 4 for p in part.parameters()) for part in (model, encoder))
    epochs, every = config.train.epochs or 1, config.train.checkpoint_every or 1
    return {
        "name": splits.name,
        "images": len(splits.train),
        "shape": shape,
        "dtype": str(splits.train.images.dtype),
        "set": sum(part.images.nbytes for part in parts if part is not None),
        "mapped": not isinstance(splits.train.images, np.ndarray) or isinstance(splits.train.images, np.memmap),
        "fit": cost_of_exact(0, size).bytes,
        # The basis; full checkpoints hold weights and two moments, the older ones the encoder alone.
        "disk": 4 * size * size + 3 * weights * config.train.keep + kept * (epochs // every),
        "notes": splits.notes,
    }


PROBES: dict[str, Callable[..., dict[str, Any]]] = {
    probe.__name__: probe for probe in (devices, compiled, all_reduce, data)
}

if __name__ == "__main__":
    from pmae.errors import UserError

    try:
        print(json.dumps(PROBES[sys.argv[1]](*sys.argv[2:])))
    except UserError as error:
        sys.exit(str(error))
