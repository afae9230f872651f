"""Any table as CSV or Markdown, and the tables of a report."""

import csv
import html
import io
import math
import operator
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from pmae.config_file import flat
from pmae.intervals import Interval
from pmae.report.compare import lineup, main_score
from pmae.report.contents import Contents
from pmae.report.published import published, published_for
from pmae.report.style import minus
from pmae.results import METRICS, PROTOCOLS, Score

Cell = str | int | float | Interval | None
NOTHING = "–"
OPERATIONS = "Operations are those of the matrix multiplications of pretraining, floating-point, forward and backward."


@dataclass(frozen=True)
class Table:
    """A header and rows of the same length; `name` is its file name."""

    name: str
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""

    @property
    def numeric(self) -> list[bool]:
        """Which columns hold numbers alone, and are set flush right."""
        columns = [[row[j] for row in self.rows if row[j] is not None] for j in range(len(self.header))]
        return [bool(cells) and not any(isinstance(cell, str) for cell in cells) for cells in columns]


def to_csv(table: Table) -> str:
    """Full numbers; a column with intervals becomes three, the bounds beside the value."""
    wide = [any(isinstance(row[j], Interval) for row in table.rows) for j in range(len(table.header))]
    header = [
        inert(name) + end
        for name, is_wide in zip(table.header, wide, strict=True)
        for end in (("", " low", " high") if is_wide else ("",))
    ]
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(header)
    for row in table.rows:
        writer.writerow([value for cell, is_wide in zip(row, wide, strict=True) for value in _numbers(cell, is_wide)])
    return buffer.getvalue()


def _numbers(cell: Cell, is_wide: bool) -> list[str | int | float | None]:
    if isinstance(cell, Interval):
        return [None if v is None else round(v, 6) for v in (cell.value, cell.low, cell.high)]
    plain = inert(cell) if isinstance(cell, str) else cell
    return [plain, None, None] if is_wide else [plain]


def inert(text: str) -> str:
    """Text that no spreadsheet takes for a formula: one that begins like it gets an apostrophe in front."""
    text = text.replace("\r", " ")
    try:
        is_number = math.isfinite(float(text))
    except ValueError:
        is_number = False
    return f"'{text}" if text.lstrip().startswith(("=", "+", "-", "@")) and not is_number else text


def to_markdown(table: Table) -> str:
    lines = [f"### {in_line(table.title)}", "", _pipes(table.header)]
    lines.append("|" + "|".join("---:" if number else "---" for number in table.numeric) + "|")
    lines += [_pipes([shown(cell) for cell in row]) for row in table.rows]
    return "\n".join([*lines, *(["", in_line(table.note)] if table.note else []), ""])


def _pipes(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(in_line, cells)) + " |"


def in_line(text: str) -> str:
    """Text that neither ends a line or a cell of Markdown nor starts a tag."""
    return html.escape(" ".join(text.split()), quote=False).replace("|", "\\|")


def shown(cell: Cell) -> str:
    """A cell for people: one decimal, the interval in brackets, a dash for nothing."""
    if isinstance(cell, Interval):
        return f"{shown(cell.value)} {bounds(cell)}".strip()
    if cell is None or cell == "" or (isinstance(cell, float) and math.isnan(cell)):
        return NOTHING
    if isinstance(cell, str):
        return cell
    return minus(f"{cell:,}" if isinstance(cell, int) else f"{cell:.1f}")


def bounds(cell: Cell) -> str:
    """The interval of a cell in brackets, if it has one."""
    if not isinstance(cell, Interval) or cell.low is None or cell.high is None:
        return ""
    return f"({cell.low:.1f}–{cell.high:.1f})"


def runs_table(runs: Sequence[Contents]) -> Table:
    """One row a run: which images, which method, which encoder, how long."""
    rows: list[list[Cell]] = []
    for run in runs:
        data, config = run.data, run.config
        counts = ", ".join(f"{count:,} {split}" for split, count in data.get("counts", {}).items())
        shape = f"{' × '.join(map(str, data.get('shape', ())))} {data.get('dtype', '')}"
        encoder = f"{config.encoder.in_words}, patch {config.encoder.patch_size}"
        state = "as given" if run.given else "finished" if run.finished else f"stopped at epoch {run.epoch:.4g}"
        rows.append([run.name, str(data.get("name", "")), counts, shape, run.method, _hidden(run), encoder])
        spent = "" if run.operations is None else f"{run.operations:.1e}".replace("e+", "e")
        rows[-1] += [config.train.epochs, config.train.batch_size, state, spent]
    header = ("run", "data", "images", "shape", "method", "hidden (achieved)", "encoder", "epochs", "batch", "state")
    return Table("runs", "What was run", (*header, "operations"), rows, OPERATIONS)


def _hidden(run: Contents) -> str:
    """How much was to be hidden and, where that was logged, how much of it masks of whole components achieved."""
    masking, is_mae = run.config.masking, run.method == "MAE"
    if run.given or not masking.enabled:
        return ""
    what, ratio = ("patches", masking.masked_patches) if is_mae else ("variance", masking.masked_variance)
    asked = f"{(0.75 if is_mae else 0.2) if ratio is None else ratio:.0%}"
    if masking.ratio_schedule == "uniform":
        asked = " to ".join(f"{end:.0%}" for end in masking.ratio_range)
    shares = [line["masked_share"] for line in run.training if line.get("masked_share") is not None]
    achieved = f" ({statistics.fmean(shares):.1%})" if shares else ""
    return f"{asked} of {what}{achieved}"


def settings_table(runs: Sequence[Contents]) -> Table:
    """The settings in which the runs differ, one column a run."""
    flat = [settings(run) for run in runs]
    keys = dict.fromkeys(key for one in flat for key in one)
    differing = [key for key in keys if len({one[key] for one in flat if key in one}) > 1]
    rows = [[key, *(one.get(key, "") for one in flat)] for key in differing]
    return Table("settings-that-differ", "Settings that differ", ["setting", *(run.name for run in runs)], rows)


def settings(run: Contents) -> dict[str, str]:
    """Every setting of a run by its dotted name; of given weights those of their network and images."""
    found = {}
    for name, value in flat(run.config).items():
        if run.given and not name.startswith(("data.", "encoder.")):
            continue
        listed = ", ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
        found[name] = "not set" if value is None else listed
    return found


def accuracy_table(runs: Sequence[Contents], split: str) -> Table:
    """Accuracy by representation and protocol, with the paper's rows below."""
    every = lineup(runs, split)
    protocols = [name for name in PROTOCOLS if any(entrant.score.protocol == name for entrant in every)]
    found: dict[str, dict[str, Cell]] = {}
    for entrant in every:
        found.setdefault(entrant.name, {})[entrant.score.protocol] = entrant.score.accuracy
    papers = [(e.score, *paper) for e in every if (paper := published_for(e.score, e.run.config))]
    several = len({score.data for score, *_ in papers}) > 1
    for score, value, method in papers:
        name = f"published: {method}" + f", {score.data}" * several
        found.setdefault(name, {})[score.protocol] = value
    rows: list[list[Cell]] = [[name, *(cells.get(p) for p in protocols)] for name, cells in found.items()]
    note = _accuracy_note([entrant.score for entrant in every], split)
    note += f" {published()['source']} {published()['setting']}" if papers else ""
    header = ["accuracy %", *(PROTOCOLS[protocol] for protocol in protocols)]
    return Table(f"accuracy-{split}", f"Accuracy on {split}", header, rows, note)


def metrics_table(runs: Sequence[Contents], split: str) -> Table:
    """Every evaluated representation, epoch and metric with its interval."""
    found = [(run, score) for run in runs for score in run.scores if score.split == split]
    found.sort(key=lambda pair: list(PROTOCOLS).index(pair[1].protocol) if pair[1].protocol in PROTOCOLS else 9)
    columns: dict[str, list[Cell]] = {
        "representation": [score.label for _, score in found],
        "pooling": [score.pooling_name for _, score in found],
        "protocol": [PROTOCOLS.get(score.protocol, score.protocol) for _, score in found],
        **{title: [score.percent(metric) for _, score in found] for metric, title in METRICS.items()},
        "seeds": [len(score.by_seed) for _, score in found],
        "± between seeds": [score.accuracy.std for _, score in found],
    }
    if len(runs) > 1:
        columns["run"] = [run.name for run, _ in found]
    if len({score.preset for _, score in found}) > 1:
        columns["preset"] = [score.preset for _, score in found]
    note = _accuracy_note([score for _, score in found], split)
    rows = list(zip(*columns.values(), strict=True))
    return Table(f"metrics-{split}", f"All metrics on {split}", list(columns), rows, note)


def _accuracy_note(scores: Sequence[Score], split: str) -> str:
    images = f"{_counts([score.images for score in scores])} images of {split}"
    if groups := [len(set(score.groups.tolist())) for score in scores if score.groups is not None]:
        images = f"{_counts(groups)} groups of the {images}"
    presets = ", ".join(sorted({score.preset for score in scores}))
    note = f"Percent, with 95% bootstrap intervals over the {images}; preset {presets}."
    levels = sorted({score.chance for score in scores if score.chance is not None})
    if levels:
        note += f" Always answering the commonest class: {' or '.join(f'{level:.1f}' for level in levels)}."
    return note


def _counts(numbers: Sequence[int]) -> str:
    return " or ".join(f"{number:,}" for number in sorted(set(numbers)))


def class_table(run: Contents) -> Table | None:
    """Precision and recall of each class for the run's main score."""
    score = main_score(run, with_classes=True)
    if score is None:
        return None
    rows: list[list[Cell]] = []
    for row in score.per_class:
        shares = [None if share is None else 100 * share for share in (row.precision, row.recall)]
        rows.append([row.name, *shares, row.support])
    note = f"From {PROTOCOLS[score.protocol]} on {score.representation}, {score.split}."
    return Table("classes", "Per class", ("class", "precision %", "recall %", "images"), rows, note)


def segmentation_table(runs: Sequence[Contents]) -> Table | None:
    """Intersection over union of the linear segmentation probe, by representation and class; None without one."""
    found = [(run.name, run.segmentation) for run in runs if run.segmentation]
    if not found:
        return None
    classes = list(dict.fromkeys(str(name) for _, told in found for name in told.classes))
    rows: list[list[Cell]] = []
    for name, told in found:
        for label, score in told.scores.items():
            each = [None if (iou := score.iou.get(one)) is None else 100 * iou for one in classes]
            named = label if len(runs) == 1 else f"{name}: {label}"
            rows.append([named, score.miou.percent, 100 * score.accuracy, *each])
    header = ["tokens of", "mIoU %", "pixels right %", *(f"IoU of {name} %" for name in classes)]
    tested = " or ".join(dict.fromkeys(f"{told.counts.get('test', 0):,} images of {told.data}" for _, told in found))
    note = f"A linear probe on patch tokens, its answers upsampled to the pixels of {tested}; 95% bootstrap intervals."
    return Table("segmentation", "Segmentation", header, rows, note)


def cost_table(runs: Sequence[Contents]) -> Table:
    rows: list[list[Cell]] = []
    for run in runs:
        steps = [int(stage.training[-1]["step"]) if stage.training else 0 for stage in run.stages]
        speed = round(statistics.median(s["images_per_second"] for s in run.training)) if run.training else None
        evaluated = sum(sum(evaluation.seconds.values()) for evaluation in run.evaluations) or None
        batches = [stage.config.train.batch_size or 0 for stage in run.stages]
        told: list[Cell] = [sum(steps), sum(map(operator.mul, steps, batches)), speed]
        seconds, device = sum(map(training_seconds, run.stages)), str(run.environment.get("device", ""))
        rows.append([run.name, *told, seconds, evaluated, device])
    header = ("run", "steps", "images seen", "images/s", "pretraining, s", "evaluation, s", "device")
    note = "Images/s is the median over the log lines; time is that of the steps, without start-up and measurements."
    note += " Large patches first are counted in, but for their speed." * any(run.first for run in runs)
    return Table("cost", "Speed and cost", header, rows, note)


def training_seconds(run: Contents) -> float:
    """Time spent in training steps, pauses and resumptions not counted, from the speed of each stretch of steps."""
    before, total = 0, 0.0
    for line in run.training:
        images = (line["step"] - before) * (run.config.train.batch_size or 0)
        total, before = total + images / max(line["images_per_second"], 1e-9), line["step"]
    return total


def environment_table(runs: Sequence[Contents]) -> Table:
    """Machine and versions, one column a run."""
    known = ("device", "system", "python", "commit")
    flat = [
        {key: str(run.environment[key]) for key in known if key in run.environment}
        | {name: str(version) for name, version in dict(run.environment.get("packages", {})).items()}
        for run in runs
    ]
    keys = list(dict.fromkeys(key for one in flat for key in one))
    rows = [[key, *(one.get(key, "") for one in flat)] for key in keys]
    return Table("environment", "Environment", ["", *(run.name for run in runs)], rows)
