"""The report: one HTML file that needs nothing else, and a folder with every table and figure beside it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from pmae.errors import UserError, require
from pmae.report import overview, summary
from pmae.report.charts import figures_across, figures_of, save_drawing
from pmae.report.contents import Contents, file_name, load_all
from pmae.report.lineup import splits_of
from pmae.report.style import Drawing, as_inline_svg
from pmae.report.tables import Table, to_csv, to_html, to_markdown
from pmae.results import Duplicates
from pmae.runs import disk_errors, write_whole


@dataclass(frozen=True)
class Plate:
    """A figure in the page."""

    title: str
    caption: str
    svg: Markup


@dataclass(frozen=True)
class Chapter:
    """What the page says about one run alone."""

    run: Contents
    anchor: str
    notes: list[str]
    drawings: list[Drawing]
    plates: list[Plate]
    classes: Table | None
    settings: dict[str, str]


def write_report(runs: Sequence[Path | str], out: Path | str) -> None:
    """Write the page for these run folders to `out`, and its tables and figures to the folder `<stem>_files`."""
    out = Path(out)
    require(not out.is_dir(), "out", "a file such as report.html, not a folder", str(out))
    beside = out.with_name(f"{out.stem}_files")
    for folder in (out.parent, beside):
        _make_folder(folder)
    read, refused = load_all(runs)
    across = figures_across(read)
    chapters = [_chapter(run) for run in read]
    tables = _tables(read)
    page = render(read, refused, across, chapters, tables)
    _write_beside(beside, across, chapters, tables)
    write_whole(out, lambda temporary: temporary.write_text(page, encoding="utf-8"))


def render(
    runs: Sequence[Contents],
    refused: Sequence[str],
    across: Sequence[Drawing],
    chapters: Sequence[Chapter],
    tables: dict[str, Table],
) -> str:
    """The page as text."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("pmae.report", "")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.globals["as_table"] = to_html
    plates = {drawing.name: _plate(drawing, f"all-{drawing.name}") for drawing in across}
    return environment.get_template("page.html.j2").render(
        title=", ".join(run.name for run in runs) or "no runs",
        runs=runs,
        refused=refused,
        verdicts=[summary.verdict(run, runs) for run in runs],
        between=summary.between(runs),
        bars=[plate for name, plate in plates.items() if name.startswith("accuracy-")],
        curves=plates.get("learning-curves"),
        chapters=chapters,
        tables=tables,
        standings=[table for name, table in tables.items() if name.startswith("accuracy-")],
        metrics=[table for name, table in tables.items() if name.startswith("metrics-")],
        remarks=_remarks(chapters),
    )


def _chapter(run: Contents) -> Chapter:
    anchor, drawings = file_name(run.name), figures_of(run)
    plates = [_plate(drawing, f"{anchor}-{drawing.name}") for drawing in drawings]
    return Chapter(run, anchor, _notes(run), drawings, plates, overview.per_class(run), overview.settings(run))


def _plate(drawing: Drawing, name: str) -> Plate:
    svg = as_inline_svg(drawing.figure, name, f"{drawing.title}. {drawing.caption}")
    return Plate(drawing.title, drawing.caption, Markup(svg))


def _notes(run: Contents) -> list[str]:
    """What a reader of the results must know: about the data, the evaluation and duplicates, each said once."""
    said = [str(note) for note in run.data.get("notes", [])]
    for evaluation in run.evaluations:
        said += [*evaluation.data.notes, *evaluation.notes]
        said += [note for score in evaluation.scores for note in score.notes]
        said += [_duplicates(split, found) for split, found in evaluation.data.duplicates.items() if found.count]
    return list(dict.fromkeys(said))


def _remarks(chapters: Sequence[Chapter]) -> list[tuple[str, list[str], bool]]:
    """What there is to know about each run, once for runs that share it; and whether it is bad news."""
    found: dict[tuple[str, ...], list[Contents]] = {}
    for chapter in chapters:
        found.setdefault((*chapter.run.problems, *chapter.notes), []).append(chapter.run)
    return [
        (", ".join(r.name for r in runs), list(said), bool(runs[0].problems)) for said, runs in found.items() if said
    ]


def _duplicates(split: str, found: Duplicates) -> str:
    named = [f"{pair.held_out} = {pair.train}" for pair in found.pairs[:3]]
    example = f", for example {', '.join(named)}" if named else ""
    images = "1 image" if found.count == 1 else f"{found.count} images"
    return f"{images} of {split} can be found byte for byte in the training part as well{example}"


def _tables(runs: Sequence[Contents]) -> dict[str, Table]:
    splits = splits_of(runs)
    made = [overview.data_and_method(runs), overview.differing_settings(runs)]
    made += [make(runs, split) for make in (overview.standings, overview.all_metrics) for split in splits]
    made += [overview.cost(runs), overview.environment(runs)]
    return {table.name: table for table in made}


def _write_beside(
    folder: Path, across: Sequence[Drawing], chapters: Sequence[Chapter], tables: dict[str, Table]
) -> None:
    """CSV and Markdown of the tables, PNG and SVG of the figures; names begin with the run where there are several."""
    named = {table.name: table for table in tables.values() if table.rows}
    drawings = {drawing.name: drawing for drawing in across}
    for chapter in chapters:
        start = f"{chapter.anchor}-" if len(chapters) > 1 else ""
        drawings |= {f"{start}{drawing.name}": drawing for drawing in chapter.drawings}
        named |= {f"{start}{chapter.classes.name}": chapter.classes} if chapter.classes else {}
    for name, table in named.items():
        _write_text(folder / f"{name}.csv", to_csv(table))
        _write_text(folder / f"{name}.md", to_markdown(table))
    for name, drawing in drawings.items():
        for kind in ("png", "svg"):
            save_drawing(drawing, folder / f"{name}.{kind}")


def _write_text(path: Path, text: str) -> None:
    write_whole(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def _make_folder(path: Path) -> None:
    with disk_errors(path):
        try:
            path.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            raise UserError(f"out must be in a folder, got the file {str(path)!r} in its way") from error
