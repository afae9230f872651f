"""Print the script that completes commands, flags and values in bash, zsh or fish."""

import argparse
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pmae.cli.shells import Flag

EXAMPLES = """examples:
  pmae completions bash > ~/.pmae-completion.bash                 and source that file in ~/.bashrc
  pmae completions zsh > ~/.zfunc/_pmae                           a folder of $fpath, before compinit
  pmae completions fish > ~/.config/fish/completions/pmae.fish
"""
PATHS = ("data", "data.source", "probe.data")
"""What takes a path as well as a known name."""


def run(arguments: list[str]) -> None:
    """Parse, call, print."""
    options = parser().parse_args(arguments)
    from pmae.cli import COMMANDS
    from pmae.cli.shells import SHELLS
    from pmae.errors import unknown_name

    if options.shell not in SHELLS:
        raise unknown_name("shell", options.shell, SHELLS)
    known = known_words()
    print(SHELLS[options.shell](COMMANDS, {name: flags_of(name, known) for name in COMMANDS}), end="")


def parser() -> argparse.ArgumentParser:
    """What the command takes."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "pmae completions", description=__doc__, epilog=EXAMPLES, formatter_class=raw, allow_abbrev=False
    )
    parser.add_argument("shell", help="bash, zsh or fish")
    return parser


def flags_of(command: str, known: dict[str, tuple[str, ...]]) -> "list[Flag]":
    """Everything that a command takes."""
    from importlib import import_module

    from pmae.cli.shells import Flag

    taken: argparse.ArgumentParser = import_module(f"pmae.cli.{command}").parser()
    found = [_flag(command, action, known) for action in taken._actions]
    return found if command != "pretrain" else [*found, *_settings(known), Flag(("-h", "--help"), takes="none")]


def _flag(command: str, action: argparse.Action, known: dict[str, tuple[str, ...]]) -> "Flag":
    from pmae.cli.shells import Flag

    takes = "none" if action.nargs == 0 else "many" if action.nargs in ("+", "*") else "one"
    named = known.get(f"{command} {action.dest}") or known.get(action.dest, ())
    words = tuple(map(str, action.choices)) if action.choices else named
    help = (action.help or "").partition("\n")[0]
    return Flag(tuple(action.option_strings), words, takes, not words or action.dest in PATHS, help)


def _settings(known: dict[str, tuple[str, ...]]) -> "Iterator[Flag]":
    """Every setting of `pmae pretrain` by its dotted name, and by its short one where it has one."""
    from typing import get_type_hints

    from pmae.cli.pretrain import SHORT
    from pmae.cli.shells import Flag
    from pmae.config import Config

    short = {long: flag for flag, long in SHORT.items()}
    for section, kind in get_type_hints(Config).items():
        for name, hint in get_type_hints(kind).items():
            long, setting = f"--{section}.{name.replace('_', '-')}", f"{section}.{name}"
            if hint is bool:
                yield Flag((long, f"--{section}.no-{name.replace('_', '-')}"), takes="none")
                continue
            words = _choices(hint) or known.get(setting, ())
            names = (long, short[long]) if long in short else (long,)
            yield Flag(names, words, files=not words or setting in PATHS)


def _choices(hint: object) -> tuple[str, ...]:
    """The words of a Literal, alone or in a union with None."""
    from typing import Literal, get_args, get_origin

    literals = [part for part in (hint, *get_args(hint)) if get_origin(part) is Literal]
    return tuple(str(word) for literal in literals for word in get_args(literal))


def known_words() -> dict[str, tuple[str, ...]]:
    """Names that a flag takes, by what argparse or the settings call it, from the tables that the code itself reads."""
    from pmae.cli.shells import SHELLS
    from pmae.cli.spaces import PARTS
    from pmae.config import Config
    from pmae.config_file import to_dict
    from pmae.data.fetch import FETCHABLE
    from pmae.data.sets import NAMED
    from pmae.embed import POOLINGS
    from pmae.evaluate.protocols import PRESETS
    from pmae.export import FORMATS
    from pmae.paper.recipes import RECIPES
    from pmae.paper.tables import DATASETS, ITEMS, ROWS
    from pmae.results import PROTOCOLS
    from pmae.spaces import SPACES
    from pmae.sweep.scored import SHOWN

    settings = [f"{section}.{name}" for section, values in to_dict(Config()).items() for name in values]
    devices = ("auto", "cpu", "cuda")
    tables: dict[str, Iterable[str]] = {
        **dict.fromkeys(PATHS, NAMED),
        **dict.fromkeys(("device", "train.device"), devices),
        "completions shell": SHELLS,
        "data name": FETCHABLE,
        "datasets": DATASETS,
        "encoder.name": ("vit_tiny",),
        "format": FORMATS,
        "paper methods": ROWS,
        "paper names": (*ITEMS, "status"),
        "paper pooling": SHOWN,
        "pooling": POOLINGS,
        "preset": PRESETS,
        "protocols": PROTOCOLS,
        "recipe": RECIPES,
        "space.name": SPACES,
        "spaces parts": PARTS,
        "spaces spaces": SPACES,
        "split": ("all", "train", "val", "test"),
        "sweep settings": ("ratio", *settings),
    }
    return {name: tuple(words) for name, words in tables.items()}
