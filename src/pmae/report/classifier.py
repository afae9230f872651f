"""The page of classifiers: how good each is, how far its probabilities can be trusted, and what to do next."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pmae.errors import UserError, require
from pmae.files import write_text
from pmae.intervals import Interval, wilson
from pmae.plugins import command_line
from pmae.report import style
from pmae.report.advice import Advice
from pmae.report.charts import confusion
from pmae.report.classifier_contents import SPLITS, Bin, Calibration, ClassifierContents, load
from pmae.report.compare import Verdict
from pmae.report.contents import distinct_names, file_names
from pmae.report.page import make_folder, page_path, render, write_beside
from pmae.report.style import Drawing, panels, styled
from pmae.report.tables import Cell, Table
from pmae.results import Score
from pmae.runs import is_classifier

DRAWS = 2000
CHOSEN = "They are the validation images, which chose when to stop: on new images expect a little less."
PRECISE, TRUSTED, WEAK = 5.0, 0.05, 0.7
"""Half an interval in points, a calibration error and a recall on whose good side nothing needs to be said."""


class Chapter(NamedTuple):
    """What the page says of one classifier."""

    classifier: ClassifierContents
    anchor: str
    verdict: Verdict
    notes: list[str]
    advice: list[Advice]
    drawings: list[Drawing]
    tables: list[Table]


def write_classifier_report(paths: Sequence[Path | str], out: Path | str) -> None:
    """Write the page of these classifiers to `out`, and its tables and figures to the folder `<stem>_files`."""
    out = page_path(out)
    for path in paths:
        require(Path(path).expanduser().is_dir(), "runs", "folders that exist", str(path))
        if not is_classifier(path):
            raise UserError(f"runs must be classifiers or runs, not both on one page, got {str(path)!r}")
    read = [load(path, name) for path, name in zip(paths, distinct_names(paths), strict=True)]
    anchors, table = file_names([one.name for one in read]), metrics_table(read)
    chapters = [_chapter(one, anchor) for one, anchor in zip(read, anchors, strict=True)]
    make_folder(out.parent)
    page = render("classifier.html.j2", chapters=chapters, metrics=table)
    write_beside(out, [], [table], [(one.anchor, one.drawings, one.tables) for one in chapters])
    write_text(out, page)


def _chapter(one: ClassifierContents, anchor: str) -> Chapter:
    part = one.main
    drawings = [reliability(one)] if part.calibration.reliability else []
    tables = [counts_table(one)]
    if part.confusion:
        named: dict[str, Any] = {"confusion": part.confusion, "classes": one.classes}
        drawn = confusion(Score("finetune", one.card.get("pooling", "mean"), part.split, part.images, {}, **named))
        said = f"{part.images:,} images of {part.split}: percent of each true class (row) given each answer (column)."
        drawings.append(replace(drawn, caption=said))
    if part.coverage:
        tables = [coverage_table(one), *tables]
    if part.mistakes:
        tables.append(mistakes_table(one))
    notes = [str(note) for note in one.data.get("notes", [])] + [note for own in one.parts for note in own.notes]
    return Chapter(one, anchor, verdict(one), notes, list(advice(one)), drawings, tables)


def verdict(one: ClassifierContents) -> Verdict:
    """How good it is and how sure that is."""
    part, found, multi = one.main, one.accuracy, one.card.get("multi_label")
    low, high = found.low, found.high
    bounds = f" (95% interval {low:.0f} to {high:.0f}%)" if low is not None and high is not None else ""
    what = "All labels are" if multi else "The label is"
    share = "unknown" if found.value is None else f"{found.value:.1f}%"
    headline = f"{what} right for {share} of {part.images:,} images it was not trained on{bounds}."
    sentences = [] if part.split == "test" else [CHOSEN]
    support = [sum(row) for row in part.confusion or ()]
    commonest = 100 * max(support) / max(sum(support), 1) if support else None
    if commonest is not None:
        sentences.append(f"Always answering the commonest class would be right for {commonest:.1f}%.")
    sentences.append(_trust(part.calibration))
    if part.split == "test":
        flagged = f"{part.drifted:.1%} of the test images are flagged as unlike the training images"
        sentences.append(f"{flagged}; 1% would be expected.")
    kind = "open"
    if low is not None and high is not None and not multi:
        kind = "no" if low <= (commonest or 0) else "yes" if high - low <= 2 * PRECISE else "open"
    return Verdict(one.name, kind, headline, sentences)


def _trust(found: Calibration) -> str:
    after, before = 100 * found.calibration_error, 100 * found.calibration_error_uncalibrated
    told = f"Its probabilities are off by {after:.1f} points on average ({before:.1f} before calibration)"
    if found.calibration_error <= TRUSTED:
        return f"{told}: they can be taken at their word."
    if not _is_rough(found):
        most = 100 * _error_by_chance(found.reliability)
        return f"{told}. On so few images exact probabilities may be off by {most:.1f} too: more images would tell."
    surplus = sum(b.images * (b.right - b.claimed) for b in found.reliability)
    how = "more" if surplus > 0 else "less"
    return f"{told}: it is {how} often right than it says, so take them as an order, not as frequencies."


def _is_rough(found: Calibration) -> bool:
    """Whether probabilities are off by more than matters, and by more than chance makes of so few images."""
    return found.calibration_error > max(TRUSTED, _error_by_chance(found.reliability))


def _error_by_chance(bins: Sequence[Bin]) -> float:
    """The calibration error that exact probabilities stay below in 95 of 100 draws of as many answers."""
    images, claimed = np.array([b.images for b in bins]), np.array([b.claimed for b in bins])
    drawn = np.random.default_rng(0).binomial(images, claimed, (DRAWS, len(bins)))
    errors = np.abs(drawn - images * claimed).sum(1) / max(images.sum(), 1)
    return float(np.quantile(errors, 0.95))


def advice(one: ClassifierContents) -> Iterator[Advice]:
    """What to do next, the most useful first."""
    part, accuracy = one.main, one.accuracy
    if part.split == "val":
        words = "val is too kind: fine-tune again with --test 0.2, or with labelled images of their own in test/."
        yield Advice("No test images", words)
    if accuracy.low is not None and accuracy.high is not None and accuracy.high - accuracy.low > 2 * PRECISE:
        p = min(max((accuracy.value or 50) / 100, 0.05), 0.95)
        needed, units = p * (1 - p) * (196 / PRECISE) ** 2, "held-out images"
        if part.groups and part.over_groups:  # images of one say much the same: the more groups, the narrower it is
            needed, units = part.groups * ((accuracy.high - accuracy.low) / (2 * PRECISE)) ** 2, "groups"
        count = f"{math.ceil(needed):,} {units}"
        words = f"About {count} would make the interval {2 * PRECISE:.0f} points wide: label more."
        yield Advice("Too few held-out images", words)
    yield from _weak_classes(one)
    counts = list(one.data.get("per_class", {}).values())
    if one.settings.get("class_weights") == "none" and counts and max(counts) > 5 * min(counts):
        ratio = max(counts) / max(min(counts), 1)
        words = f"The commonest has {ratio:.0f} times the images of the rarest"
        yield Advice("Uneven classes", f"{words}: fine-tune with --class-weights balanced.")
    if _is_rough(part.calibration):
        table = "table of least probabilities" if part.coverage else "diagram of how often answers are right"
        words = f"Use the {table} below, not the probabilities themselves, to decide what to check."
        yield Advice("Rough probabilities", words)
    commands = [command_line("predict", one.path, "--data", "new/", "-o", "predictions.csv")]
    commands += [command_line("explore", one.path)]
    yield Advice("Use it", "Label a folder of images, or drop single ones on a page.", "\n".join(commands))


def _weak_classes(one: ClassifierContents) -> Iterator[Advice]:
    """The class that is missed most, and what it is taken for."""
    part, seen = one.main, one.data.get("per_class", {})
    if not part.confusion:
        return
    table = np.array(part.confusion, dtype=np.float64)
    support = table.sum(1)
    recall = np.where(support > 0, np.diag(table) / np.maximum(support, 1), 1.0)
    worst = int(recall.argmin())
    if recall[worst] >= WEAK:
        return
    taken = table[worst].copy()
    taken[worst] = 0
    name, other = one.classes[worst], one.classes[int(taken.argmax())]
    trained = f", of which training saw {seen[name]:,}," if name in seen else ""
    missed = f"{int(support[worst] - table[worst, worst])} of {int(support[worst])}"
    words = f"{missed} are missed: label more images of {name!r}{trained} and look at those taken for {other!r}."
    yield Advice("Weakest class", words)


@styled
def reliability(one: ClassifierContents) -> Drawing:
    """How often answers are right against the probability they claim, before and after the temperature."""
    found = one.main.calibration
    figure, (axes, below) = panels((3.0, 1.1))
    axes.plot([0, 100], [0, 100], color=style.INK, linewidth=0.8, linestyle=":")
    looks = {"as trained": ("s", "--", style.PALETTE[1]), "calibrated": ("o", "-", style.PALETTE[0])}
    kinds = zip(looks.items(), (found.reliability_uncalibrated, found.reliability), strict=True)
    for (name, (shape, line, hue)), bins in kinds:
        x, y = ([100 * getattr(b, key) for b in bins] for key in ("claimed", "right"))
        axes.plot(x, y, marker=shape, linestyle=line, color=hue, markersize=4, label=name)
    below.vlines([100 * b.claimed for b in found.reliability], 0, [b.images for b in found.reliability], linewidth=5)
    axes.set(xlim=(0, 102), ylim=(0, 102), ylabel="right (%)")
    below.set(xlim=(0, 102), ylabel="answers", xlabel="probability of the answer (%)")
    style.legend(figure, [axes])
    caption = "On the dotted line an answer of 80% is right in 80 of 100 cases. Logits are divided by "
    caption += f"{one.temperature:.2f}, which is fitted on val; shown is {one.main.split}. Points of few answers "
    caption += "(below) are rough."
    return Drawing("reliability", "Can its probabilities be trusted?", caption, figure)


def metrics_table(classifiers: Sequence[ClassifierContents]) -> Table:
    """One row a classifier and held-out part."""
    names = list(dict.fromkeys(name for one in classifiers for part in one.parts for name in part.metrics))
    rows: list[list[Cell]] = []
    for one in classifiers:
        for part in sorted(one.parts, key=lambda part: SPLITS.index(part.split)):
            cells: list[Cell] = [part.metrics.get(name, Interval()).percent for name in names]
            error = 100 * part.calibration.calibration_error
            rows.append([one.name, part.split, part.images, *cells, error, 100 * part.drifted])
    header = ("classifier", "part", "images", *(n.replace("_", " ") for n in names), "calibration error", "drifted")
    known = any(isinstance(cell, Interval) and cell.low is not None for row in rows for cell in row)
    said = "With 95% intervals." if known else ""
    cautions = {part.caution: None for one in classifiers for part in one.parts if "exact_match" in part.metrics}
    said = " ".join([said, *cautions]).strip()
    return Table("metrics", "Scores on images that were not trained on (%)", header, rows, said)


def coverage_table(one: ClassifierContents) -> Table:
    """What is gained by leaving unsure answers to a person."""
    rows: list[list[Cell]] = []
    for own in one.main.coverage:
        rows.append([f"{own.probability:.0%}", own.images, 100 * own.images / one.main.images, own.share.percent])
    header = ("least probability", "images", "answered (%)", "right (%)")
    said = "If less sure answers are left to a person: how many images are answered, and how often they are right."
    said = f"{said} {one.main.caution}".strip()
    return Table("coverage", f"Where to draw the line, on {one.main.split}", header, rows, said)


def counts_table(one: ClassifierContents) -> Table:
    """Each class: how many images it has, and how well it is found."""
    seen, part = one.data.get("per_class", {}), one.main
    rows: list[list[Cell]] = []
    for own in part.per_class:
        name, support = str(own["name"]), int(own["support"])
        start: list[Cell] = [name, seen.get(name), support]
        if part.confusion:
            found = wilson(round((own["recall"] or 0) * support), support)
            if own.get("recall_low") is not None:
                found = replace(found, low=own["recall_low"], high=own["recall_high"])
            rows.append([*start, found.percent, _percent(own["precision"])])
        else:
            rows.append([*start, *(_percent(own[key]) for key in ("average_precision", "auc", "accuracy"))])
    kinds = ("recall (%)", "precision (%)") if part.confusion else ("average precision (%)", "AUC (%)", "accuracy (%)")
    header = ("class", "training images", f"{part.split} images", *kinds)
    return Table("classes", f"Each class, on {part.split}", header, rows, part.caution if part.confusion else "")


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def mistakes_table(one: ClassifierContents) -> Table:
    """The surest of the wrong answers: often a wrong label."""
    rows: list[list[Cell]] = [[own.file, own.label, own.answer, 100 * own.probability] for own in one.main.mistakes]
    said = "Look at these first: some will be mislabelled, the others show what it has not learned."
    header = ("file", "label", "answer", "probability (%)")
    return Table("mistakes", "The surest of its wrong answers", header, rows, said)
