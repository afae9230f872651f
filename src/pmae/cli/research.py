"""`pmae sweep`, `spaces` and `paper`: many runs at the same budget, set side by side."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from pmae.cli.parse import Count, Number, Switch, Text
from pmae.errors import UserError, require

if TYPE_CHECKING:
    from pmae.sweep.jobs import Workers
    from pmae.sweep.spaces import Grid

Settings = Annotated[list[str], tyro.conf.arg(name="set", metavar="NAME=VALUE...", help_behavior_hint="")]
Words = Annotated[list[str], tyro.conf.arg(metavar="WORD...", help_behavior_hint="")]
Numbers = Annotated[list[float], tyro.conf.arg(metavar="X...", help_behavior_hint="")]


@dataclass(frozen=True)
class ManyRuns:
    """What all commands that make many runs take."""

    root: str = "data"
    """Folder of named data sets."""
    seeds: list[int] = field(default_factory=lambda: [0])
    """Repetitions of pretraining and evaluation."""
    settings: Settings = field(default_factory=list)
    """Further settings of all runs."""
    runs: Words = field(default_factory=list)
    """More folders of runs to look in."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    at_once: Count = None
    """Runs at a time on this machine, on one GPU or the CPU; 1 if not given."""
    ray: Annotated[str | None, tyro.conf.arg(metavar="local|HOST:PORT", help_behavior_hint="")] = None
    """Run several at a time by Ray, on this machine or on a cluster."""
    gpus_each: Number = None
    """With --ray: share of a GPU for a run; 1, or 0 where there are none."""
    cpus_each: Number = None
    """With --ray: CPU cores for a run; 1 if not given."""

    @property
    def places(self) -> tuple[Path, ...]:
        """The folders of --runs."""
        return tuple(map(Path, self.runs))
