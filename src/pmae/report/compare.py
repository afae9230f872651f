"""Scores set beside others: those of several runs and of baselines (did pretraining help?), and how sure that is."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from pmae.report.contents import Contents
from pmae.report.difference import difference
from pmae.report.style import minus
from pmae.results import BASELINES, LAST, Score
from pmae.standing import pretrained, primary

PROBES = {"linear": "a linear probe", "knn": "k-NN", "mlp": "an MLP probe", "finetune": "fine-tuning"}
"""How a sentence calls each protocol; the first that was evaluated stands for a run."""
RIVALS = ("random weights", "raw pixels", "pca features")
SPOKEN = {
    "random weights": "the same encoder with random weights",
    "pca features": "PCA features",
    "from scratch": "training from scratch",
}


@dataclass(frozen=True)
class Entrant:
    """A score, the run that holds it, and a name that tells it from all others of the line-up."""

    run: Contents
    score: Score
    name: str


def lineup(runs: Sequence[Contents], split: str) -> list[Entrant]:
    """The last epoch of every pretrained encoder, then the baselines, in the run's primary pooling.

    A baseline that runs measured alike comes once.
    """
    found = [(run, score) for run in runs for score in primary(pretrained(run.scores)) if score.split == split]
    baselines: dict[object, tuple[Contents, Score]] = {}
    for run in runs:
        for score in primary(run.scores):
            if score.is_baseline and score.split == split:
                key = (score.protocol, score.preset, score.representation, score.data, score.accuracy)
                baselines.setdefault(key, (run, score))
    found += baselines.values()
    alike = Counter((score.protocol, score.preset, score.representation) for _, score in found)
    presets = len({score.preset for _, score in found})
    entrants = []
    for run, score in found:
        # Runs are named where there are several, except for baselines that they share.
        shared = score.is_baseline and alike[score.protocol, score.preset, score.representation] == 1
        start = "" if shared or len(runs) == 1 else f"{run.name}: "
        entrants.append(Entrant(run, score, start + score.representation + _how(run, score, presets)))
    return entrants


def epochs_of(run: Contents, protocol: str, split: str) -> dict[str, list[Score]]:
    """Scores of one run by the name of what was pretrained, each over its epochs in order."""
    found: dict[str, list[Score]] = {}
    presets = len({score.preset for score in run.scores})
    for score in sorted(run.scores, key=lambda score: score.epoch):
        if not score.is_baseline and (score.protocol, score.split) == (protocol, split):
            name = dataclasses.replace(score, epoch=0).representation
            found.setdefault(name + _how(run, score, presets), []).append(score)
    return found


def _how(run: Contents, score: Score, presets: int) -> str:
    several = len({other.data for other in run.scores}) > 1
    return (f", {score.preset}" if presets > 1 else "") + (f", {score.data}" if several else "")


def splits_of(runs: Sequence[Contents]) -> list[str]:
    """The splits that were scored, test first."""
    return sorted({score.split for run in runs for score in run.scores}, key=lambda split: (split != "test", split))


@dataclass(frozen=True)
class Verdict:
    """A headline of kind yes, no or open; the evidence, the comparisons it rests on, and what else there is to say."""

    run: str
    kind: str
    headline: str
    sentences: list[str]
    comparisons: list[str] = field(default_factory=list)
    more: list[str] = field(default_factory=list)


def verdict(run: Contents, others: Sequence[Contents] = ()) -> Verdict:
    """Compare the pretrained encoder with what was not pretrained, on the same protocol, split and preset.

    Baselines that were evaluated with one of the other runs of the page serve this one too.
    """
    score, borrowed = main_score(run), _borrowed(run, others)
    run = dataclasses.replace(run, scores=[*run.scores, *(score for found in borrowed.values() for score in found)])
    more = [*_finetuning(run), *_segmentation(run), _training_words(run)]
    if score is None:
        words = "Nothing was evaluated with labels, so this page cannot say whether pretraining helped."
        tip = "Evaluate the run together with its baselines (random weights, raw pixels, PCA features) to find out."
        return Verdict(run.name, "open", "No evidence yet", [words, tip], more=more)
    if borrowed:
        more.append(f"Baselines are those evaluated with {_listed(list(borrowed))}.")
    rivals = [rival for rival in primary(run.scores) if rival.label in RIVALS and _comparable(score, rival)]
    missing = [name for name in RIVALS if name not in {rival.label for rival in rivals}]
    kind, headline = _judge(score, rivals, missing)
    limits = [f"Not compared, because not evaluated in the same way: {_listed(missing)}."] if missing else []
    if score.chance is not None and score.accuracy.low is not None and score.accuracy.low <= score.chance:
        limits.append(f"Always answering the commonest class gets {score.chance:.1f}%: this is not clearly above it.")
    return Verdict(run.name, kind, headline, [_evidence(score)], _compared(run, score, rivals), [*limits, *more])


def _evidence(score: Score) -> str:
    interval = score.accuracy
    known = interval.low is not None and interval.high is not None
    bounds = f" (95% interval {interval.low:.1f} to {interval.high:.1f})" if known else ""
    where = f"{score.images:,} images of the {score.split} split of {score.data}"
    how = f"{PROBES[score.protocol]} on {score.representation}"
    return f"On {where}, {how} gets {interval.value:.1f}% right{bounds}."


def _compared(run: Contents, score: Score, rivals: Sequence[Score]) -> list[str]:
    """A run's score beside those of its rivals, of its other encoders, and of its own read at several blocks."""
    ours = pretrained(run.scores)
    twins = [s for s in primary(ours) if s.label != score.label and _comparable(score, s)]
    deeper = [s for s in ours if s.label == score.label and s.pooling.startswith(LAST)]
    deeper = [s for s in deeper if s.pooling != score.pooling and _same_task(score, s)]
    said = [_compare(score, other, SPOKEN.get(other.label, other.label)) for other in (*rivals, *twins)]
    said += [_compare(score, s, f"the same encoder by its {s.pooling_name} side by side") for s in deeper]
    return [f"{words}." for words in said]


def main_score(run: Contents, with_classes: bool = False) -> Score | None:
    """The score that stands for the run: its own method first, then test, the linear probe, and frozen encoders.

    `with_classes`: only one that tells which classes are taken for which.
    """
    order, own, trained_on = list(PROBES), run.method.lower(), run.data.get("name")
    found = [s for s in primary(pretrained(run.scores)) if s.protocol in order and s.accuracy.value is not None]
    found = [s for s in found if s.confusion or not with_classes]
    found.sort(key=lambda s: (s.method != own, s.data != trained_on, s.split != "test", order.index(s.protocol)))
    return found[0] if found else None


def between(runs: Sequence[Contents]) -> list[str]:
    """The first run against each of the others, where both were evaluated in the same way."""
    scored = [(f"{run.name} ({score.label})", score) for run in runs if (score := main_score(run)) is not None]
    if not scored:
        return []
    (first, best), *others = scored
    return [f"{first} gets {_compare(best, s, name)}." for name, s in others if _comparable(best, s)]


def _compare(score: Score, rival: Score, name: str) -> str:
    points = _points(score, rival)
    distance = f"{abs(points):.1f} points {'more' if points > 0 else 'less'} than" if points else "as much as"
    return f"{distance} {name} ({rival.accuracy.value:.1f}%); {difference(score, rival).words}"


def _borrowed(run: Contents, others: Sequence[Contents]) -> dict[str, list[Score]]:
    """Baselines this run lacks, by the run that has them, of the same encoder and statistics: they are the same."""
    own, found = {score.label for score in run.scores}, dict[str, list[Score]]()
    for other in others:
        alike = other.config.encoder == run.config.encoder
        if other.name != run.name and alike and other.config.data.standardize == run.config.data.standardize:
            lent = [s for s in other.scores if s.label in BASELINES and s.label not in own]
            found |= {other.name: lent} if lent else {}
            own |= {score.label for score in lent}
    return found


def _comparable(score: Score, rival: Score) -> bool:
    """Whether both were measured alike; what several blocks say together has no match in what the last says alone."""
    poolings = {one.pooling for one in (score, rival) if one.pooling_name}
    return _same_task(score, rival) and (len(poolings) < 2 or not any(name.startswith(LAST) for name in poolings))


def _same_task(score: Score, rival: Score) -> bool:
    alike = all(getattr(score, key) == getattr(rival, key) for key in ("protocol", "split", "preset", "images"))
    return alike and score.same_images(rival) and rival.accuracy.value is not None


def _points(score: Score, rival: Score) -> float:
    # As the rounded numbers on the page show it.
    return round(round(score.accuracy.value or 0, 1) - round(rival.accuracy.value or 0, 1), 1)


def _judge(score: Score, rivals: Sequence[Score], missing: Sequence[str]) -> tuple[str, str]:
    """Yes, no or open, and why in a line that calls no lead one which may be chance."""
    if not rivals:
        return "open", "No evidence yet: nothing to compare with was evaluated"
    unbeaten = [rival for rival in rivals if _points(score, rival) <= 0]
    clear = [rival for rival in rivals if rival not in unbeaten and difference(score, rival).clear]
    close = [rival for rival in rivals if rival not in unbeaten and rival not in clear]
    chance = f"the lead{'s' * (len(close) > 1)} over {_names(close)} may be chance"
    if len(unbeaten) == len(rivals):
        return "no", f"No: pretraining did not beat {_names(rivals, 'or')}"
    if unbeaten:
        why = [f"clearly ahead of {_names(clear)}"] * bool(clear) + [chance] * bool(close)
        return "no", f"Not convincingly: {'; '.join(why)}; not ahead of {_names(unbeaten, 'or')}"
    if close:
        how = f"Partly: clearly ahead of {_names(clear)}, but" if clear else "Unclear:"
        return "open", f"{how} {chance}"
    if missing:
        return "open", f"So far yes: clearly better than {_names(rivals)}; {_listed(missing)} not evaluated"
    return "yes", "Yes: pretraining helped"


def _finetuning(run: Contents) -> list[str]:
    own = [s for s in pretrained(run.scores) if s.method == run.method.lower() and s.accuracy.value is not None]
    tuned = sorted((s for s in own if s.protocol == "finetune"), key=lambda s: s.split != "test")
    if not tuned:
        return []
    start = f"Fine-tuned, it gets {tuned[0].accuracy.value:.1f}% right on {tuned[0].split}"
    rivals = [s for s in run.scores if s.label == "from scratch" and _comparable(tuned[0], s)]
    if not rivals:
        return [f"{start}; training from scratch was not evaluated."]
    return [f"{start}: {_compare(tuned[0], rivals[0], SPOKEN['from scratch'])}."]


def _segmentation(run: Contents) -> list[str]:
    """The mIoU of the run's patch tokens, and of what they must beat."""
    scores = run.segmentation.scores if run.segmentation else {}
    found = [f"{s.miou.value:.1%} on {name}" for name, s in scores.items() if s.miou.value is not None]
    return [f"A linear segmentation probe gets a mIoU of {_listed(found)}."] if found else []


def _training_words(run: Contents) -> str:
    """What training itself says about its success: R2 on held-out images, or on its own where none were held out."""
    if run.given:
        return "The weights were scored as they were given: nothing was trained here."
    last = next((line[run.r2_name] for line in reversed(run.signals) if line.get(run.r2_name) is not None), None)
    if last is None:
        return "How much of the hidden part is predicted on held-out images was not measured."
    if last <= 0:
        shown = minus(f"R² {last:.1%}")
        return f"The model predicts hidden parts no better than their mean ({shown}): it has not learned the task."
    return f"It predicts {last:.1%} of the hidden variance of {run.measured_on} (R²)."


def _names(scores: Sequence[Score], word: str = "and") -> str:
    return _listed([score.label.replace("pca", "PCA") for score in scores], word)


def _listed(names: Sequence[str], word: str = "and") -> str:
    return f" {word} ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)
