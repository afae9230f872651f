"""Which tables a report has, each assembled from the runs as plain data."""

import statistics
from collections.abc import Sequence
from typing import Any

from pmae.config_file import to_dict
from pmae.report.charts import headline
from pmae.report.contents import Contents
from pmae.report.lineup import lineup
from pmae.report.published import for_score, source
from pmae.report.scores import METRICS, POOLINGS, PROTOCOLS, Score
from pmae.report.tables import Cell, Table


def data_and_method(runs: Sequence[Contents]) -> Table:
    """One row a run: which images, which method, which encoder, how long."""
    header = ("run", "data", "images", "shape", "method", "hidden", "encoder", "epochs", "batch", "state")
    return Table("runs", "What was run", header, [_what_was_run(run) for run in runs])


def differing_settings(runs: Sequence[Contents]) -> Table:
    """The settings in which the runs differ, one column a run."""
    flat = [settings(run) for run in runs]
    keys = [key for key in flat[0] if len({str(one[key]) for one in flat}) > 1] if flat else []
    rows = [[key, *(one[key] for one in flat)] for key in keys]
    return Table("settings-that-differ", "Settings that differ", ["setting", *(run.name for run in runs)], rows)


def settings(run: Contents) -> dict[str, str]:
    """Every setting of a run by its dotted name."""
    nested = to_dict(run.config)
    return {f"{room}.{key}": _plain(value) for room, values in nested.items() for key, value in values.items()}


def standings(runs: Sequence[Contents], split: str) -> Table:
    """Accuracy by representation and protocol, with the paper's rows below."""
    every = lineup(runs, split)
    protocols = [name for name in PROTOCOLS if any(entrant.score.protocol == name for entrant in every)]
    cells = {(entrant.name, entrant.score.protocol): entrant.score.accuracy for entrant in every}
    names = list(dict.fromkeys(entrant.name for entrant in every))
    rows: list[list[Cell]] = [[name, *(cells.get((name, protocol)) for protocol in protocols)] for name in names]
    papers: dict[str, dict[str, float]] = {}
    for entrant in every:
        if paper := for_score(entrant.score, entrant.run.config):
            papers.setdefault(f"published: {paper[1]}", {})[entrant.score.protocol] = paper[0]
    rows += [[name, *(found.get(protocol) for protocol in protocols)] for name, found in papers.items()]
    note = _accuracy_note([(e.run, e.score) for e in every], split, bool(papers))
    header = ["accuracy %", *(PROTOCOLS[protocol] for protocol in protocols)]
    return Table(f"accuracy-{split}", f"Accuracy on {split}", header, rows, note)


def all_metrics(runs: Sequence[Contents], split: str) -> Table:
    """Every evaluated representation, epoch and metric with its interval, and the paper's accuracy if there is one."""
    found = [(run, score) for run in runs for score in run.scores if score.split == split]
    found.sort(key=lambda pair: list(PROTOCOLS).index(pair[1].protocol) if pair[1].protocol in PROTOCOLS else 9)
    papers = {id(score): for_score(score, run.config) for run, score in found}
    with_paper, several = any(papers.values()), len({score.preset for _, score in found}) > 1
    rows = []
    for run, score in found:
        paper = papers[id(score)]
        row: list[Cell] = [score.label, POOLINGS.get(score.pooling, score.pooling), _protocol(score)]
        row += [score.metrics[name] for name in METRICS] + [score.seeds, score.spread]
        row += ([run.name] if len(runs) > 1 else []) + ([score.preset] if several else [])
        rows.append(row + ([paper[0] if paper else None, paper[1] if paper else None] if with_paper else []))
    header = ["representation", "pooling", "protocol", *METRICS.values(), "seeds", "± between seeds"]
    header += (["run"] if len(runs) > 1 else []) + (["preset"] if several else [])
    header += ["paper", "paper's method"] if with_paper else []
    return Table(f"metrics-{split}", f"All metrics on {split}", header, rows, _accuracy_note(found, split, with_paper))


def per_class(run: Contents) -> Table | None:
    """Precision and recall of each class for the run's main score."""
    for score in headline(run):
        rows: list[list[Cell]] = [
            [str(row["class"]), _percent(row["precision"]), _percent(row["recall"]), int(row["support"])]
            for row in score.per_class
        ]
        note = f"From {PROTOCOLS[score.protocol]} on {score.representation}, {score.split}."
        return Table("classes", "Per class", ("class", "precision %", "recall %", "images"), rows, note)
    return None


def cost(runs: Sequence[Contents]) -> Table:
    """What pretraining and evaluation took."""
    header = ("run", "steps", "images seen", "images/s", "pretraining, s", "evaluation, s", "device")
    note = "Images/s is the median over the log lines; time is that of the steps, without start-up and measurements."
    return Table("cost", "Speed and cost", header, [_cost(run) for run in runs], note)


def environment(runs: Sequence[Contents]) -> Table:
    """Machine and versions, one column a run."""
    flat = [_environment(run) for run in runs]
    keys = list(dict.fromkeys(key for one in flat for key in one))
    rows = [[key, *(one.get(key, "") for one in flat)] for key in keys]
    return Table("environment", "Environment", ["", *(run.name for run in runs)], rows)


def training_seconds(run: Contents) -> float:
    """Time spent in training steps, pauses and resumptions not counted, from the speed of each stretch of steps."""
    before, total = 0, 0.0
    for line in run.training:
        images = (line["step"] - before) * (run.config.train.batch_size or 0)
        total, before = total + images / max(line["images_per_second"], 1e-9), line["step"]
    return total


def _what_was_run(run: Contents) -> list[Cell]:
    data, config = run.data, run.config
    counts = ", ".join(f"{count:,} {split}" for split, count in data.get("counts", {}).items())
    shape = " × ".join(map(str, data.get("shape", ())))
    encoder = f"{config.encoder.name}, patch {config.encoder.patch_size}"
    state = "finished" if run.finished else f"stopped at epoch {run.epoch:.4g}"
    shape = f"{shape} {data.get('dtype', '')}"
    epochs, batch = config.train.epochs, config.train.batch_size
    return [run.name, str(data.get("name", "")), counts, shape, run.method, hidden(run), encoder, epochs, batch, state]


def hidden(run: Contents) -> str:
    """How much is hidden, in words."""
    masking, what = run.config.masking, "patches" if run.method == "MAE" else "variance"
    if masking.ratio_schedule == "uniform":
        low, high = masking.ratio_range
        return f"{low:.0%} to {high:.0%} of {what}"
    ratio = masking.masked_patches if run.method == "MAE" else masking.masked_variance
    return f"{(0.75 if run.method == 'MAE' else 0.2) if ratio is None else ratio:.0%} of {what}"


def _accuracy_note(found: Sequence[tuple[Contents, Score]], split: str, with_paper: bool) -> str:
    """How many images, by what preset, and where published numbers are from."""
    images = sorted({score.images for _, score in found})
    presets = sorted({score.preset for _, score in found})
    note = (
        f"Percent, with 95% bootstrap intervals over the {' or '.join(f'{n:,}' for n in images)} images of {split}; "
        f"preset {', '.join(presets)}."
    )
    levels = sorted({score.chance for _, score in found if score.chance is not None})
    if levels:
        note += f" Always answering the commonest class: {' or '.join(f'{level:.1f}' for level in levels)}."
    return f"{note} {source()}" if with_paper else note


def _protocol(score: Score) -> str:
    return PROTOCOLS.get(score.protocol, score.protocol)


def _cost(run: Contents) -> list[Cell]:
    steps = int(run.training[-1]["step"]) if run.training else 0
    speed = statistics.median(line["images_per_second"] for line in run.training) if run.training else None
    spent = sum(sum(suite.get("seconds", {}).values()) for suite in run.evaluation.values() if isinstance(suite, dict))
    seen = steps * (run.config.train.batch_size or 0)
    device = str(run.environment.get("device", ""))
    return [
        run.name,
        steps,
        seen,
        None if speed is None else round(speed),
        training_seconds(run),
        spent or None,
        device,
    ]


def _environment(run: Contents) -> dict[str, str]:
    known = run.environment
    plain = {key: str(known[key]) for key in ("device", "system", "python", "commit") if key in known}
    return plain | {name: str(version) for name, version in dict(known.get("packages", {})).items()}


def _plain(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple | list) else "not set" if value is None else str(value)


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share
