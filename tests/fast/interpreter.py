"""Kernels on the CPU: Triton's interpreter, and how far results are from an exact one."""

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

T = TypeVar("T")


def run_python(*arguments: str, **environment: str) -> str:
    """The output of a fresh interpreter that imports what this one does."""
    settings = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    done = subprocess.run([sys.executable, *arguments], env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def interpreted(work: Callable[[pytest.MonkeyPatch], T]) -> T:
    """What `work` returns where Triton interprets: here, or where there is a GPU in a process of its file."""
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        answer: T = json.loads(run_python(inspect.getfile(work), TRITON_INTERPRET="1"))
        return answer
    with pytest.MonkeyPatch.context() as patch:
        repair_interpreter(patch)
        return work(patch)


def print_json(work: Callable[[pytest.MonkeyPatch], object]) -> None:
    """What the file of `work` does as a script."""
    print(json.dumps(interpreted(work)))


def distance(got: Tensor, expected: Tensor) -> float:
    """The largest error in units of the largest element; infinite where anything is not a number."""
    error = ((got.double() - expected).abs().max() / expected.abs().max()).item()
    return error if error == error else float("inf")


def repair_interpreter(patch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies bfloat16 numbers by their bits and truncates to them; a GPU multiplies and rounds."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    product, convert = interpreter.InterpreterBuilder.create_dot, interpreter._convert_float

    def widened(handle: Any) -> Any:
        if handle.dtype != tl.bfloat16:
            return handle
        return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def rounded(data: Any, old: Any, new: Any, mode: Any) -> Any:
        if (old, new) != (tl.float32, tl.bfloat16):
            return convert(data, old, new, mode)
        return torch.from_numpy(data.copy()).bfloat16().view(torch.int16).numpy().view(np.uint16)

    def product_of_widened(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return product(self, widened(a), widened(b), *rest)

    patch.setattr(interpreter.InterpreterBuilder, "create_dot", product_of_widened)
    patch.setattr(interpreter, "_convert_float", rounded)
    _look_once(interpreter, patch)


def _look_once(interpreter: Any, patch: pytest.MonkeyPatch) -> None:
    """Every call of a function within a kernel looks through all of the language for what to replace: a third of all
    time. What there is to replace does not change.
    """
    from triton.language import core

    names: dict[Any, list[str]] = {}

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        if package not in names:
            names[package] = [name for name, member in inspect.getmembers(package) if core.is_builtin(member)]
        for name in names[package]:
            if core.is_builtin(member := getattr(package, name)):
                interpreter._patch_attr(package, name, member, builder, scope)

    patch.setattr(interpreter, "_patch_builtin", patch_builtin)
