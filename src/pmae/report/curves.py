"""Learning curves as plain numbers, for the scripts of the report and of the live page."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from pmae.report.charts import LOGGED, LOWEST_R2, PROBES, probed_on
from pmae.report.contents import Contents
from pmae.report.style import DASHES, PALETTE

MOST = 150  # points of a curve: more than a panel has room for


def curve_data(runs: Sequence[Contents]) -> dict[str, Any]:
    """Runs with their colours and dashes, and panels with one series a run; percentages where they are shares."""
    looks = [
        {"name": run.name, "color": PALETTE[i % len(PALETTE)], "dash": i // len(PALETTE) % len(DASHES)}
        for i, run in enumerate(runs)
    ]
    measured = " or ".join(sorted({run.measured_on for run in runs}))
    loss = [_series(run, run.training, "loss") for run in runs]
    values = [value for one in loss for value in one["y"]]
    steep = bool(values) and min(values) > 0 and max(values) > 10 * min(values)
    r2 = [_series(run, run.training, "r2", 100, faint=True) for run in runs]
    r2 += [_series(run, run.signals, run.r2_name, 100) for run in runs]
    made: list[dict[str, Any]] = [
        {"title": "Training loss", "log": steep, "series": loss},
        {"title": f"R² on {measured}, % (thin: in training)", "least": LOWEST_R2, "series": r2},
    ]
    kinds = {
        key for run in runs for line in run.signals for key, value in line.items() if isinstance(value, int | float)
    }
    probed = " or ".join(sorted({probed_on(run) for run in runs}))
    for key in sorted(kinds - LOGGED, key=lambda key: (key not in PROBES, key)):
        if not key.startswith("r2_band_"):
            title = f"{PROBES[key]} on the {probed}, %" if key in PROBES else key.replace("_", " ").capitalize()
            made.append(
                {
                    "title": title,
                    "series": [_series(run, run.signals, key, 100 if key in PROBES else 1) for run in runs],
                }
            )
    speed = [_series(run, run.training, "images_per_second") for run in runs]
    made.append({"title": "Images a second", "series": speed})
    return {"runs": looks, "panels": [one for one in made if any(series["x"] for series in one["series"])]}


def _series(
    run: Contents, lines: Sequence[dict[str, Any]], key: str, times: float = 1, faint: bool = False
) -> dict[str, Any]:
    known = [(line["epoch"], times * line[key]) for line in lines if line.get(key) is not None]
    known = [pair for pair in known if np.isfinite(pair).all()]
    kept = [known[i] for i in np.linspace(0, len(known) - 1, min(MOST, len(known))).round().astype(int)]
    values = {"x": [round(x, 3) for x, _ in kept], "y": [float(f"{y:.4g}") for _, y in kept]}
    return {"run": run.name, **values, **({"faint": True} if faint else {})}
