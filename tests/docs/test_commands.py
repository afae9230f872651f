"""Every `pmae` command in help is one that the command line takes, and the pages show them all."""

import argparse
import re
import shlex
from importlib import import_module

import pytest

from pmae.cli import COMMANDS, main
from pmae.cli.pretrain import _configure
from pmae.errors import UserError

from .pages import EXEMPT, PAGES, commands


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
    name, *arguments = shlex.split(command.partition(" > ")[0])[1:]
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


def test_the_pages_show_every_command() -> None:
    shown = {shlex.split(command)[1] for page in PAGES.values() for command in commands(page)}
    assert set(COMMANDS) - {"bench"} <= shown


def test_the_list_of_what_does_not_run_is_short_and_of_lines_that_are_there() -> None:
    shown = {command for page in PAGES.values() for command in commands(page)}
    assert set(EXEMPT) <= shown
    assert len(EXEMPT) <= 4


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
        with pytest.raises((SystemExit, UserError)):
            parse(command, monkeypatch)


def test_the_walk_is_that_of_the_readme() -> None:
    walk = [command for command in commands(PAGES["walk.md"]) if "RUN" not in command]
    assert [shlex.split(command)[1] for command in walk] == ["pretrain", "export", "report"]
    assert set(walk) <= set(commands(PAGES["README.md"]))
