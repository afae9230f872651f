"""What was measured as plain data, ready for a file."""

import statistics
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from benchmarks import machine
from benchmarks.contest import Row
from benchmarks.grow import Point
from benchmarks.peers import PEERS
from benchmarks.profile import Profile

Record = dict[str, Any]


def of_row(row: Row, limit: float) -> Record:
    """One line of the comparison; what was not measured is None."""
    speed, peer = row.images_per_second, row.best_peer
    return {
        "size": row.work.side,
        "method": row.work.method,
        "system": row.system if row.system in PEERS else f"ours, {row.system}",
        **_pace(row, limit),
        "warm_up_seconds": row.warm_up or None,
        "of_best_peer": speed / peer if speed and peer else None,
        "note": row.note,
        "rounds_ms": [1e3 * seconds for seconds in row.step_seconds],
    }


def of_point(point: Point, limit: float) -> Record:
    """One line of how cost grows."""
    row = point.row
    record = {"axis": point.axis, "value": point.value, "method": row.work.method, "system": f"ours, {row.system}"}
    return {**record, **_pace(row, limit), "warm_up_seconds": row.warm_up or None, "note": row.note}


def of_profile(row: Row, profile: Profile | None) -> list[Record]:
    """The lines of a profile, a step without it last; or one that says why there is none."""
    known = {"size": row.work.side, "method": row.work.method, "system": f"ours, {row.system}"}
    if profile is None:
        return [{**known, "note": row.note}]
    groups = [
        {"group": s.group, "ms_per_step": s.milliseconds, "share": s.share, "launches": s.launches}
        for s in profile.shares
    ]
    return [{**known, **group} for group in [*groups, {"group": "a step alone", "ms_per_step": profile.alone}]]


def about(device: torch.device, limit: float, **settings: Any) -> Record:
    """Device, its limit and the versions that took part."""
    packages = {name: _version(name) for name in ("pmae", "torch", "torchvision", "timm", *PEERS)}
    described = {"device": machine.name_of(device), "limit_tflops": limit / 1e12, "packages": packages}
    return {**described, **settings}


def _pace(row: Row, limit: float) -> Record:
    measured = bool(row.step_seconds)
    return {
        "images_per_second": row.images_per_second if measured else None,
        "ms_per_step": 1e3 * statistics.median(row.step_seconds) if measured else None,
        "tflops": row.flops_per_second / 1e12 if measured else None,
        "share_of_limit": row.flops_per_second / limit if measured else None,
        "peak_mib": row.peak / 2**20 if measured else None,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
