"""One table or figure of the paper, from whatever runs there are to its files."""

from dataclasses import dataclass
from pathlib import Path

from pmae.config import replace
from pmae.config_file import with_settings
from pmae.errors import require, unknown_name
from pmae.evaluate.protocols import preset
from pmae.paper.fill import Need, fill, only_found, run_missing
from pmae.paper.pages import Page, nearest, notes_of, page_of, write_page
from pmae.paper.presets import chosen, kept, shortened
from pmae.paper.recipes import recipe
from pmae.paper.settings import settings_table
from pmae.paper.tables import PAIRS, Item, Plan, jobs_of
from pmae.report.tables import Table
from pmae.results import PROTOCOLS
from pmae.sweep.jobs import (
    Library,
    Workers,
    check_data,
)

SHOWN = ("cls", "mean")
SCHEME = (
    "these figures are drawings of the method, not measurements: the method is one screen of code, pmae/method.py, and "
    "`pmae paper reconstructions` shows the same stages on images"
)


@dataclass(frozen=True)
class Way:
    """How an item is evaluated, where its runs are looked for and made, and whether any may be made."""

    out: Path
    """Folder of the item's files; runs are made in `runs` below it."""
    places: tuple[Path, ...] = ()
    """More folders of runs to look in."""
    presets: tuple[str, ...] = ("paper",)
    kinds: tuple[str, ...] = ()
    """Protocols to keep of the item's own; all if empty."""
    head_epochs: int | None = None
    """Epochs of probes and fine-tuning; the preset's own if not given."""
    only_found: bool = False
    """Take the runs and results that are there, and run nothing."""
    pooling: str = "cls"
    """Which representation's accuracies to show: the paper's, or the mean of the patch tokens."""

    def __post_init__(self) -> None:
        if self.pooling not in SHOWN:
            raise unknown_name("pooling", self.pooling, SHOWN)
        require(len(set(self.presets)) == len(self.presets) > 0, "preset", "one or more, no two alike", self.presets)
        for name in self.presets:
            preset(name)
        for kind in self.kinds:
            if kind not in PROTOCOLS:
                raise unknown_name("protocols", kind, PROTOCOLS)
        require(self.head_epochs is None or self.head_epochs > 0, "--head-epochs", "at least 1", self.head_epochs)
        for place in self.places:
            holds = place.is_dir() and not (place / "config.json").exists()
            require(holds, "--runs", "folders that hold run folders", str(place))

    def library(self) -> Library:
        """The runs that it looks in."""
        return Library([self.out / "runs", *self.places])


def check(item: Item, plan: Plan, way: Way) -> None:
    """Refuse what cannot be done before anything is: protocols, methods, settings, and data that are not there."""
    kept(item, way.kinds)
    jobs = jobs_of(item, plan)
    if not way.only_found:
        check_data(jobs, way.library(), item.loosely)


def reproduce(item: Item, plan: Plan, way: Way, workers: Workers | None = None) -> tuple[Page, list[Path]]:
    """Run what is missing, here or by `workers`, evaluate what is not evaluated, and write the item's files."""
    if item.kind == "scheme":
        page = Page(notes=[SCHEME])
        return page, write_page(item, page, page.notes, way.out)
    if item.kind == "settings":
        page = Page([_settings(plan, way)])
        return page, write_page(item, page, page.notes, way.out)
    protocols = chosen(way.presets, kept(item, way.kinds), item.with_plain, way.head_epochs)
    need = Need(protocols, item.every_epoch, way.pooling, plan.device, plan.root, item.pictures)
    library = way.library()
    get = only_found(item, library) if way.only_found else run_missing(item, way.out / "runs", library, workers)
    filled = fill(item, plan, get, need)
    page = page_of(item, filled, need)
    page.notes.extend(notes_of(filled, need))
    if not any(one.runs for one in filled):
        page.notes.extend(nearest(item, plan, library))
    return page, write_page(item, page, page.notes, way.out)


def _settings(plan: Plan, way: Way) -> Table:
    base = recipe(PAIRS[plan.recipe][0])
    base = replace(base, train__epochs=plan.epochs) if plan.epochs else base
    config = with_settings(base, dict(plan.settings))
    protocols = shortened(preset(way.presets[0]), way.head_epochs)
    normalized = recipe(PAIRS[plan.recipe][1]).objective.normalize_patches
    return settings_table(config, protocols, f"recipe {plan.recipe}, preset {protocols.name}", normalized)
