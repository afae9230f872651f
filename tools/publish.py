"""Copy the small files of finished runs into results/runs, compactly: python tools/publish.py RUN...

Settings, environment, results, and one line of metrics an epoch, or every few epochs of long runs; data in `data/`.
What its probes said of every test image goes along, a byte each, and by the paper's protocol of every validation image
that the paper scores: `pmae report` and the tables then compare two runs image by image.
"""

import dataclasses
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from published_runs import RUNS, kind_of
from torch import Tensor

from pmae.config import Config, replace
from pmae.config_file import to_dict
from pmae.errors import UserError
from pmae.files import read_tensors, write_json, write_tensors, write_text
from pmae.paper.comparisons import AUGMENTED
from pmae.report.published import published_data, published_split
from pmae.results import Evaluation, Score
from pmae.runs import FIRST, Run
from pmae.standing import pretrained, primary_pooling, scores_of, standing
from pmae.sweep.find import finished

SHORT = {
    "paper": "paper", "mae": "paper", "kmae": "paper", "released": "released", "mae_released": "released",
    "ours": "contrast", "mae_ours": "contrast",
}  # fmt: skip
"""What a folder's name says of a recipe; nothing of masking alone."""
LINES = 100
"""How many epochs of a run keep a line of metrics."""
CLASSES = 20
"""Beyond so many, confusion matrices are left out: a hundred classes would have ten thousand numbers a score."""


def publish(run: Run, below: Path = RUNS) -> Path:
    """Write a run's folder below a folder, named after what it is; a run of the same settings takes its place."""
    if not finished(run):
        raise UserError(f"run must have come to its end to be published, got {str(run.path)!r}")
    folder = below / name_of(run)
    if folder.exists() and kind_of(Run(folder)) != kind_of(run):
        raise UserError(f"{str(folder)!r} holds a run of other settings; rename it first")
    write(run, folder)
    return folder


def write(run: Run, folder: Path) -> None:
    """Its small files, and those of a stage with larger patches before; last the settings, which make it a run."""
    folder.mkdir(parents=True, exist_ok=True)
    if (run.path / FIRST).is_dir():
        write(Run(run.path / FIRST), folder / FIRST)
    config, environment = at_home(run)
    write_json(folder / "environment.json", environment)
    write_text(folder / "results.json", _compact(scored_once(run)) + "\n")
    if answers := answers_of(run):
        write_tensors(folder / "answers.safetensors", answers)
    write_text(folder / "metrics.jsonl", "".join(f"{_compact(line)}\n" for line in thinned(run)))
    write_json(folder / "config.json", to_dict(config))


def at_home(run: Run) -> tuple[Config, dict[str, Any]]:
    """Settings and environment without the folders of a machine: where it keeps its files is nobody else's business."""
    config, environment = run.config, run.environment
    weights, near = config.encoder.weights, _near(config.encoder.weights, "runs", 2)
    data = {"data__source": _near(config.data.source), "probe__data": _near(config.probe.data)}
    teacher = re.sub(r"(?<=teacher=')/[^']*", lambda found: str(_near(found[0], "runs")), config.objective.contrastive)
    config = replace(config, data__root="data", encoder__weights=near, objective__contrastive=teacher, **data)
    if weights == near:
        return config, environment
    notes = [note.replace(str(weights), str(near)) for note in environment.get("start", ())]
    given = {"weights": near} if "weights" in environment else {}
    return config, {**environment, "start": notes, **given}


def _near(place: str | None, folder: str = "data", parts: int = 1) -> str | None:
    """The last parts of a path, below a folder of the project; what is no path of a machine stays as it is."""
    return Path(folder, *Path(place).parts[-parts:]).as_posix() if place and Path(place).is_absolute() else place


def name_of(run: Run) -> str:
    """`cifar10-pmae-100`, with recipe, ratio, decoder and seed where they are not the usual ones."""
    kind, seed = kind_of(run), run.config.train.seed
    usual = kind.method == "simclr" or (kind.method, kind.ratio) in (("mae", 0.75), ("pmae", 0.2))
    ratio = [] if usual else ["random" if kind.ratio is None else f"{kind.ratio:g}"]
    method = [kind.method, *filter(None, [SHORT.get(kind.recipe)])]
    method = ["contrast"] if method == ["pmae", "contrast"] else method
    # The small one is that of all runs which compare ratios and spaces.
    decoder = [] if kind.decoder in ("", "small") else [f"decoder={kind.decoder}"]
    local = [f"local={kind.local_views}"] if kind.local_views else []
    return "-".join([kind.data, *method, *ratio, *decoder, *local, str(kind.epochs), *[f"seed{seed}"] * (seed > 0)])


def thinned(run: Run) -> Iterator[dict[str, object]]:
    """The last line of training of every epoch that counts, and all measurements between epochs."""
    every = max(1, (run.config.train.epochs or 1) // LINES)
    last = {int(-(-line["epoch"] // every)): line for line in run.metrics() if "loss" in line}
    looks = [line for line in run.metrics() if "loss" not in line]
    return iter(sorted([*last.values(), *looks], key=lambda line: (line["step"], "loss" not in line)))


def scored_once(run: Run) -> dict[str, object]:
    """results.json without the scores that a later evaluation measured anew."""
    results = run.results
    if "labelled" in results:
        places = {name: _near(results["labelled"].get(name)) for name in ("source", "labels")}
        results["labelled"] |= {name: near for name, near in places.items() if near}
    if "evaluations" in results:
        results["evaluations"] = [_small(one).to_json() for one in standing(run.evaluations)]
        results.pop("evaluation", None)  # the older format, which is among them now
    return results


def answers_of(run: Run) -> dict[str, Tensor]:
    """True and predicted classes by score, of those that tables compare; what else was answered stays where it is."""
    file = run.path / "answers.safetensors"
    known = read_tensors(file) if file.exists() else {}
    scores = pretrained(scores_of(standing(run.evaluations)))
    pooling = primary_pooling(scores)
    kept = {score.key: known[score.key] for score in scores if score.key in known and _is_compared(score, pooling)}
    # A seed that diverged answers -1, which a byte has not.
    return {key: each.byte() if 0 <= each.min() <= each.max() < 256 else each for key, each in kept.items()}


def _is_compared(score: Score, pooling: str) -> bool:
    """Whether it is of test images by the features that stand for the run, or what the paper itself has."""
    own = score.split == "test" and score.pooling == pooling
    split = published_split(published_data(score.data))
    return own or (score.preset in AUGMENTED and score.pooling == "cls" and score.split in ("test", split))


def _small(one: Evaluation) -> Evaluation:
    kept = [s if len(s.confusion or ()) <= CLASSES else dataclasses.replace(s, confusion=None) for s in one.scores]
    return dataclasses.replace(one, scores=tuple(kept))


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def main() -> None:
    """Publish the runs that are named."""
    for path in sys.argv[1:]:
        print(publish(Run(path)))


if __name__ == "__main__":
    main()
