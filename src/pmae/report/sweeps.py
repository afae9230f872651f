"""What many runs leave: pages of tables and figures; of a sweep, which of its settings validation prefers."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pmae.files import disk_errors, write_text
from pmae.report.style import PALETTE, Drawing, color, panels, save_drawing, short, styled
from pmae.report.tables import Cell, Table, to_csv, to_markdown
from pmae.runs import Run

MARKERS = "os^DvPX*"
HOW = (
    "Validation is the linear probe that pretraining ends with (logistic regression on mean-pooled features), on the "
    "val split or, without one, on a fifth of the training images. R2 is of held-out images, if there are any; no "
    "test label is used."
)


@dataclass(frozen=True)
class Page:
    """Tables and figures that belong together; the first table is what a terminal shows."""

    tables: list[Table] = field(default_factory=list)
    drawings: list[Drawing] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def write_page(name: str, heading: str, page: Page, folder: Path) -> list[Path]:
    """One Markdown file with everything, a CSV file a table, and PNG and SVG of the figures; returns their paths."""
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    paths = [write_text(folder / f"{table.name}.csv", to_csv(table)) for table in page.tables]
    for drawing in page.drawings:
        paths += [save_drawing(drawing, folder / f"{drawing.name}.{kind}") for kind in ("png", "svg")]
    parts = [f"## {heading}\n", *map(to_markdown, page.tables)]
    parts += [f"![{drawing.title}]({drawing.name}.png)\n\n{drawing.caption}\n" for drawing in page.drawings]
    parts += ["\n".join(f"- {note}" for note in page.notes) + "\n"] if page.notes else []
    return [write_text(folder / f"{name}.md", "\n".join(parts)), *paths]


@dataclass(frozen=True)
class Trial:
    """One combination of settings over its seeds; accuracies in percent, None without labels."""

    settings: dict[str, str]
    validation: float | None
    spread: float | None
    """Standard deviation of the validation accuracy between seeds of pretraining."""
    knn: float | None
    r2: float | None
    effective_rank: float | None
    speed: float | None
    runs: tuple[str, ...]
    stopped: int | None = None
    """The epoch after which a search gave it up; None if it came to its end."""

    @property
    def name(self) -> str:
        """`encoder.patch_size=4, decoder.depth=2`."""
        return ", ".join(f"{name}={value}" for name, value in self.settings.items())


def trial_of(settings: Mapping[str, str], runs: Sequence[Run]) -> Trial:
    """What the runs of one combination say when they end."""
    ends = [run.results.get("pretrain", {}) for run in runs]
    speeds = [line["images_per_second"] for run in runs for line in run.metrics() if "images_per_second" in line]
    linear = [100 * end["linear"] for end in ends if end.get("linear") is not None]
    return Trial(
        dict(settings),
        validation=statistics.fmean(linear) if linear else None,
        spread=statistics.stdev(linear) if len(linear) > 1 else None,
        knn=_mean(ends, "knn", 100),
        r2=_mean([{"r2": end.get("held_out_r2", end.get("train_r2"))} for end in ends], "r2"),
        effective_rank=_mean(ends, "effective_rank"),
        speed=statistics.median(speeds) if speeds else None,
        runs=tuple(run.path.name for run in runs),
        stopped=_stopped(runs),
    )


def best_of(trials: Sequence[Trial]) -> list[Trial]:
    """The trials with the best validation accuracy, as it is shown, of those that ended: several where they tie."""
    ended = [trial for trial in trials if trial.validation is not None and trial.stopped is None]
    best = max((trial.validation or 0.0 for trial in ended), default=0.0)
    return [trial for trial in ended if f"{trial.validation:.1f}" == f"{best:.1f}"]


def verdict(trials: Sequence[Trial]) -> str:
    """The best settings in one sentence, all of them if they tie, or why there are none."""
    best = best_of(trials)
    if not best:
        return (
            "The data has no labels, so nothing says which settings are best: R2 does not compare between ratios or "
            "spaces. Give a small labelled set with --set probe.data=NAME."
        )
    stopped = sum(trial.stopped is not None for trial in trials)
    early = f" {stopped} of {len(trials)} were stopped early." if stopped else ""
    if len(best) > 1:
        return (
            f"Tied for the best by validation: {' and '.join(t.name for t in best)} ({best[0].validation:.1f}%).{early}"
        )
    return f"The best by validation is {best[0].name} ({best[0].validation:.1f}%).{early}"


def sweep_page(trials: Sequence[Trial]) -> Page:
    """Table, plot and verdict."""
    drawings = [sweep_plot(trials)] if any(trial.validation is not None for trial in trials) else []
    return Page([sweep_table(trials)], drawings, [verdict(trials)])


def sweep_table(trials: Sequence[Trial]) -> Table:
    """A row a combination of settings."""
    names, early = list(trials[0].settings), any(trial.stopped is not None for trial in trials)
    rows: list[list[Cell]] = []
    for trial in trials:
        rank = None if trial.effective_rank is None else float(trial.effective_rank)
        scores: list[Cell] = [trial.validation, trial.spread, trial.knn, _three(trial.r2), rank]
        speed = None if trial.speed is None else round(trial.speed)
        ends: list[Cell] = [trial.stopped] if early else []
        rows.append([*(trial.settings[name] for name in names), *scores, *ends, speed, " ".join(trial.runs)])
    header = [*names, "validation %", "± seeds", "k-NN %", "R2", "effective rank"]
    header += [*["stopped at epoch"] * early, "images/s", "runs"]
    return Table("sweep", f"Sweep over {' and '.join(names)}", header, rows, HOW)


@styled
def sweep_plot(trials: Sequence[Trial]) -> Drawing:
    """Validation accuracy against the first setting, a line for each combination of the others; a ring is the best."""
    first, *others = trials[0].settings
    values = list(dict.fromkeys(trial.settings[first] for trial in trials))
    place = _places(values)
    figure, (axes,) = panels((2.9,))
    lines: dict[str, list[Trial]] = {}
    for trial in trials:
        lines.setdefault(", ".join(f"{name}={trial.settings[name]}" for name in others), []).append(trial)
    for position, (label, line) in enumerate(lines.items()):
        known = sorted((t for t in line if t.validation is not None), key=lambda t: place[t.settings[first]])
        ended, stopped = [t for t in known if t.stopped is None], [t for t in known if t.stopped is not None]
        x, y = [place[t.settings[first]] for t in ended], [t.validation or 0.0 for t in ended]
        look: dict[str, Any] = {"color": color(position), "marker": MARKERS[position % len(MARKERS)], "markersize": 4.5}
        axes.errorbar(x, y, [t.spread or 0.0 for t in ended], label=short(label, 44), elinewidth=1, **look)
        # Hollow and apart: an accuracy of an earlier epoch is not one to compare with.
        hollow = look | {"linestyle": "none", "markerfacecolor": "none"}
        axes.plot([place[t.settings[first]] for t in stopped], [t.validation or 0.0 for t in stopped], **hollow)
    for best in best_of(trials):
        ring: dict[str, Any] = {"markersize": 12, "markerfacecolor": "none", "markeredgecolor": PALETTE[3]}
        axes.plot(place[best.settings[first]], best.validation or 0.0, "o", **ring)
    axes.set_xticks([place[value] for value in values], labels=[short(value, 12) for value in values])
    axes.set(xlabel=first, title="Linear probe on validation images (%)")
    if others:
        figure.legend(loc="outside lower center", ncols=1)
    early = " Hollow: stopped early." if any(trial.stopped is not None for trial in trials) else ""
    return Drawing("sweep", f"Sweep over {first}", f"{verdict(trials)} {HOW}{early}", figure)


def _places(values: Sequence[str]) -> dict[str, float]:
    """Where values stand on the axis: at their number if all are numbers, else one after the other."""
    try:
        return {value: float(value) for value in values}
    except ValueError:
        return {value: float(position) for position, value in enumerate(values)}


def _stopped(runs: Sequence[Run]) -> int | None:
    """The earliest epoch at which one of the runs stands before its end."""
    reached = [(run.results.get("pretrain", {}).get("epoch"), run.config.train.epochs) for run in runs]
    return min((int(epoch) for epoch, last in reached if epoch is not None and epoch != last), default=None)


def _mean(ends: Sequence[dict[str, Any]], key: str, times: float = 1.0) -> float | None:
    known = [times * end[key] for end in ends if end.get(key) is not None]
    return statistics.fmean(known) if known else None


def _three(value: float | None) -> str | None:
    """R2 lies between 0 and 1, where one decimal says too little."""
    return None if value is None else f"{value:.3f}"
