"""Pages: the report of runs as one HTML file that needs nothing else, and tables and figures as one Markdown file."""

import base64
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from pmae.errors import UserError, require
from pmae.files import disk_errors, write_text
from pmae.report import charts, samples, tables
from pmae.report.advice import Advice, advice
from pmae.report.compare import between, main_score, splits_of, verdict
from pmae.report.contents import BROKEN, Contents, file_names, load, load_all
from pmae.report.feature_map import InteractiveMap, feature_map, has_map
from pmae.report.style import Drawing, color, inline_svg, save_drawing
from pmae.report.tables import Table, bounds, shown, to_csv, to_markdown
from pmae.results import PROTOCOLS, Score
from pmae.runs import Run

NOTHING: dict[str, Any] = {"curves": {"runs": [], "panels": []}, "maps": {}, "sprites": {}}
"""What a page without curves and maps gives its script."""


@dataclass(frozen=True)
class Page:
    """Tables and figures that belong together; the first table is what a terminal shows."""

    tables: list[Table] = field(default_factory=list)
    drawings: list[Drawing] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def write_page(name: str, heading: str, page: Page, folder: Path) -> list[Path]:
    """One Markdown file with everything, a CSV file a table, and PNG and SVG of the figures; returns their paths."""
    make_folder(folder)
    paths = [write_text(folder / f"{table.name}.csv", to_csv(table)) for table in page.tables]
    paths += [path for drawing in page.drawings for path in _save(drawing, folder, drawing.name)]
    parts = [f"## {heading}\n", *map(to_markdown, page.tables)]
    parts += [f"![{drawing.title}]({drawing.name}.png)\n\n{drawing.caption}\n" for drawing in page.drawings]
    parts += ["\n".join(f"- {note}" for note in page.notes) + "\n"] if page.notes else []
    return [write_text(folder / f"{name}.md", "\n".join(parts)), *paths]


class Chapter(NamedTuple):
    """What the report says about one run alone."""

    run: Contents
    anchor: str
    notes: list[str]
    advice: list[Advice]
    drawings: list[Drawing]
    map: InteractiveMap | None
    confusion: Score | None
    classes: Table | None
    settings: dict[str, str]


def write_report(runs: Sequence[Path | str], out: Path | str) -> tuple[list[str], list[str]]:
    """Write the page for these run folders to `out`, and its tables and figures to the folder `<stem>_files`.

    A folder that could not be read is left out; if none could, nothing is written. Returns what a terminal should say
    too: why folders were left out, and the first run against each of the others.
    """
    out = page_path(out)
    read, refused = load_all(runs)
    if not read:
        raise UserError(refused[0] if refused else "runs must name at least one run folder, got none")
    for folder in (out.parent, _beside(out)):
        make_folder(folder)
    across, splits = _figures_across(read), splits_of(read)
    bars = {drawing.name: drawing for drawing in across}
    made = {table.name: table for table in _tables(read, splits)}
    anchors = file_names([run.name for run in read])
    chapters = [_chapter(run, anchor, len(read)) for run, anchor in zip(read, anchors, strict=True)]
    mapped = [chapter.map for chapter in chapters if chapter.map]
    page = render(
        "page.html.j2",
        runs=read,
        refused=refused,
        verdicts=[verdict(run, read) for run in read],
        between=(compared := between(read)),
        standings=[(made[f"accuracy-{split}"], bars[f"accuracy-{split}"]) for split in splits],
        by_epoch=[drawing for drawing in across if drawing.name.startswith("accuracy-by-epoch")],
        curves=bars.get("learning-curves"),
        chapters=chapters,
        tables=made,
        metrics=[made[f"metrics-{split}"] for split in splits],
        remarks=_remarks(chapters),
        data={
            "curves": charts.curve_data([run for run in read if run.training]),
            "maps": {one.name: one.data for one in mapped},
            "sprites": {one.sprite_key: one.sprite for one in mapped},
        },
    )
    own = [(one.anchor, one.drawings, filter(None, [one.classes])) for one in chapters]
    write_beside(out, across, list(made.values()), own)
    write_text(out, page)
    return refused, compared


def page_path(out: Path | str) -> Path:
    """Where a page is to be written, which no folder may be."""
    out = Path(out).expanduser()
    require(not out.is_dir(), "out", "a file such as report.html, not a folder", str(out))
    return out


def _tables(runs: Sequence[Contents], splits: Sequence[str]) -> Iterator[Table]:
    """Those about all runs together."""
    yield from (tables.runs_table(runs), tables.settings_table(runs))
    yield from (tables.accuracy_table(runs, split) for split in splits)
    yield from (tables.metrics_table(runs, split) for split in splits)
    if segmentation := tables.segmentation_table(runs):
        yield segmentation
    yield from (tables.cost_table(runs), tables.environment_table(runs))


def _remarks(chapters: Sequence[Chapter]) -> list[str]:
    """Problems and notes, each once, with the names of its runs where it is not about all of them."""
    said: dict[str, list[str]] = {}
    for chapter in chapters:
        for words in (*chapter.run.problems, *chapter.notes):
            said.setdefault(words, []).append(chapter.run.name)
    return [w if len(names) == len(chapters) else f"{', '.join(names)}: {w}" for w, names in said.items()]


def _chapter(run: Contents, anchor: str, runs: int) -> Chapter:
    drawings, score = _figures_of(run), main_score(run, with_classes=True)
    few = score if score and len(score.classes) <= charts.MOST_NAMED else None
    shown = None
    if has_map(run):
        shown = InteractiveMap(run, f"map-{anchor}", 1000 if runs < 4 else 400, 32 if runs == 1 else 24)
    table, settings = tables.class_table(run), tables.settings(run)
    return Chapter(run, anchor, _notes(run), advice(run), drawings, shown, few, table, settings)


def save_figures(run: Run) -> list[Path]:
    """Draw all figures of a run into its `figures` folder, each file whole or not at all."""
    contents, folder = load(run.path), run.path / "figures"
    make_folder(folder)
    drawings = [*_figures_across([contents]), *_figures_of(contents)]
    return [save_drawing(drawing, folder / f"{drawing.name}.png") for drawing in drawings]


def _figures_across(runs: Sequence[Contents]) -> list[Drawing]:
    drawn = []
    for split in splits_of(runs):
        drawn += [charts.accuracy_bars(runs, split), *charts.epoch_curves(runs, split)]
    begun = [run for run in runs if run.training]
    return drawn + ([charts.learning_curves(begun)] if begun else [])


def _figures_of(run: Contents) -> list[Drawing]:
    """Figures of one run that has the material; one that cannot be drawn is named among the run's problems."""
    plan: dict[str, Callable[[Contents], Drawing]] = {}
    if "target" in run.samples:
        plan |= {"reconstructions": samples.reconstructions, "masks": samples.masks}
    if "token_colours" in run.samples and "original" in run.samples:
        plan["the patch tokens"] = samples.token_figure
    if "variance" in run.samples:
        plan["the spectrum"] = samples.spectrum
        if "top" in run.samples:
            plan["parts of the spectrum"] = samples.spectrum_parts
        if len(run.fitted.get("space.components", ())) >= samples.GALLERY and run.config.space.name == "pca":
            plan["components"] = samples.components
    if len(samples.epochs_kept(run)) > 1 and run.method == "PMAE" and not samples.is_signal(run):
        plan["reconstructions over the epochs"] = samples.over_epochs
    if any(key.startswith("r2_band_") and line[key] is not None for line in run.signals for key in line):
        plan["R2 by band"] = charts.band_curves
    if score := main_score(run, with_classes=True):
        plan["confusion"] = lambda _: charts.confusion(score)
    if "features" in run.features:
        plan["the feature map"] = feature_map
    drawn = []
    for what, draw in plan.items():
        try:
            drawn.append(draw(run))
        except BROKEN as error:
            run.problems.append(f"the figure of {what} could not be drawn: {error}")
    return drawn


def render(template: str, script: str = "page.js", **content: object) -> str:
    """A template of this folder as a page that holds its style and its script, and lets no other run."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    drawn: dict[str, str] = {}

    def first_with(drawing: Drawing, run: str) -> str:
        """The run whose figure this one repeats, pixel by pixel: runs of the same data have the same spectrum."""
        return drawn.setdefault(f"{drawing.name} {hash(drawing.svg)}", run)

    folder = files("pmae.report")
    style, *scripts = (folder.joinpath(name).read_text("utf-8") for name in ("page.css", "curves.js", script))
    whole = "\n".join(scripts)
    digest = base64.b64encode(hashlib.sha256(whole.encode()).digest()).decode("ascii")
    loader = PackageLoader("pmae.report", "")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.globals |= {"as_svg": inline_svg, "bounds": bounds, "shown": shown, "first_with": first_with}
    environment.globals |= {"style": Markup(style), "script": Markup(whole), "digest": digest, "color": color}
    return environment.get_template(template).render(**{"data": NOTHING, **content})


def _notes(run: Contents) -> list[str]:
    said = [*run.start, *(str(note) for note in run.data.get("notes", []))]
    for evaluation in run.evaluations:
        said += [*evaluation.data.notes, *(f"{note} (preset {evaluation.preset})" for note in evaluation.notes)]
        for score in evaluation.scores:
            how = f"{PROTOCOLS.get(score.protocol, score.protocol)} on {score.representation}, {score.split}"
            said += [f"{note} ({how}, preset {score.preset})" for note in score.notes]
        said += [note for split, found in evaluation.data.duplicates.items() for note in found.in_words(split)]
    said += run.segmentation.notes if run.segmentation else ()
    return list(dict.fromkeys(said))


Beside = tuple[str, Iterable[Drawing], Iterable[Table]]
"""A chapter's anchor, figures and tables."""


def write_beside(out: Path, across: Sequence[Drawing], made: Sequence[Table], chapters: Sequence[Beside]) -> None:
    """Figures (PNG, SVG) and tables (CSV, Markdown) in the folder of a page: common ones, and those of each chapter."""
    folder = _beside(out)
    make_folder(folder)
    drawings = {drawing.name: drawing for drawing in across}
    tables = {table.name: table for table in made if table.rows}
    for anchor, drawn, own in chapters:
        start = f"{anchor}-" if len(chapters) > 1 else ""
        drawings |= {f"{start}{drawing.name}": drawing for drawing in drawn}
        tables |= {f"{start}{table.name}": table for table in own}
    for name, table in tables.items():
        write_text(folder / f"{name}.csv", to_csv(table))
        write_text(folder / f"{name}.md", to_markdown(table))
    for name, drawing in drawings.items():
        _save(drawing, folder, name)


def _beside(out: Path) -> Path:
    return out.with_name(f"{out.stem}_files")


def _save(drawing: Drawing, folder: Path, name: str) -> list[Path]:
    return [save_drawing(drawing, folder / f"{name}.{kind}") for kind in ("png", "svg")]


def make_folder(path: Path) -> None:
    """Make a folder for a page, or say what is in its way."""
    with disk_errors(path):
        try:
            path.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            raise UserError(f"out must be in a folder, got the file {str(path)!r} in its way") from error
