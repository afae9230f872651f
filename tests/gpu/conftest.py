"""Tests on a real GPU, skipped where there is none; what they measure can be written to results/gpu-tests.md."""

import os
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

BEGAN = time.monotonic()
Within = Callable[[str, float, float], None]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of this folder needs a card."""
    for item in items:
        if "gpu" in Path(item.path).parts:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture
def assert_within(record_property: Callable[[str, Any], None]) -> Within:
    """Assert that a difference is within its bound, and keep both for the page."""

    def kept(what: str, difference: float, bound: float) -> None:
        record_property("difference", (what, float(difference), float(bound)))
        assert difference <= bound, f"{what}: {difference:.3g} is above {bound:.3g}"

    return kept


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Write the page that PMAE_GPU_REPORT names."""
    place = os.environ.get("PMAE_GPU_REPORT")
    if place and torch.cuda.is_available() and "PYTEST_XDIST_WORKER" not in os.environ:
        Path(place).write_text(page(terminalreporter.stats), encoding="utf-8")


def page(stats: dict[str, list[Any]]) -> str:
    """Card, versions, counts, seconds, and the largest difference of every kind."""
    done = [report for kind in ("passed", "failed") for report in stats.get(kind, []) if report.when == "call"]
    largest: dict[str, tuple[float, float]] = {}
    for report in done:
        for name, value in report.user_properties:
            if name == "difference":
                what, difference, bound = value
                if difference / bound >= largest.get(what, (-1.0, 1.0))[0] / largest.get(what, (0.0, 1.0))[1]:
                    largest[what] = difference, bound
    rows = [f"| {what} | {found:.2g} | {bound:.2g} |" for what, (found, bound) in sorted(largest.items())]
    failed = [f"- {report.nodeid}" for report in stats.get("failed", []) + stats.get("error", [])]
    counts = ", ".join(f"{len(stats.get(kind, []))} {kind}" for kind in ("passed", "failed", "error", "skipped"))
    versions = f"driver {driver()}, torch {torch.__version__}, Python {platform.python_version()}"
    about = f"{torch.cuda.get_device_name()}, {versions}"
    lines = ["# Tests on a GPU", "", "Written by `make test-gpu`.", "", f"{about}; commit {commit()}.", ""]
    lines += [f"{counts}; {time.monotonic() - BEGAN:.0f} s.", "", *(["Failed:", *failed, ""] if failed else [])]
    return "\n".join([*lines, "| what | largest difference | bound |", "|---|---|---|", *rows, ""])


def driver() -> str:
    """The version of the driver."""
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip().split("\n")[0] or "unknown"


def commit() -> str:
    """The commit that is tested: of the repository, or what the environment says where there is none."""
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return os.environ.get("PMAE_COMMIT") or asked.stdout.strip() or "unknown"
