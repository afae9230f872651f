"""The command line: what it writes, how it repeats and resumes, and what a mistake gets."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.commands import forked

from pmae.cli import COMMANDS, main, parsed
from pmae.cli.parse import SHORT, as_typed
from pmae.config import Config
from pmae.config_file import to_dict
from pmae.data.images import Splits
from pmae.evaluate.protocols import PRESETS, ProbeProtocol
from pmae.runs import Run

SMALL = [
    *("--encoder.width", "16", "--encoder.depth", "1", "--encoder.heads", "2"),
    *("--decoder.width", "16", "--decoder.depth", "1", "--decoder.heads", "2"),
    *("--device", "cpu", "--train.precision", "float32"),
]


@pytest.fixture
def array(tmp_path: Path) -> Path:
    images = np.random.default_rng(0).integers(0, 255, (60, 16, 16, 3), dtype=np.uint8)
    np.save(tmp_path / "images.npy", images)
    return tmp_path / "images.npy"


def pretrain(*arguments: object) -> int:
    return main(["pretrain", *map(str, arguments), *SMALL])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--encoder", "vit_tinny"], "--encoder: unknown name 'vit_tinny'; did you mean 'vit_tiny'"),
        (["--init", "weights/nowhere"], "--init must be a run folder"),
    ],
)
def test_what_is_wrong_without_the_images_is_told_before_they_are_read(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pretrain", "--data", str(tmp_path / "missing/"), *words, "--out", str(tmp_path / "run")]) == 2
    assert message in capsys.readouterr().err


def test_pretrain_prints_its_settings_and_says_what_it_derived(
    array: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pretrain("--data", array, "--out", tmp_path / "run", "--epochs", 2) == 0
    printed = capsys.readouterr().out
    assert "54 train, 6 val images of 16x16, 3 channels, uint8" in printed
    assert "6 of the 60 images are held out as val" in printed
    assert "train.batch_size              16   <- about 64 steps an epoch of 54 images" in printed
    assert "R2 of held-out images" in printed
    # What is as always is not listed, and noise cannot be learned.
    assert "optim.betas" not in printed
    longer = f"pmae pretrain --config {tmp_path}/run/config.json --epochs 4 --out {tmp_path}/run-longer"
    assert f"give it more before judging it.\nnext: {longer}\n  or: pmae report {tmp_path}/run\n" in printed
    run = Run(tmp_path / "run")
    assert run.config.train.epochs == 2
    assert {p.name for p in (run.path / "figures").glob("*.png")} >= {"reconstructions.png", "spectrum.png"}


@pytest.mark.usefixtures("no_figures")
def test_a_saved_config_repeats_the_run(array: Path, tmp_path: Path) -> None:
    assert (
        pretrain("--data", array, "--out", tmp_path / "a", "--epochs", 1, "--masked-variance", 0.35, "--seed", 3) == 0
    )
    assert main(["pretrain", "--config", str(tmp_path / "a/config.json"), "--out", str(tmp_path / "b")]) == 0
    first, second = (Run(tmp_path / name) for name in ("a", "b"))
    assert first.config == second.config
    assert first.config.masking.masked_variance == 0.35
    losses = [[line.get("loss") for line in run.metrics()] for run in (first, second)]
    assert losses[0] == losses[1]


@pytest.mark.usefixtures("no_figures")
def test_resume_after_a_real_interrupt_ends_where_an_uninterrupted_run_does(array: Path, tmp_path: Path) -> None:
    # In cosine space, which needs no fit; what is fitted is resumed in tests of the loop.
    common = ["--data", str(array), "--epochs", "30", "--train.checkpoint-every", "30", "--space", "cosine", *SMALL]
    process = forked(["pretrain", *common, "--out", str(tmp_path / "a")], str(tmp_path / "said"))
    while not (tmp_path / "a/metrics.jsonl").exists() and process.is_alive():
        time.sleep(0.02)
    os.kill(process.pid or 0, signal.SIGINT)
    process.join(60)
    message = (tmp_path / "said").read_text()
    assert process.exitcode == 130, message
    assert f"continue with: pmae pretrain --out {tmp_path}/a --resume\n" in message
    assert main(["pretrain", "--out", str(tmp_path / "a"), "--resume"]) == 0
    assert main(["pretrain", *common, "--out", str(tmp_path / "b")]) == 0
    ends = [(Run(tmp_path / name).checkpoint() / "encoder.safetensors").read_bytes() for name in ("a", "b")]
    assert ends[0] == ends[1]


def folder_of(path: Path, sizes: list[tuple[int, int]]) -> Path:
    path.mkdir()
    for number, size in enumerate(sizes):
        Image.fromarray(np.full((*size, 3), number, np.uint8)).save(path / f"{number}.png")
    return path


def unlabelled(tmp: Path) -> Path:
    np.save(tmp / "x.npy", np.zeros((9, 8, 8), np.uint8))
    return tmp / "x.npy"


def missing(tmp: Path) -> list[object]:
    return ["--data", tmp / "nowhere.npy"]


def empty(tmp: Path) -> list[object]:
    (tmp / "void").mkdir()
    return ["--data", tmp / "void"]


def too_small(tmp: Path) -> list[object]:
    return ["--data", folder_of(tmp / "small", [(8, 8)] * 20), "--patch-size", 16]


def not_divisible(tmp: Path) -> list[object]:
    return ["--data", folder_of(tmp / "odd", [(16, 16)] * 20), "--patch-size", 5]


def prime_sides(tmp: Path) -> list[object]:
    return ["--data", folder_of(tmp / "prime", [(31, 37)] * 20)]


def too_few(tmp: Path) -> list[object]:
    return ["--data", folder_of(tmp / "few", [(16, 16)] * 20), "--batch-size", 64]


def pickled(tmp: Path) -> list[object]:
    np.savez(tmp / "p.npz", images=np.array([object()] * 3, dtype=object))
    return ["--data", tmp / "p.npz"]


def truncated(tmp: Path) -> list[object]:
    folder = folder_of(tmp / "cut", [(16, 16)] * 3)
    for file in folder.iterdir():
        file.write_bytes(file.read_bytes()[:40])
    return ["--data", folder]


def bad_config(tmp: Path) -> list[object]:
    (tmp / "c.json").write_text(json.dumps({"train": {"epoch": 3}}))
    return ["--config", tmp / "c.json"]


def config_not_json(tmp: Path) -> list[object]:
    (tmp / "c.json").write_text("{")
    return ["--config", tmp / "c.json"]


def out_is_a_file(tmp: Path) -> list[object]:
    (tmp / "run").write_text("mine")
    return ["--data", "digits"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (missing, "nowhere.npy"),
        (empty, "void"),
        (too_small, "--patch-size"),
        (not_divisible, "--patch-size must be a divisor"),
        (prime_sides, "31x37"),
        (too_few, "--batch-size must be at most the number of training images (18), got 64"),
        (pickled, "p.npz"),
        (truncated, "at least one readable image, got none: '0.png'"),
        (bad_config, "did you mean 'epochs'"),
        (config_not_json, "readable JSON"),
        (out_is_a_file, "out must be a folder"),
        (lambda tmp: ["--data", "digit"], "did you mean 'digits'"),
        (lambda tmp: ["--data", "digits", "--space", "pac"], "did you mean 'pca'"),
        (lambda tmp: ["--data", "digits", "--recipe", "papers"], "did you mean 'paper'"),
        (lambda tmp: ["--data", "digits", "--masked-variance", "1.5"], "--masked-variance must be"),
        (lambda tmp: ["--data", "digits", "--masked-variance", "nan"], "--masked-variance must be"),
        (
            lambda tmp: ["--data", "digits", "--space", "pixels", "--masked-variance", "0.2"],
            "must be left unset where",
        ),
        (lambda tmp: ["--data", "digits", "--epochs", "three"], "--epochs must be a whole number, got 'three'"),
        (lambda tmp: ["--data", "digits", "--epochs", "-3"], "--epochs must be at least 1, got -3"),
        (lambda tmp: ["--data", "digits", "--batch_size=2.5"], "--batch-size must be a whole number, got '2.5'"),
        (lambda tmp: ["--data", "digits", "--epoch", "3"], "got '--epoch'; did you mean --epochs"),
        (
            lambda tmp: ["--data", "digits", "--augment.flip", "yes"],
            "of this command, got 'yes'",
        ),
        (
            lambda tmp: ["--data", "digits", "--masking.per", "imaage"],
            "unknown name 'imaage'; choices: 'image', 'batch'",
        ),
        (lambda tmp: ["--data", "digits", "--optim.betas", "0.9"], "--optim.betas: expected 2 values"),
        (
            lambda tmp: ["--data", "digits", "--optim.betas", "0.9", "b"],
            "betas must be numbers, got '0.9', 'b'",
        ),
        (lambda tmp: ["--data", "digits", "--recipe"], "--recipe: expected 1 values"),
        (lambda tmp: ["--data", "digits", "--train.engine", "graph"], "must run on CUDA"),
        (lambda tmp: ["--data", "cifar10", "--root", str(tmp)], "pmae data cifar10 --root"),
        (
            lambda tmp: ["--data", "digits", "--train.batch_size=8", "--batch-size", "4"],
            "--batch-size and --train.batch-size must agree where both are given, got 4 and 8",
        ),
        (lambda tmp: ["--seed", "0", "--data", "digits", "--train.seed", "1"], "must agree where both are given"),
        (lambda tmp: ["--resume"], "run must be a folder that pretraining wrote"),
        (lambda tmp: ["--resume", "--recipe", "paper"], "must not be combined"),
        (
            lambda tmp: ["--data", "digits", "--probe-data", "no/a.csv"],
            "--probe-data: data.source: there is no file or folder no/a.csv",
        ),
        (lambda tmp: ["--data", "digits", "--probe-data", unlabelled(tmp)], "--probe-data: data 'x' must have labels"),
        (lambda tmp: ["--data", "photos", "--probe-data", "digits"], "--probe-data must have images of the shape"),
        (
            lambda tmp: ["--data", "digits", "--train.callbacks", "stop(metric=r2)"],
            "--train.callbacks must be a name, or one with options as name(key=value), got 'stop(metric=r2)'",
        ),
        (
            lambda tmp: ["--data", "digits", "--probe.columns", "label=diagnosis"],
            "--probe.columns must be left out where probe.data is not given",
        ),
    ],
)
def test_a_mistake_is_one_clear_error_and_leaves_nothing(
    arguments: object, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = arguments(tmp_path)  # type: ignore[operator]
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert pretrain(*given, "--out", tmp_path / "run") == 2
    *warnings, said = capsys.readouterr().err.splitlines()
    assert said.startswith("pmae: error: ")
    assert message in said
    assert all(line.startswith("pmae: warning: ") for line in warnings)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


@pytest.mark.usefixtures("no_figures")
def test_an_unreadable_file_is_named_in_one_line_and_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of(tmp_path / "images", [(16, 16)] * 20)
    (folder / "broken.png").write_bytes((folder / "0.png").read_bytes()[:40])
    assert pretrain("--data", folder, "--out", tmp_path / "run", "--epochs", 1) == 0
    said = capsys.readouterr()
    lines = [line for line in (said.err + said.out).splitlines() if "broken.png" in line]
    assert len(lines) == 1
    assert lines[0].startswith("pmae: warning: skipped 1 unreadable")
    assert any("broken.png" in note for note in Run(tmp_path / "run").environment["data"]["notes"])


@pytest.mark.usefixtures("no_figures")
def test_a_run_is_never_overwritten(array: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pretrain("--data", array, "--out", tmp_path / "run", "--epochs", 1) == 0
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*")}
    capsys.readouterr()
    assert pretrain("--data", "nowhere.npy", "--out", tmp_path / "run", "--epochs", 1) == 2
    said = capsys.readouterr()
    assert "resume the run, or name another folder" in said.err, "before any image is read"
    assert said.out == ""
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*")} == before


def test_help_all_shows_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["pretrain", "--help-all"])
    assert stop.value.code == 0
    page = capsys.readouterr().out
    assert "None" not in page
    shown = set(re.findall(r"--([a-z]+\.(?!no-)[a-z0-9-]+)", page))
    settings = {f"{section}.{name}" for section, values in to_dict(Config()).items() for name in values}
    assert shown == {setting.replace("_", "-") for setting in settings}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--optim.betas 0.8 .9", ("optim", "betas", (0.8, 0.9))),
        ("--train.batch_size 32", ("train", "batch_size", 32)),
        ("--batch-size=32 --batch-size 64", ("train", "batch_size", 64)),
        ("--epochs 3 --train.epochs 3", ("train", "epochs", 3)),
        ("--augment.no-flip", ("augment", "flip", False)),
        ("--recipe released --optim.warmup-epochs None", ("optim", "warmup_epochs", None)),
        ("--data 7", ("data", "source", "7")),
        ("--encoder.weights 7", ("encoder", "weights", "7")),
        ("--data.labels none", ("data", "labels", "none")),
        ("--data.channels 3", ("data", "channels", 3)),
        ("--optim.base-lr 1e-3", ("optim", "base_lr", 1e-3)),
        ("--optim.weight-decay 0", ("optim", "weight_decay", 0.0)),
    ],
)
def test_a_flag_sets_its_setting(flags: str, expected: tuple[str, str, object]) -> None:
    section, name, value = expected
    config = parsed("pretrain", flags.split()).configured()
    assert getattr(getattr(config, section), name) == value
    assert type(getattr(getattr(config, section), name)) is type(value)


@pytest.mark.parametrize("given", ["--set a.b=1 c.d=2", "--set a.b=1 --set c.d=2", "--set=a.b=1 --set=c.d=2"])
def test_settings_of_many_runs_are_kept_however_they_are_typed(given: str) -> None:
    assert parsed("sweep", ["ratio", "0.1", *given.split(), "--epochs", "3"]).settings == ("a.b=1", "c.d=2")


def test_an_unknown_device_names_the_choices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pretrain", "--data", "digits", "--device", "tpu", "--out", str(tmp_path / "run")]) == 2
    assert "--device must be auto, cpu, cuda, cuda:N or mps, got 'tpu'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_an_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pretrian"]) == 2
    assert "did you mean 'pretrain'" in capsys.readouterr().err


@pytest.mark.usefixtures("no_figures")
def test_ctrl_c_before_training_is_quiet(
    array: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pmae.train.setup.fit_standardize", stop)
    common = ["--data", str(array), "--out", str(tmp_path / "run"), "--epochs", "1"]
    assert main(["pretrain", *common, *SMALL]) == 130
    assert capsys.readouterr().err == "pmae: stopped\n"
    # Nothing was trained yet, and what is there can be continued.
    monkeypatch.undo()
    assert main(["pretrain", "--out", str(tmp_path / "run"), "--resume"]) == 0


def test_help_lists_every_command_and_short_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in COMMANDS)
    for name in COMMANDS:
        with pytest.raises(SystemExit) as exit:
            main([name, "--help"])
        assert exit.value.code == 0
        printed = capsys.readouterr().out
        assert "None" not in printed, "what happens without an option is said in words"
        assert name != "pretrain" or all(f"--{short.replace('_', '-')}" in printed for short in SHORT)


@pytest.mark.usefixtures("no_figures")
def test_evaluate_and_report_on_labelled_data(
    toy: Splits, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = ProbeProtocol(epochs=5, warmup_epochs=1, augment=None, standardize=True)
    monkeypatch.setitem(PRESETS, "strong", replace(PRESETS["strong"], probe=probe))
    monkeypatch.setattr("pmae.report.page.write_beside", lambda *_: None)  # seconds of figures that nobody looks at
    assert toy.test is not None
    parts = {"train": toy.train.take(np.arange(64)), "test": toy.test}  # few: probes take four steps an epoch
    arrays = {f"{name}_images": part.images.transpose(0, 2, 3, 1) for name, part in parts.items()}
    np.savez(tmp_path / "toy.npz", **arrays, **{f"{name}_labels": part.labels for name, part in parts.items()})
    run = str(tmp_path / "run")
    assert pretrain("--data", tmp_path / "toy.npz", "--out", run, "--epochs", 2, "--batch-size", 32) == 0
    assert main(["evaluate", run, "--protocols", "linear", "knn", "--device", "cpu", "--epochs", "1", "2"]) == 0
    printed = capsys.readouterr().out
    assert all(
        name in printed for name in ("pmae epoch 1", "pmae epoch 2", "random weights", "raw pixels", "pca features")
    )
    assert re.findall(r"(\d) of 5 representations scored, about \d:\d\d:\d\d left", printed) == ["1", "2", "3", "4"]
    _, _, judged = printed.partition("\n\n")
    assert re.match(r"(Yes|No|Partly|Unclear|Not convincingly)\b", judged)
    assert "a linear probe on pmae epoch 2 (patch mean) gets" in judged
    assert judged.endswith(f"next: pmae report {run}\n")
    assert main(["report", run, "-o", str(tmp_path / "report.html")]) == 0
    assert "<html" in (tmp_path / "report.html").read_text()
    # Grey files of another size in subfolders need no option, and what is printed is about them alone.
    for number in range(12):
        path = tmp_path / "files" / f"{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (13, 9), 20 * number).save(path)
    knn = ["evaluate", run, "--protocols", "knn", "--device", "cpu", "--no-baselines", "--data"]
    assert main([*knn, str(tmp_path / "files")]) == 0
    printed = capsys.readouterr().out
    assert "of the test split of files, k-NN on" in printed
    assert " linear " not in printed
    assert main([*knn, str(tmp_path / "files"), "--epochs", "1", "99"]) == 2
    printed = capsys.readouterr()
    assert "must hold a checkpoint of epoch 99" in printed.err
    assert "features" not in printed.out, "nothing is scored before"
    np.savez(tmp_path / "other.npz", images=np.zeros((9, 5, 5, 3), np.uint8), labels=np.arange(9) % 3)
    refused = {"other.npz": "3 channels of 8x8, got 3 channels of 5x5; give arrays", "files/0": "in a class folder"}
    shutil.copytree(tmp_path / "files/0", tmp_path / "one/0")
    refused["one"] = "data 'one' must be of two classes or more to be evaluated, got 1"
    for name, message in refused.items():
        assert main([*knn, str(tmp_path / name)]) == 2
        assert message in capsys.readouterr().err


def test_draws_of_no_few_labels_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "runs/a", "--draws", "9"]) == 2
    assert "--draws must be given with --shots or --label-fraction, got 9" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["--epochs 1", "--shots 5", "--label-fraction 0.1", "--seeds 0 1", "--preset paper"])
def test_what_a_segmentation_probe_has_no_use_for_is_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "runs/a", "--masks", "masks", *words.split()]) == 2
    assert f"{words.split()[0]} must be left out with masks" in capsys.readouterr().err


@pytest.mark.usefixtures("no_figures")
def test_the_twin_is_trained_on_the_images_of_the_run_whatever_is_scored(array: Path, tmp_path: Path) -> None:
    run, scored = tmp_path / "run", tmp_path / "scored.npz"
    others, labels = 255 - np.load(array), np.arange(60) % 2
    found = {"train_images": others[:40], "train_labels": labels[:40]}
    np.savez(scored, **found, test_images=others[40:], test_labels=labels[40:])
    assert (
        main(["pretrain", "--data", str(array), "--out", str(run), "--epochs", "1", "--batch-size", "16", *SMALL]) == 0
    )
    said = ["--protocols", "knn", "--no-baselines", "--device", "cpu", "--with", "mae"]
    assert main(["evaluate", str(run), "--data", str(scored), *said]) == 0
    twin = Run(tmp_path / "run-mae")
    assert twin.environment["data"] == Run(run).environment["data"]
    assert {score.data for score in twin.evaluations[0].scores} == {"scored"}


@pytest.mark.usefixtures("no_figures")
def test_evaluating_without_labels_is_refused(array: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pretrain("--data", array, "--out", tmp_path / "run", "--epochs", 1) == 0
    assert main(["evaluate", str(tmp_path / "run"), "--with", "mae"]) == 2
    assert "must have labels" in capsys.readouterr().err
    assert not (tmp_path / "run-mae").exists(), "no hours are spent on a twin that cannot be scored"


@pytest.mark.usefixtures("no_figures")
def test_what_is_said_without_labels_can_be_pasted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    for number in range(24):
        path = tmp_path / "files" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (16, 16, 3), dtype=np.uint8)).save(path)
    assert pretrain("--data", tmp_path / "files", "--out", tmp_path / "run", "--epochs", 1) == 0
    knn = ["evaluate", str(tmp_path / "run"), "--protocols", "knn", "--device", "cpu", "--no-baselines"]
    capsys.readouterr()
    assert main(knn) == 2
    offered = re.findall("`(.*?)`", capsys.readouterr().err)
    assert offered == ["--labels folders", "--labels x.csv", "--data"]
    assert main([*knn, *offered[0].split()]) == 0


@pytest.mark.usefixtures("no_figures")
def test_after_a_run_that_another_set_watched_the_command_that_is_named_works(
    array: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "watch.npz", images=np.load(array)[:40], labels=np.arange(40) % 2)
    watched = ["--probe-data", tmp_path / "watch.npz", "--batch-size", 16]
    assert pretrain("--data", array, "--out", tmp_path / "run", "--epochs", 1, *watched) == 0
    (named,) = re.findall("pmae (evaluate .*)", capsys.readouterr().out)
    assert main([*named.split(), "--protocols", "knn", "--device", "cpu", "--no-baselines"]) == 0


@pytest.mark.usefixtures("no_figures")
def test_a_run_of_the_folder_one_is_in_is_called_like_it(
    array: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder_of(tmp_path / "scans", [(16, 16)] * 20))
    assert pretrain("--data", ".", "--epochs", 1) == 0
    assert [path.name for path in Path("runs").iterdir()] == ["scans-pmae"]


def test_python_m_pmae_answers() -> None:
    done = subprocess.run([sys.executable, "-m", "pmae", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("pmae ")


def test_leaving_at_once_keeps_the_exit_code_what_was_said_and_what_others_do_at_the_end(tmp_path: Path) -> None:
    plugin, left = tmp_path / "mine.py", tmp_path / "left"
    plugin.write_text(f"import atexit, os\natexit.register(os.mkdir, {str(left)!r})\nprint('imported')\n")
    command = [sys.executable, "-m", "pmae", "embed", "--import", str(plugin), "--nothing"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "imported\n")
    assert done.stderr.startswith("pmae: error: ")
    assert left.exists()


@pytest.mark.usefixtures("registry")
def test_a_module_may_be_imported_before_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plugin = tmp_path / "my_first.py"
    plugin.write_text("print('imported')\n")
    assert main(["embed", "--nothing"]) == 2
    known = capsys.readouterr().err
    for given in (["--import", str(plugin)], [f"--import={plugin}"]):
        assert main([*given, "embed", "--nothing"]) == 2
        assert capsys.readouterr().err == known
    assert main(["--import", str(plugin)]) == 2


@pytest.mark.parametrize(
    ("typed", "said", "expected"),
    [
        ("evaluate a --shots 0", "fewlabels.shots must be 1", "--shots must be 1"),
        ("evaluate a --label-fraction 2", "fewlabels.fractions must be less", "--label-fraction must be less"),
        ("pretrain --epochs=0", "train.epochs must be 1", "--epochs must be 1"),
        ("pretrain --train.epochs 0", "train.epochs must be 1", "--train.epochs must be 1"),
        ("pretrain --config c.json", "train.epochs must be 1", "train.epochs must be 1"),
        ("pretrain --data a --probe-data b", "probe.data must be 1", "--probe-data must be 1"),
        ("pretrain --data a", "data.source: there is no a", "--data: there is no a"),
        ("predict a --top_k 9", "top_k must be 1", "--top-k must be 1"),
        ("predict a -o p", "out must end in .csv", "-o must end in .csv"),
        ("finetune a --labels b", "labels of test must be classes", "labels of test must be classes"),
    ],
)
def test_an_error_names_the_option_that_was_typed(typed: str, said: str, expected: str) -> None:
    assert as_typed(said, typed.split()) == expected
