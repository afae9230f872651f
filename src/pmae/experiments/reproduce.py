"""One table or figure of the paper, from whatever runs there are to its files."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pmae.config import replace
from pmae.config_file import with_settings
from pmae.errors import UserError, require, unknown_name
from pmae.evaluate.protocols import PROTOCOLS, preset
from pmae.experiments.evaluations import Need
from pmae.experiments.fill import fill, only_found, run_missing
from pmae.experiments.jobs import Workers
from pmae.experiments.library import Library
from pmae.experiments.pages import Page, notes_of, page_of, write_page
from pmae.experiments.paper import PAIRS, Item, Plan
from pmae.experiments.presets import chosen, shortened
from pmae.experiments.recipes import recipe
from pmae.experiments.settings import settings_table
from pmae.report.tables import Table

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


def reproduce(item: Item, plan: Plan, way: Way, workers: Workers | None = None) -> tuple[Page, list[Path]]:
    """Run what is missing, here or by `workers`, evaluate what is not evaluated, and write the item's files."""
    if item.kind == "scheme":
        return Page(), write_page(item, Page(), [SCHEME], way.out)
    if item.kind == "settings":
        page = Page([_settings(plan, way)])
        return page, write_page(item, page, [], way.out)
    protocols = chosen(way.presets, kept(item, way.kinds), item.with_plain, way.head_epochs)
    need = Need(protocols, item.every_epoch, way.pooling, plan.device, plan.root)
    folder = way.out / "runs"
    library = Library([folder, *way.places])
    get = only_found(item, library) if way.only_found else run_missing(item, folder, library, workers)
    filled = fill(item, plan, get, need)
    page = page_of(item, filled, need)
    return page, write_page(item, page, notes_of(filled), way.out)


def kept(item: Item, kinds: Sequence[str]) -> list[str]:
    """The item's protocols, or those of them that were asked for."""
    for kind in kinds:
        if kind not in PROTOCOLS:
            raise unknown_name("protocols", kind, PROTOCOLS)
    found = [kind for kind in item.protocols if not kinds or kind in kinds]
    if item.protocols and not found:
        raise UserError(f"protocols of {item.name!r} must be among {', '.join(item.protocols)}, got {', '.join(kinds)}")
    return found


def _settings(plan: Plan, way: Way) -> Table:
    base = recipe(PAIRS[plan.recipe][0])
    base = replace(base, train__epochs=plan.epochs) if plan.epochs else base
    config = with_settings(base, dict(plan.settings))
    protocols = shortened(preset(way.presets[0]), way.head_epochs)
    return settings_table(config, protocols, f"recipe {plan.recipe}, preset {protocols.name}")
