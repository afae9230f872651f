"""What to do next with a run: sentences that follow from what was measured, each with the command to copy."""

from collections.abc import Iterator
from typing import NamedTuple

from pmae.plugins import command_line
from pmae.report.compare import main_score
from pmae.report.contents import Contents
from pmae.report.style import minus
from pmae.results import POOLINGS, Score
from pmae.standing import clearly_better, pretrained, primary_pooling

LEARNED, RISING, GAP = 0.05, 0.01, 0.1
"""R2 above which something was learned; its late gain that is worth more epochs; its loss on new images that says the
images are too few."""
HARDLY = "It has hardly learned"


class Advice(NamedTuple):
    """One thing to know or to do, and the command for it if there is one."""

    title: str
    words: str
    command: str = ""


def advice(run: Contents) -> list[Advice]:
    """In the order in which one would act on it."""
    return [*training_advice(run), *_pooling(run), *_classes(run), *_steps(run)]


def training_advice(run: Contents) -> Iterator[Advice]:
    """Whether more epochs or more images would help, from how R2 and probes moved since two thirds of the training."""
    points = [(line["epoch"], line[run.r2_name]) for line in run.signals if line.get(run.r2_name) is not None]
    if run.config.objective.reconstruction_weight == 0 or not points:
        return
    now, last = points[-1]
    since, before = next((point for point in reversed(points) if point[0] <= now * 2 / 3), points[0])
    gain, where = last - before, minus(f"R² {last:.1%}") + f" on {run.measured_on}"
    twice, out = 2 * (run.config.train.epochs or 1), f"{run.path}-longer"
    longer = command_line("pretrain", "--config", run.path / "config.json", "--epochs", twice, "--out", out)
    trained = [line["r2"] for line in run.training[-5:] if line.get("r2") is not None]
    seen = sum(trained) / len(trained) if trained else 0.0
    if last < LEARNED:
        after = f"{where} after {now:g} epoch{'s' * (now != 1)}"
        if run.config.objective.contrastive_weight:  # it may have taught much before anything can be predicted
            yield Advice("Undertrained", f"{after}: what is hidden is hardly predicted yet, so train longer.", longer)
        else:
            yield Advice(HARDLY, f"{after}: give it more before judging it.", longer)
    elif len(points) == 1:
        yield Advice("It has learned", f"{where} at epoch {now:g}, where it was first measured.")
    elif gain > RISING:
        words = f"{where}, and it still rose by {100 * gain:.1f} points since epoch {since:g}: train longer."
        yield Advice("Undertrained", words, longer)
    elif (risen := _probes_risen(run, since)) > RISING:
        words = f"{where} hardly moves, but a quick probe rose by {100 * risen:.1f} points since epoch {since:g}"
        yield Advice("Undertrained", f"{words}: train longer.", longer)
    elif run.r2_name == "held_out_r2" and seen - last > GAP:
        words = f"{where}, {seen:.1%} in training: more epochs will not help, more images may."
        yield Advice("Too few images", words)
    else:
        moved = minus(f"{100 * gain:+.1f}")
        yield Advice("Saturated", f"{where}, {moved} points since epoch {since:g}: more epochs will not help.")


def _probes_risen(run: Contents, since: float) -> float:
    """What the quick probe that rose most since this epoch gained; nothing where none was taken."""
    lines = [line for line in run.signals if line["epoch"] >= since]
    taken = [name for name in ("linear", "knn") if None not in (lines[0].get(name), lines[-1].get(name))]
    return max((float(lines[-1][name] - lines[0][name]) for name in taken), default=0.0)


def _pooling(run: Contents) -> Iterator[Advice]:
    own = [s for s in pretrained(run.scores) if s.protocol == "knn" and s.by_k and s.pooling in ("cls", "mean")]
    best = {score.pooling: max(score.by_k, key=lambda one: one.validation) for score in own}
    if len(best) < 2:
        return
    chosen = primary_pooling(run.scores)
    other = next(pooling for pooling in best if pooling != chosen)
    words = f"k-NN gets {best[chosen].validation:.1%} right with it on held-out training images, "
    words += f"{best[other].validation:.1%} with {POOLINGS[other]}"
    clear = clearly_better(best[chosen], best[other]) or clearly_better(best[other], best[chosen])
    words += "." if clear else ": no clear difference."
    source = run.config.data.source
    command = command_line("embed", run.path, "--data", source, "--pooling", chosen, "-o", "features.npz")
    yield Advice(f"Use {POOLINGS[chosen]} features", words, command if _has_weights(run) else "")


def _classes(run: Contents) -> Iterator[Advice]:
    score = main_score(run, with_classes=True)
    if score is None or len(score.per_class) < 3:
        return
    known = sorted((row for row in score.per_class if row.recall is not None), key=lambda row: row.recall or 0.0)
    worst = [f"{row.name} ({row.recall or 0:.0%} found{_mostly(score, row.name)})" for row in known[:3]]
    if worst and (known[0].recall or 0) < 0.95:
        yield Advice("Worst classes", f"{'; '.join(worst)}. Look at their images and labels first.")


def _mostly(score: Score, name: str) -> str:
    """What a class is most often taken for."""
    place = score.classes.index(name) if name in score.classes else None  # of a file that was edited
    known = () if place is None else (score.confusion or ())[place]
    count, other = max(((count, other) for other, count in enumerate(known) if other != place), default=(0, 0))
    return f", mostly taken for {score.classes[other]}" if count else ""


def _steps(run: Contents) -> Iterator[Advice]:
    if not run.finished and (run.training or run.first):
        again = command_line("pretrain", "--out", run.path, "--resume")
        yield Advice("Not finished", "It can go on where it stopped.", again)
    elif not run.scores:
        words = "With labels for some of the images, this says whether pretraining helped."
        labels = () if run.has_labels else ("--data", "labelled/")
        yield Advice("Not evaluated yet", words, command_line("evaluate", run.path, *labels))
    elif _has_weights(run):
        words = "A classifier that is kept, or the encoder for another library."
        data, name = run.config.data.source, run.path.name
        commands = [command_line("finetune", run.path, *_labelled(run), "--out", f"classifiers/{name}")]
        if run.given:
            words = "A classifier that is kept, or training without labels that starts from these weights."
            commands += [command_line("pretrain", "--init", run.path, "--data", data, "--out", f"{run.path}-adapted")]
        else:
            commands += [command_line("export", run.path, "--format", "timm", "-o", f"exported/{name}")]
        yield Advice("Use it", words, "\n".join(commands))


def _labelled(run: Contents) -> list[str]:
    """The options that name labelled images: those of the last evaluation, or the run's own if they have labels."""
    known = run.labelled or {"source": run.config.data.source if run.has_labels else "labelled/"}
    table = ["--labels", known["labels"]] if known.get("labels") else []
    columns = [f"{what}={name}" for what, name in known.get("columns", {}).items()]
    return ["--data", known["source"], *table, *(["--columns", *columns] if columns else [])]


def _has_weights(run: Contents) -> bool:
    """Whether commands that need a checkpoint would find one: published runs are without."""
    return any(run.path.glob("checkpoints/epoch_*"))
