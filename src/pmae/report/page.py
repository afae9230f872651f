"""Pages: the report of runs as one HTML file that needs nothing else, and tables and figures as one Markdown file."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from markupsafe import Markup

from pmae.errors import UserError, require, unknown_name
from pmae.files import disk_errors, write_text
from pmae.report import charts, samples, tables
from pmae.report.compare import between, main_score, splits_of, verdict
from pmae.report.contents import BROKEN, Contents, file_name, load, load_all
from pmae.report.style import Drawing, as_inline_svg, save_drawing
from pmae.report.tables import Table, bounds, shown, to_csv, to_markdown
from pmae.results import Duplicates
from pmae.runs import Run

FORMATS = ("png", "svg", "pdf")


@dataclass(frozen=True)
class Page:
    """Tables and figures that belong together; the first table is what a terminal shows."""

    tables: list[Table] = field(default_factory=list)
    drawings: list[Drawing] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def write_page(name: str, heading: str, page: Page, folder: Path) -> list[Path]:
    """One Markdown file with everything, a CSV file a table, and PNG and SVG of the figures; returns their paths."""
    _make_folder(folder)
    paths = [write_text(folder / f"{table.name}.csv", to_csv(table)) for table in page.tables]
    paths += [path for drawing in page.drawings for path in _save(drawing, folder, drawing.name, ("png", "svg"))]
    parts = [f"## {heading}\n", *map(to_markdown, page.tables)]
    parts += [f"![{drawing.title}]({drawing.name}.png)\n\n{drawing.caption}\n" for drawing in page.drawings]
    parts += ["\n".join(f"- {note}" for note in page.notes) + "\n"] if page.notes else []
    return [write_text(folder / f"{name}.md", "\n".join(parts)), *paths]


@dataclass(frozen=True)
class Chapter:
    """What the report says about one run alone."""

    run: Contents
    anchor: str
    notes: list[str]
    drawings: list[Drawing]
    classes: Table | None
    settings: dict[str, str]


def write_report(runs: Sequence[Path | str], out: Path | str) -> list[str]:
    """Write the page for these run folders to `out`, and its tables and figures to the folder `<stem>_files`.

    Returns a sentence for each folder that could not be read and is left out; if none could, nothing is written.
    """
    out = Path(out)
    require(not out.is_dir(), "out", "a file such as report.html, not a folder", str(out))
    read, refused = load_all(runs)
    if not read:
        raise UserError(refused[0] if refused else "runs must name at least one run folder, got none")
    beside = out.with_name(f"{out.stem}_files")
    for folder in (out.parent, beside):
        _make_folder(folder)
    across, made = _figures_across(read), _tables(read)
    chapters = [_chapter(run) for run in read]
    page = _render(
        runs=read,
        refused=refused,
        verdicts=[verdict(run, read) for run in read],
        between=between(read),
        bars=[drawing for drawing in across if drawing.name.startswith("accuracy-")],
        curves=[drawing for drawing in across if drawing.name == "learning-curves"],
        chapters=chapters,
        tables=made,
        standings=[table for name, table in made.items() if name.startswith("accuracy-")],
        metrics=[table for name, table in made.items() if name.startswith("metrics-")],
    )
    _write_beside(beside, across, chapters, made)
    write_text(out, page)
    return refused


def save_figures(run: Run, formats: Sequence[str] = ("png",)) -> list[Path]:
    """Draw all figures of a run into its `figures` folder, each file whole or not at all."""
    for kind in formats:
        if kind not in FORMATS:
            raise unknown_name("formats", kind, FORMATS)
    contents, folder = load(run.path), run.path / "figures"
    _make_folder(folder)
    drawings = [*_figures_across([contents]), *_figures_of(contents)]
    return [path for drawing in drawings for path in _save(drawing, folder, drawing.name, formats)]


def _figures_across(runs: Sequence[Contents]) -> list[Drawing]:
    """Figures that show several runs together: accuracies, last and by epoch, and learning curves."""
    drawn = []
    for split in splits_of(runs):
        drawn += [charts.accuracy_bars(runs, split), *charts.epoch_curves(runs, split)]
    begun = [run for run in runs if run.training]
    return drawn + ([charts.learning_curves(begun)] if begun else [])


def _figures_of(run: Contents) -> list[Drawing]:
    """Figures of one run alone; one whose material cannot be drawn is named among the run's problems."""
    drawn: list[Drawing] = []
    for what, draw in _plan(run):
        try:
            drawn.append(draw())
        except BROKEN as error:
            run.problems.append(f"the figure of {what} could not be drawn: {error}")
    return drawn


def _plan(run: Contents) -> Iterator[tuple[str, Callable[[], Drawing]]]:
    """The figures that a run has the material for, by what they are of."""
    if "original" in run.samples:
        yield "reconstructions", partial(samples.reconstructions, run)
        yield "masks", partial(samples.masks, run)
    if "variance" in run.samples:
        yield "the spectrum", partial(samples.spectrum, run)
        if "top" in run.samples:
            yield "parts of the spectrum", partial(samples.spectrum_parts, run)
    if any(key.startswith("r2_band_") for line in run.signals for key in line):
        yield "R2 by band", partial(charts.band_curves, run)
    if score := main_score(run, with_classes=True):
        yield "confusion", partial(charts.confusion, score)
    if "features" in run.features:
        yield "the feature map", partial(charts.feature_map, run)


def _render(**content: object) -> str:
    """The template filled in; every text is escaped."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("pmae.report", "")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.globals |= {"as_svg": _svg, "bounds": bounds, "shown": shown}
    return environment.get_template("page.html.j2").render(**content)


def _svg(drawing: Drawing, place: str) -> Markup:
    return Markup(as_inline_svg(drawing.figure, f"{place}-{drawing.name}", f"{drawing.title}. {drawing.caption}"))


def _chapter(run: Contents) -> Chapter:
    drawings = _figures_of(run)
    return Chapter(run, file_name(run.name), _notes(run), drawings, tables.class_table(run), tables.settings(run))


def _notes(run: Contents) -> list[str]:
    """What a reader of the results must know: about the data, the evaluation and duplicates, each said once."""
    said = [str(note) for note in run.data.get("notes", [])]
    for evaluation in run.evaluations:
        said += [*evaluation.data.notes, *evaluation.notes]
        said += [note for score in evaluation.scores for note in score.notes]
        said += [note for split, found in evaluation.data.duplicates.items() for note in _duplicates(split, found)]
    return list(dict.fromkeys(said))


def _duplicates(split: str, found: Duplicates) -> Iterator[str]:
    """A sentence about images that train holds byte for byte, and one about those it nearly holds."""
    compared = f" ({found.near_of} were compared)"
    kinds = (
        (found.count, "byte for byte", "", "=", found.pairs),
        (found.near or 0, "nearly unchanged", compared, "~", found.near_pairs),
    )
    for count, how, remark, sign, pairs in kinds:
        images = "1 image" if count == 1 else f"{count} images"
        named = ", ".join(f"{pair.held_out} {sign} {pair.train}" for pair in pairs[:3])
        examples = f", for example {named}" if named else ""
        if count:
            yield f"{images} of {split} can be found {how} in the training part as well{remark}{examples}"


def _tables(runs: Sequence[Contents]) -> dict[str, Table]:
    made = [tables.runs_table(runs), tables.settings_table(runs)]
    made += [make(runs, split) for make in (tables.accuracy_table, tables.metrics_table) for split in splits_of(runs)]
    made += [tables.cost_table(runs), tables.environment_table(runs)]
    return {table.name: table for table in made}


def _write_beside(folder: Path, across: Sequence[Drawing], chapters: Sequence[Chapter], made: dict[str, Table]) -> None:
    """CSV and Markdown of the tables, PNG and SVG of the figures; names begin with the run where there are several."""
    named = {table.name: table for table in made.values() if table.rows}
    drawings = {drawing.name: drawing for drawing in across}
    for chapter in chapters:
        start = f"{chapter.anchor}-" if len(chapters) > 1 else ""
        drawings |= {f"{start}{drawing.name}": drawing for drawing in chapter.drawings}
        named |= {f"{start}{chapter.classes.name}": chapter.classes} if chapter.classes else {}
    for name, table in named.items():
        write_text(folder / f"{name}.csv", to_csv(table))
        write_text(folder / f"{name}.md", to_markdown(table))
    for name, drawing in drawings.items():
        _save(drawing, folder, name, ("png", "svg"))


def _save(drawing: Drawing, folder: Path, name: str, formats: Sequence[str]) -> list[Path]:
    return [save_drawing(drawing, folder / f"{name}.{kind}") for kind in formats]


def _make_folder(path: Path) -> None:
    with disk_errors(path):
        try:
            path.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            raise UserError(f"out must be in a folder, got the file {str(path)!r} in its way") from error
