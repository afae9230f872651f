"""Did pretraining help? The answer in plain words, from the evaluated representations of a run."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pmae.report.contents import Contents
from pmae.report.style import minus
from pmae.results import Score, pretrained, primary

PROBES = {"linear": "a linear probe", "knn": "k-NN", "mlp": "an MLP probe", "finetune": "fine-tuning"}
"""How a sentence calls each protocol; the first that was evaluated stands for a run."""
RIVALS = ("random weights", "raw pixels", "pca features")
BASELINES = (*RIVALS, "from scratch")
SPOKEN = {
    "random weights": "the same encoder with random weights",
    "pca features": "PCA features",
    "from scratch": "training from scratch",
}


@dataclass(frozen=True)
class Verdict:
    """A headline of kind yes, no or open; the evidence, the comparisons it rests on, and what else there is to say."""

    run: str
    kind: str
    headline: str
    sentences: list[str] = field(default_factory=list)
    comparisons: list[str] = field(default_factory=list)
    more: list[str] = field(default_factory=list)


def verdict(run: Contents, others: Sequence[Contents] = ()) -> Verdict:
    """Compare the pretrained encoder with what was not pretrained, on the same protocol, split and preset.

    Baselines that were evaluated with one of the other runs of the page serve this one too.
    """
    borrowed, lenders = _borrowed(run, others)
    run, score = replace(run, scores=[*run.scores, *borrowed]), main_score(run)
    more = [*_finetuning(run), *_training_words(run)]
    if lenders:
        more.append(f"Baselines are those evaluated with {_listed(lenders)}.")
    if score is None:
        words = "Nothing was evaluated with labels, so this page cannot say whether pretraining helped."
        tip = "Evaluate the run together with its baselines (random weights, raw pixels, PCA features) to find out."
        return Verdict(run.name, "open", "No evidence yet", [words, tip], [], more)
    rivals = [rival for rival in primary(run.scores) if rival.label in RIVALS and _comparable(score, rival)]
    twins = [s for s in primary(pretrained(run.scores)) if s.label != score.label and _comparable(score, s)]
    kind, headline = _judge(score, rivals)
    compared = [f"{compare(score, other, SPOKEN.get(other.label, other.label))}." for other in (*rivals, *twins)]
    return Verdict(run.name, kind, headline, [_evidence(score)], compared, [*_limits(score, rivals), *more])


def main_score(run: Contents, with_classes: bool = False) -> Score | None:
    """The score that stands for the run: its own method first, then test, the linear probe, and frozen encoders.

    `with_classes`: only one that tells which classes are taken for which.
    """
    order, own = list(PROBES), run.method.lower()
    found = [s for s in primary(pretrained(run.scores)) if s.protocol in order and s.accuracy.value is not None]
    found = [s for s in found if s.confusion or not with_classes]
    trained_on = run.data.get("name")
    found.sort(key=lambda s: (s.method != own, s.data != trained_on, s.split != "test", order.index(s.protocol)))
    return found[0] if found else None


def compare(score: Score, rival: Score, name: str) -> str:
    """How many points lie between a score and that of a named rival, and whether their intervals overlap."""
    points = _points(score, rival)
    distance = f"{abs(points):.1f} points {'more' if points > 0 else 'less'} than" if points else "as much as"
    overlaps = score.accuracy.overlaps(rival.accuracy)
    overlap = "the intervals overlap, so this may be chance" if overlaps else "the intervals do not overlap"
    return f"{distance} {name} ({rival.accuracy.value:.1f}%): {overlap}"


def between(runs: Sequence[Contents]) -> list[str]:
    """The first run against each of the others, where both were evaluated in the same way."""
    scored = [(run, score) for run in runs if (score := main_score(run)) is not None]
    said = []
    for run, score in scored[1:]:
        first, best = scored[0]
        if _comparable(best, score):
            said.append(f"{first.name} ({best.label}) gets {compare(best, score, f'{run.name} ({score.label})')}.")
    return said


def _borrowed(run: Contents, others: Sequence[Contents]) -> tuple[list[Score], list[str]]:
    """Baselines this run lacks, from runs of the same encoder and statistics, which would have the same; and whose."""
    own, found, lenders = {score.label for score in run.scores}, list[Score](), list[str]()
    for other in others:
        alike = other.config.encoder == run.config.encoder
        if other.name == run.name or not alike or other.config.data.standardize != run.config.data.standardize:
            continue
        lent = [s for s in other.scores if s.label in BASELINES and s.label not in own]
        if lent:
            found, lenders, own = [*found, *lent], [*lenders, other.name], own | {score.label for score in lent}
    return found, lenders


def _comparable(score: Score, rival: Score) -> bool:
    alike = all(getattr(score, key) == getattr(rival, key) for key in ("protocol", "split", "preset", "data", "images"))
    return alike and rival.accuracy.value is not None


def _points(score: Score, rival: Score) -> float:
    """The difference as the rounded numbers on the page show it."""
    return round(round(score.accuracy.value or 0, 1) - round(rival.accuracy.value or 0, 1), 1)


def _judge(score: Score, rivals: Sequence[Score]) -> tuple[str, str]:
    """Yes, no or open, and why in a line: what of the rivals is beaten, and what by more than the intervals."""
    if not rivals:
        return "open", "No evidence yet: nothing to compare with was evaluated"
    beaten = [rival for rival in rivals if _points(score, rival) > 0]
    close = [rival for rival in beaten if score.accuracy.overlaps(rival.accuracy)]
    if not beaten:
        return "no", f"No: pretraining did not beat {_names(rivals, 'or')}"
    if len(beaten) < len(rivals):
        ahead = [rival for rival in rivals if rival not in beaten]
        return "no", f"Not convincingly: ahead of {_names(beaten)}, but not of {_names(ahead)}"
    if close:
        how, which = ("Unclear", "each of them") if len(close) == len(rivals) else ("Probably", _names(close))
        return "open", f"{how}: ahead of {_names(rivals)}, but within the error of {which}"
    if missing := _missing(rivals):
        return "open", f"So far yes: clearly better than {_names(rivals)}; {_listed(missing)} not evaluated"
    return "yes", "Yes: pretraining helped"


def _evidence(score: Score) -> str:
    interval = score.accuracy
    known = interval.low is not None and interval.high is not None
    bounds = f" (95% interval {interval.low:.1f} to {interval.high:.1f})" if known else ""
    where = f"{score.images:,} images of the {score.split} split of {score.data}"
    return f"On {where}, {PROBES[score.protocol]} on {score.representation} gets {interval.value:.1f}% right{bounds}."


def _limits(score: Score, rivals: Sequence[Score]) -> list[str]:
    """What the comparison does not cover."""
    found = []
    if missing := _missing(rivals):
        found.append(f"Not compared, because not evaluated in the same way: {_listed(missing)}.")
    low = score.accuracy.low
    if score.chance is not None and low is not None and low <= score.chance:
        found.append(f"Always answering the commonest class gets {score.chance:.1f}%: this is not clearly above it.")
    return found


def _finetuning(run: Contents) -> list[str]:
    """Fine-tuning against training the same network from scratch."""
    own = [s for s in pretrained(run.scores) if s.method == run.method.lower() and s.accuracy.value is not None]
    tuned = sorted((s for s in own if s.protocol == "finetune"), key=lambda s: s.split != "test")
    if not tuned:
        return []
    score = tuned[0]
    rivals = [s for s in run.scores if s.label == "from scratch" and _comparable(score, s)]
    start = f"Fine-tuned, it gets {score.accuracy.value:.1f}% right on {score.split}"
    if not rivals:
        return [f"{start}; training from scratch was not evaluated."]
    return [f"{start}: {compare(score, rivals[0], SPOKEN['from scratch'])}."]


def _training_words(run: Contents) -> list[str]:
    """What training itself says about its success: R2 on held-out images, or on its own where none were held out."""
    last = next((line[run.r2_name] for line in reversed(run.signals) if line.get(run.r2_name) is not None), None)
    if last is None:
        return ["How much of the hidden part is predicted on held-out images was not measured."]
    if last <= 0:
        shown = minus(f"R² {last:.1%}")
        return [f"The model predicts hidden parts no better than their mean ({shown}): it has not learned the task."]
    return [f"It predicts {last:.1%} of the hidden variance of {run.measured_on} (R²)."]


def _missing(rivals: Sequence[Score]) -> list[str]:
    return [name for name in RIVALS if name not in {rival.label for rival in rivals}]


def _names(scores: Sequence[Score], word: str = "and") -> str:
    return _listed([score.label.replace("pca", "PCA") for score in scores], word)


def _listed(names: Sequence[str], word: str = "and") -> str:
    """a, b and c."""
    return f" {word} ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)
