"""Every `pmae` command in README, docs and help is one that the command line takes; the quick ones really run."""

import argparse
import re
import shlex
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pmae.cli import COMMANDS, main
from pmae.cli.pretrain import _configure

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SMALL = "--encoder.width 16 --encoder.depth 1 --encoder.heads 2 --decoder.width 16 --decoder.depth 1 --decoder.heads 2"


def fenced(text: str) -> list[str]:
    """Commands in code fences, without a prompt or a comment."""
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
    return [shlex.join(shlex.split(line, comments=True)) for line in lines if line.startswith("pmae ")]


def in_help(name: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Examples in a command's help; what follows three spaces explains them."""
    with pytest.raises(SystemExit):
        main([name, "--help"])
    # tyro frames its help.
    lines = [line.strip("│ ") for line in capsys.readouterr().out.splitlines()]
    return [re.split(r"\s{3,}", line)[0] for line in lines if f"{line} ".startswith(f"pmae {name} ")]


class Parsed(Exception):
    """The arguments were taken; nothing was run."""


def parse(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise SystemExit or UserError where the command line would refuse the arguments."""
    name, *arguments = shlex.split(command)[1:]
    if name == "pretrain":
        _configure(without_files(arguments))
        return
    original = argparse.ArgumentParser.parse_args

    def stop(self: argparse.ArgumentParser, given: list[str]) -> None:
        original(self, given)
        raise Parsed

    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        with pytest.raises(Parsed):
            import_module(f"pmae.cli.{name}").run(arguments)


def without_files(arguments: list[str]) -> list[str]:
    """A run to resume or a file to start from is not there; the other flags are taken without it."""
    if "--config" in arguments:
        at = arguments.index("--config")
        arguments = arguments[:at] + arguments[at + 2 :]
    return [argument for argument in arguments if argument != "--resume"]


COMMANDS_SHOWN = sorted({command for page in PAGES for command in fenced(page.read_text())})


def test_the_pages_show_every_command() -> None:
    shown = {shlex.split(command)[1] for command in COMMANDS_SHOWN}
    assert set(COMMANDS) - {"explore", "bench"} <= shown


@pytest.mark.parametrize("command", [c for c in COMMANDS_SHOWN if "--tyro-print-completion" not in c])
def test_a_command_in_the_pages_parses(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = shlex.split(command)[1]
    assert name in COMMANDS
    parse(command, monkeypatch)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_examples_that_parse(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    examples = in_help(name, capsys)
    assert len(examples) >= 2
    for command in examples:
        parse(command, monkeypatch)


def test_a_wrong_flag_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    for command in ("pmae report runs/a --ouput x", "pmae pretrain --epoch 3"):
        with pytest.raises(SystemExit):
            parse(command, monkeypatch)


def test_the_walk_runs_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The three commands of the page, on a small folder, with a smaller model and one epoch."""
    import timm

    commands = fenced((ROOT / "docs/walk.md").read_text())
    assert [shlex.split(command)[1] for command in commands] == ["pretrain", "export", "report"]
    assert set(commands) <= set(fenced((ROOT / "README.md").read_text()))
    monkeypatch.chdir(tmp_path)
    Path("pictures").mkdir()
    for number, pixels in enumerate(np.random.default_rng(0).integers(0, 255, (24, 40, 40, 3), dtype=np.uint8)):
        Image.fromarray(pixels).save(f"pictures/{number}.png")
    first = re.sub(r"--epochs \d+", "--epochs 1", commands[0])
    for command in (f"{first} {SMALL} --device cpu", *commands[1:]):
        assert main(shlex.split(command)[1:]) == 0, capsys.readouterr().err
    assert timm.create_model("local-dir:exported/pictures", pretrained=True).num_features == 16
    assert "<html" in Path("report.html").read_text()


def test_quick_commands_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = ["pmae paper --list", "pmae paper knn --runs results/runs --only-found"]
    assert set(quick) <= set(COMMANDS_SHOWN)
    monkeypatch.chdir(tmp_path)
    Path("results").symlink_to(ROOT / "results")
    for command in quick:
        assert main(shlex.split(command)[1:]) == 0, capsys.readouterr().err
        assert "main" in capsys.readouterr().out or "--list" not in command
