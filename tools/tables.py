"""Write the tables of README.md and of pages in results/ anew from run folders there: python tools/tables.py

A table stands between `<!-- table: NAME -->` and `<!-- end -->`; everything else on a page is left as it is.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from headline import COLUMNS, LONG, PUBLISHED, SETS, headline, long_kinds
from pairs import CIFAR10, MEDICAL, pairs_table
from published_runs import (
    FIGURES,
    ROOT,
    RUNS,
    Kind,
    all_scores,
    cell,
    interval,
    line,
    of_encoder,
    operations,
    published_runs,
)
from trials import (
    ABLATION,
    ENDS,
    LONGER,
    MUON,
    STAGES,
    contrast_table,
    cpu_table,
    frontier_table,
    looked_at,
    looks_table,
    medical_table,
    speedrun_table,
    tiny_table,
)

from pmae.config import Config
from pmae.files import write_text
from pmae.paper.runner import fill_cells, page_of, requirements, status
from pmae.paper.tables import ITEMS, RATIOS, RunChoices
from pmae.report.page import Page
from pmae.report.published import published, published_accuracy, published_split
from pmae.report.tables import Table, to_markdown
from pmae.results import Score
from pmae.runs import Run
from pmae.sweep.find import RunIndex
from pmae.sweep.scoring import Scoring
from pmae.train.stages import first_stage

PAGES = (*(ROOT / "results" / f"{name}.md" for name in ("RESULTS", "photographs", "frontier")), ROOT / "README.md")
FEATURES = {"cls": "[CLS]", "mean": "mean"}
COMPARED = ("ours", "mae_ours", "masking", "mae_masking")
"""Recipes whose runs stand in the tables of accuracies, in this order."""
SWEPT = 50
"""Epochs of the runs that compare ratios."""
METHODS = {"mae": "MAE", "pmae": "PMAE", "pmae-pixels": "PMAE, pixel objective"}
"""Methods whose ratios are compared, as their table calls them."""
SWEEP = (("encoder.patch_size", "8"), ("decoder.name", "small"))
"""What all runs that compare ratios have in common with those that compare masking spaces."""


def paper_table(folder: Path = RUNS) -> str:
    """The long runs beside the published numbers, a table a data set; their learning curves, once they are drawn."""
    return "\n".join([*(_paper_set(data, folder) for data in SETS), *_picture("paper-curves", "Learning curves")])


def _picture(name: str, alt: str) -> list[str]:
    return [f"![{alt}](figures/{name}.png)\n"] if (FIGURES / f"{name}.png").is_file() else []


def _paper_set(data: str, folder: Path) -> str:
    kinds = {kind: published_runs(folder)[kind] for kind in long_kinds(data, folder)}
    name = published()["data"][data]
    header = [f"{name}, {LONG} epochs", "preset", "images", "features", *COLUMNS.values(), "operations"]
    lines = [line(header), "|---" * len(header) + "|"]
    for (method, random), key in PUBLISHED.items():
        alike = {k: runs for k, runs in kinds.items() if (k.method, k.ratio is None) == (method, random)}
        if random and not alike:
            continue
        said = [published_accuracy(protocol, key, data) for protocol in COLUMNS]
        shown = ["" if value is None else f"{value:.1f}" for value in said]
        place = [f"**{published()['methods'][key]}: published**", "paper", published_split(data), "[CLS]"]
        lines.append(line([*place, *shown, ""]))
        for kind, runs in alike.items():
            lines += _measured(kind, runs)
    return "\n".join([*lines, ""])


def _measured(kind: Kind, runs: Sequence[Run]) -> list[str]:
    """A line a preset, split and pooling of the runs of a kind."""
    scores = [score for run in runs for score in of_encoder(run)]
    seeds = f"{len(runs)} run{'s' * (len(runs) > 1)}"
    lines: list[str] = []
    for preset in ("paper", "released", "plain", "strong"):
        for split in ("test", "val"):
            for pooling, features in FEATURES.items():
                here = [s for s in scores if (s.preset, s.split, s.pooling) == (preset, split, pooling)]
                shown = [cell([s for s in here if s.protocol == protocol]) for protocol in COLUMNS]
                if any(shown):
                    name = f"here, {kind.title}, {kind.settings}, {seeds}" if not lines else ""
                    spent = operations(runs[0]) if not lines else ""
                    lines.append(line([name, preset, split, features, *shown, spent]))
    return lines


def accuracy_tables(split: str, folder: Path = RUNS) -> str:
    """The runs of other lengths with their baselines, a table a data set and preset."""
    kinds = published_runs(folder)
    plain = [k for k in kinds if k.epochs not in (LONG, SWEPT) and k.recipe in COMPARED]
    order = sorted(plain, key=lambda kind: (COMPARED.index(kind.recipe), -kind.epochs))
    made = []
    for data in SETS:
        for preset in ("strong", "paper"):
            rows: dict[str, dict[str, str]] = {}
            for kind in (kind for kind in order if kind.data == data):
                run = kinds[kind][0]
                config = run.config
                for score in all_scores(run):
                    if (score.preset, score.split) == (preset, split):
                        row = rows.setdefault(_representation(kind, config, score), {})
                        row |= {
                            score.protocol: cell([score]),
                            "operations": "" if score.is_baseline else operations(run),
                        }
            if rows:
                columns = {**COLUMNS, "operations": "operations"}
                body = [line([name, *(row.get(column, "") for column in columns)]) for name, row in rows.items()]
                header = [line(["representation", *columns.values()]), "|---" * 6 + "|"]
                made += [f"#### {data}, preset `{preset}`, {split} split\n", *header, *body, ""]
    return "\n".join(made)


def photograph_table(data: str = "imagenette", folder: Path = RUNS) -> str:
    """The runs at 224 pixels and their baselines, the best linear probe first, with 95% intervals."""
    kinds = [(kind, run) for kind, runs in published_runs(folder).items() if kind.data == data for run in runs]
    rows: dict[str, dict[str, Score]] = {}
    spent: dict[str, str] = {}
    for kind, run in kinds:
        config = run.config
        seed = f", seed {config.train.seed}" * (config.train.seed > 0)
        for score in (score for score in all_scores(run) if score.split == "test"):
            name = _representation(kind, config, score) + ("" if score.is_baseline else seed)
            rows.setdefault(name, {})[score.protocol] = score
            spent[name] = "0" if score.is_baseline else operations(run)
    ordered = sorted(rows, key=lambda name: -(rows[name]["linear"].accuracy.value or 0))
    shown = {name: [interval(rows[name].get(protocol)) for protocol in ("linear", "knn")] for name in ordered}
    body = [line([name, *cells, spent[name]]) for name, cells in shown.items()]
    header = line(["representation", "linear", "k-NN", "operations"])
    return "\n".join([header, "|---" * 4 + "|", *body, ""])


def _representation(kind: Kind, config: Config, score: Score) -> str:
    title = f"{kind.title}, `{kind.recipe}`" if "ours" in kind.recipe else kind.title
    title += f" with {kind.local_views} local views" if kind.local_views else ""
    title += ", Muon" if config.optim.name == "muon" else ""
    name = score.label if score.is_baseline else f"{title}, {_epochs(config)} epochs"
    return f"{name} ({score.pooling})" if score.pooling in FEATURES else name


def _epochs(config: Config) -> str:
    """How many, and before them how many with larger patches."""
    if not config.encoder.first_patch_size:
        return str(config.train.epochs)
    first, patch = first_stage(config).train.epochs, config.encoder.first_patch_size
    return f"{first} (patches of {patch}) and {config.train.epochs}"


def ratio_page(name: str, pooling: str = "cls", folder: Path = RUNS) -> Page:
    """The page of an item of the paper from what results/runs has of the runs that compare ratios."""
    # MAE's usual share is not among the nine, but stands in every other table.
    ratios = tuple(sorted({*RATIOS, 0.75})) if name == "ratio" else RATIOS
    item, chosen = ITEMS[name], RunChoices("masking", ("cifar10",), SWEPT, ratios=ratios, settings=SWEEP)
    needed = requirements(item, chosen, Scoring(presets=("strong", "paper"), pooling=pooling))
    index = RunIndex([folder])
    filled = fill_cells(item, chosen, lambda specs, _: [index.first(spec.config) for spec in specs], needed)
    return page_of(item, filled, needed)


def ratio_tables(folder: Path = RUNS) -> str:
    """Accuracy by hidden share for each pooling, then mean and standard error over the shares."""
    made = []
    for pooling in FEATURES:
        table = ratio_page("ratio", pooling, folder).tables[0]
        rows = [row[1:] for row in table.rows if any(value is not None for value in row[4:])]
        made.append(
            to_markdown(Table(table.name, f"Features: {FEATURES[pooling]}", table.header[1:], rows, table.note))
        )
        if not rows:
            return "Not run yet.\n"
    made.append(_ratio_operations(table.header[4:], folder))
    spread = ratio_page("spread", "mean", folder).tables[0]
    # Over fewer shares than all nine, a mean says which ones were run and little else.
    whole = [row[1:] for row in spread.rows if row[3] == str(len(RATIOS))]
    title = "Mean and standard error over the nine shares, linear probe, features: mean"
    if whole:
        made.append(to_markdown(Table(spread.name, title, spread.header[1:], whole, spread.note)))
        made += _picture("paper-spread", "Mean and standard error over the nine shares")
    return "\n".join([*made, *_picture("paper-ratio", "Accuracy against the masking ratio")])


def _ratio_operations(ratios: Sequence[str], folder: Path) -> str:
    """What the runs that compare ratios spent: PMAE the same at every share, MAE less the more it hides."""
    spent: dict[str, dict[str, str]] = {}
    for kind, runs in published_runs(folder).items():
        if (kind.data, kind.epochs, kind.decoder) == ("cifar10", SWEPT, "small") and kind.method in METHODS:
            ratio = "random" if kind.ratio is None else f"{kind.ratio:.0%}"
            spent.setdefault(METHODS[kind.method], {})[ratio] = operations(runs[0])
    rows = [[name, *(spent[name].get(ratio) for ratio in ratios)] for name in METHODS.values() if name in spent]
    note = "Per image, times 50,000 images, times epochs; a random share counts as its mean."
    return to_markdown(Table("operations", "Operations of pretraining", ["method", *ratios], rows, note))


TABLES: dict[str, Callable[[], str]] = {
    "paper": paper_table,
    "pairs": lambda: pairs_table(CIFAR10),
    "medical_pairs": lambda: pairs_table(MEDICAL),
    "ratio": ratio_tables,
    "test": lambda: accuracy_tables("test"),
    "val": lambda: accuracy_tables("val"),
    "headline": headline,
    "photographs": photograph_table,
    "contrast": contrast_table,
    "frontier": frontier_table,
    "patches": lambda: looked_at(STAGES),
    "muon": lambda: looked_at(MUON),
    "stages": lambda: looked_at(LONGER),
    "ends": lambda: looked_at(ENDS),
    "ablation": lambda: looked_at(ABLATION),
    "tiny": tiny_table,
    "medical": medical_table,
    "cpu": cpu_table,
    "speedrun": speedrun_table,
    "looks": looks_table,
    "flowers": lambda: photograph_table("flowers"),
    "status": lambda: to_markdown(status(RunChoices(), Scoring(folders=(RUNS,), only_found=True))),
}


def filled(text: str) -> str:
    """A page with its tables made anew."""
    pattern = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
    return pattern.sub(lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n{found[3]}", text)


def main() -> None:
    """Fill the pages."""
    for page in PAGES:
        write_text(page, filled(page.read_text(encoding="utf-8")))
        print(page)


if __name__ == "__main__":
    main()
