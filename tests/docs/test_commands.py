"""Every `pmae` command in help is one that the command line takes, and the pages show them all."""

import inspect
import re
import shlex

import pytest

from pmae import doctor
from pmae.cli import COMMANDS, main, parsed
from pmae.errors import UserError

from .pages import EXEMPT, PAGES, commands


def in_help(name: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Examples in a command's help; what follows three spaces explains them."""
    with pytest.raises(SystemExit):
        main([name, "--help"])
    # tyro frames its help.
    lines = [line.strip("│ ") for line in capsys.readouterr().out.splitlines()]
    return [re.split(r"\s{3,}", line)[0] for line in lines if f"{line} ".startswith(f"pmae {name} ")]


def parse(command: str) -> None:
    """Raise UserError where the command line would refuse the arguments; nothing is run."""
    name, *arguments = shlex.split(command.partition(" > ")[0])[1:]
    parsed(name, without_files(arguments) if name == "pretrain" else arguments)


def without_files(arguments: list[str]) -> list[str]:
    """A run to resume or a file to start from is not there; the other flags are taken without it."""
    if "--config" in arguments:
        at = arguments.index("--config")
        arguments = arguments[:at] + arguments[at + 2 :]
    return [argument for argument in arguments if argument != "--resume"]


def test_the_pages_show_every_command() -> None:
    shown = {shlex.split(command)[1] for page in PAGES.values() for command in commands(page)}
    assert set(COMMANDS) <= shown


def test_the_list_of_what_does_not_run_is_short_and_of_lines_that_are_there() -> None:
    shown = {command for page in PAGES.values() for command in commands(page)}
    assert set(EXEMPT) <= shown
    assert len(EXEMPT) <= 5


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_examples_that_parse(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    examples = in_help(name, capsys)
    assert len(examples) >= 2
    for command in examples:
        parse(command)


def test_a_wrong_flag_would_be_seen() -> None:
    for command in ("pmae report runs/a --ouput x", "pmae pretrain --epoch 3"):
        with pytest.raises(UserError):
            parse(command)


def test_settings_within_sentences_parse() -> None:
    texts = [page.read_text() for page in PAGES.values()] + [inspect.getsource(doctor)]
    shown = {span for text in texts for span in re.findall(r"(?:`|or )(--[a-z]+\.[a-z-]+ [\w.]+)[`\"]", text)}
    assert "--train.accumulate 4" in shown
    for options in shown:
        parse(f"pmae pretrain {options}")


def test_the_walk_is_that_of_the_readme() -> None:
    walk = [command for command in commands(PAGES["walk.md"]) if "RUN" not in command]
    assert [shlex.split(command)[1] for command in walk] == ["pretrain", "export", "report"]
    assert set(walk) <= set(commands(PAGES["README.md"]))
