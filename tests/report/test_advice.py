"""What next: each sentence follows from what was measured, and its command can be copied."""

import json
import shutil
from collections.abc import Callable
from typing import Any

import pytest

from pmae.cli.pretrain import _judgement
from pmae.report.advice import advice
from pmae.report.contents import load
from pmae.runs import Run

Suite = Callable[..., dict[str, Any]]
MakeRun = Callable[..., Run]


def with_r2(make_run: MakeRun, held_out: list[float], training: float = 0.5, **more: Any) -> Run:
    """A finished run of three epochs whose R2 was this after each of them."""
    run = make_run(pictures=False, **more)
    speed = {"loss": 1.0, "r2": training, "images_per_second": 1.0}
    lines: list[dict[str, float]] = []
    for epoch, r2 in enumerate(held_out, 1):
        lines += [{"epoch": epoch, "step": epoch, **speed}, {"epoch": epoch, "step": epoch, "held_out_r2": r2}]
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


@pytest.mark.parametrize(
    ("held_out", "training", "title", "words"),
    [
        ([-0.5, -0.2, -0.04], 0.5, "It has hardly learned", "R² −4.0% on held-out images after 3 epochs"),
        ([0.3], 0.5, "It has learned", "R² 30.0% on held-out images at epoch 1, where it was first measured."),
        ([0.1, 0.2, 0.3], 0.3, "Undertrained", "R² 30.0% on held-out images, and it still rose by 10.0 points since"),
        ([0.3, 0.302, 0.3], 0.5, "Too few images", "50.0% in training: more epochs will not help, more images may"),
        ([0.3, 0.302, 0.3], 0.3, "Saturated", "−0.2 points since epoch 2: more epochs will not help."),
    ],
)
def test_more_epochs_or_more_images(
    make_run: MakeRun, held_out: list[float], training: float, title: str, words: str
) -> None:
    run = with_r2(make_run, held_out, training)
    first = advice(load(run.path))[0]
    assert first.title == title
    assert words in first.words
    longer = f"pmae pretrain --config {run.path}/config.json --epochs 6 --out {run.path}-longer"
    assert first.command == (longer if title in ("It has hardly learned", "Undertrained") else "")
    told = _judgement(run.path).splitlines()
    assert told[0] == f"{first.title}: {first.words}"
    commands = [longer, f"pmae report {run.path}"][:: 1 if title == "It has hardly learned" else -1]
    assert told[1:] == [f"next: {commands[0]}", *([f"  or: {commands[1]}"] if first.command else [])]


@pytest.mark.parametrize(("last", "title"), [(0.625, "Undertrained"), (0.605, "Saturated")])
def test_probes_that_still_rise_ask_for_more_epochs(make_run: MakeRun, last: float, title: str) -> None:
    run = with_r2(make_run, [0.3, 0.302, 0.3], 0.3)
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    for line, knn in zip(lines[1::2], (0.5, 0.6, last), strict=True):
        line["knn"] = knn
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    first = advice(load(run.path))[0]
    assert first.title == title
    assert ("a quick probe rose by 2.5 points since epoch 2" in first.words) == (title == "Undertrained")


def test_beside_a_contrastive_loss_a_low_r2_is_no_verdict_on_the_features(make_run: MakeRun) -> None:
    run = with_r2(make_run, [-0.1, 0.0, 0.02], objective__contrastive_weight=1.0)
    first = advice(load(run.path))[0]
    assert (first.title, first.words) == (
        "Undertrained",
        "R² 2.0% on held-out images after 3 epochs: what is hidden is hardly predicted yet, so train longer.",
    )
    assert f"next: pmae report {run.path}\n  or: pmae pretrain" in _judgement(run.path)


def test_a_run_without_reconstruction_is_not_judged_by_it(make_run: MakeRun) -> None:
    settings = {"objective__reconstruction_weight": 0.0, "objective__contrastive_weight": 1.0}
    run = make_run(pictures=False, **settings)
    assert _judgement(run.path) == f"nothing was to be predicted, so there is no R2\nnext: pmae evaluate {run.path}"


def test_the_pooling_the_worst_classes_and_the_next_steps(make_run: MakeRun, suite: Suite) -> None:
    scored = suite({"linear/mean/test": 0.7, "knn/mean/test": 0.6, "knn/cls/test": 0.65}, classes=["a", "b", "c"])
    for entry, best in zip(scored["results"], (0, 0.60, 0.65), strict=True):
        entry["confusion"] = [[40, 10, 0], [0, 50, 0], [30, 0, 20]]
        shares = zip("abc", (0.8, 1.0, 0.4), strict=True)
        entry["per_class"] = [{"class": c, "precision": 1.0, "recall": recall, "support": 50} for c, recall in shares]
        entry["by_k"] = [{"k": 5, "accuracy": best, "validation": best}] if best else []
    run = make_run("it's", pictures=False, evaluation={"pmae epoch 3": scored})
    told = {one.title: one for one in advice(load(run.path))}
    pooling = told["Use CLS features"]
    assert pooling.words == "k-NN gets 65.0% right with it on held-out training images, 60.0% with patch mean."
    assert "it'\"'\"'s' --data photos --pooling cls" in pooling.command, "a path that a shell takes as it is"
    assert told["Worst classes"].words.startswith(
        "c (40% found, mostly taken for a); a (80% found, mostly taken for b)"
    )
    assert told["Use it"].command.startswith("pmae finetune")
    unscored = advice(load(make_run("b", pictures=False).path))
    assert unscored[-1].command == f"pmae evaluate {load(run.path).path.with_name('b')}"
    unlabelled = advice(load(make_run("d", pictures=False, data={"classes": []}).path))
    assert unlabelled[-1].command.endswith("/d --data labelled/")
    stopped = advice(load(make_run("c", pictures=False, epochs=2).path))
    assert stopped[-1].command.endswith("--resume")


def test_classes_that_a_file_does_not_agree_on_stop_no_page(make_run: MakeRun, suite: Callable[..., Any]) -> None:
    scores = suite({"linear/cls/test": 0.7}, classes=["a", "b", "c"])
    scores["results"][0] |= {
        "confusion": [[1, 0, 0]] * 3,
        "per_class": [{"class": name, "precision": 0.5, "recall": 0.5, "support": 3} for name in "xyz"],
    }
    run = make_run(evaluation={"pmae epoch 3": scores})
    (worst,) = (one for one in advice(load(run.path)) if one.title == "Worst classes")
    assert worst.words.startswith("x (50% found); y (50% found)")


def test_a_run_that_was_stopped_in_its_first_stage_is_to_go_on(make_run: MakeRun) -> None:
    run = make_run(pictures=False, epochs=2)
    shutil.copytree(run.path, run.path.parent / "copy")
    (run.path.parent / "copy").rename(run.path / "first")
    (run.path / "metrics.jsonl").unlink()
    shutil.rmtree(run.path / "checkpoints")
    contents = load(run.path)
    assert "training stopped in its first stage, at epoch 2 of 3" in contents.problems
    assert [one.command for one in advice(contents)] == [f"pmae pretrain --out {run.path} --resume"]
