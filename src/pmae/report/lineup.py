"""Which scores of which runs stand side by side, and under which names."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pmae.report.contents import Contents
from pmae.results import Score, pretrained


@dataclass(frozen=True)
class Entrant:
    """A score, the run that holds it, and a name that tells it from all others of the line-up."""

    run: Contents
    score: Score
    name: str


def lineup(runs: Sequence[Contents], split: str) -> list[Entrant]:
    """The last epoch of every pretrained encoder, then the baselines; one that runs measured alike comes once."""
    ours = [(run, score) for run in runs for score in pretrained(run.scores) if score.split == split]
    kept: dict[object, tuple[Contents, Score]] = {}
    for run in runs:
        for score in run.scores:
            if score.is_baseline and score.split == split:
                key = (score.protocol, score.preset, score.representation, score.data, score.accuracy)
                kept.setdefault(key, (run, score))
    found = [*ours, *kept.values()]
    names = Counter((score.protocol, score.preset, score.representation) for _, score in found)
    presets = len({score.preset for _, score in found})
    return [
        Entrant(run, score, _name(run, score, names, len(runs) > 1) + _how(run, score, presets)) for run, score in found
    ]


def epochs_of(run: Contents, protocol: str, split: str) -> dict[str, list[Score]]:
    """Scores of one run by the name of what was pretrained, each over its epochs in order."""
    found: dict[str, list[Score]] = {}
    presets = len({score.preset for score in run.scores})
    for score in run.scores:
        if not score.is_baseline and (score.protocol, score.split) == (protocol, split):
            name = dataclasses.replace(score, epoch=0).representation
            found.setdefault(name + _how(run, score, presets), []).append(score)
    return {name: sorted(scores, key=lambda score: score.epoch) for name, scores in found.items()}


def _how(run: Contents, score: Score, presets: int) -> str:
    """The preset, and the data where the run was scored on several sets: what else tells two scores apart."""
    several = len({other.data for other in run.scores}) > 1
    return (f", {score.preset}" if presets > 1 else "") + (f", {score.data}" if several else "")


def splits_of(runs: Sequence[Contents]) -> list[str]:
    """The splits that were scored, test first."""
    return sorted({score.split for run in runs for score in run.scores}, key=lambda split: (split != "test", split))


def has_epochs(run: Contents) -> bool:
    """Whether an encoder was evaluated at more than one epoch."""
    return len({score.epoch for score in run.scores if not score.is_baseline}) > 1


def _name(run: Contents, score: Score, names: Counter[tuple[str, str, str]], several: bool) -> str:
    """Runs are named where there are several, except for baselines that they share."""
    shared = score.is_baseline and names[score.protocol, score.preset, score.representation] == 1
    return f"{run.name}: {score.representation}" if several and not shared else score.representation
