"""What comes before the first run: data, a look at the machine, a demo, completions for the shell."""

import contextlib
import io
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from pmae.cli.parse import Count, Text


@dataclass(frozen=True)
class Data:
    """Fetch and verify a named data set, from the first host that has it; what broke off is resumed.

    examples:
      pmae data cifar10
      pmae data bloodmnist --root data
    """

    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")]
    """cifar10, tinyimagenet, or a set of MedMNIST: bloodmnist, dermamnist, pathmnist."""
    root: str = "data"
    """Folder that holds named sets."""
    mirror: str | None = None
    """Address of a folder with the published files, asked before the hosts that are known."""

    def run(self) -> None:
        from pmae.data.fetch import fetch

        print("\n".join(fetch(self.name, Path(self.root), self.mirror)))


@dataclass(frozen=True)
class Doctor:
    """Examine this machine: versions, devices, compiler and, with --data, memory and disk for a set.

    Each line is ok, a warning or a problem, with what to do; the exit code is 1 if there is a problem.

    examples:
      pmae doctor
      pmae doctor --data scans/
      pmae doctor --data photographs/ --encoder vit_small_patch16_224 --resize 224
    """

    data: Text = None
    """A named set or the path of one, to see what training on it takes."""
    root: str = "data"
    """Folder that holds named sets."""
    encoder: str = "vit_tiny"
    """Whose training is foretold: vit_tiny or any timm image model."""
    resize: Count = None
    """Side of the squares that image files become (--data.resize)."""

    def run(self) -> None:
        from pmae.doctor import examine

        problems = 0
        for level, subject, words, advice in examine(self.data, self.root, self.encoder, self.resize):
            print(f"{level:<8} {subject:<14} {words}{f'   -> {advice}' if advice else ''}", flush=True)
            problems += level == "problem"
        if problems:
            sys.exit(1)
        print("ready to train")


@dataclass(frozen=True)
class Demo:
    """Pretrain a small PMAE on photographs of scikit-image and show what it learned.

    examples:
      pmae demo
      pmae demo --epochs 1 --out runs/quick
    """

    out: str = "runs/demo"
    """Run folder; an old demo there is replaced."""
    epochs: Count = None
    """Passes over the crops."""

    def run(self) -> None:
        from pmae.demo import demo

        demo(self.out, self.epochs)


@dataclass(frozen=True)
class Completions:
    """Print the script that completes commands and flags in a shell; tyro writes it.

    examples:
      pmae completions bash > ~/.pmae-completion.bash                 and source that file in ~/.bashrc
      pmae completions zsh > ~/.zfunc/_pmae                           a folder of $fpath, before compinit
      pmae completions fish > ~/.config/fish/completions/pmae.fish
    """

    shell: tyro.conf.Positional[Literal["bash", "zsh", "fish"]]
    """bash, zsh or fish."""

    def run(self) -> None:
        from pmae.cli import COMMANDS, kind_of

        kinds = {name: kind_of(name) for name in COMMANDS}
        arguments, script = ["--tyro-print-completion", self.shell], io.StringIO()
        how: dict[str, Any] = {"prog": "pmae", "config": (tyro.conf.DisallowNone,)}
        with contextlib.suppress(SystemExit), contextlib.redirect_stdout(script):  # tyro prints and leaves
            tyro.extras.subcommand_cli_from_dict(kinds, args=arguments, **how)
        # None may be typed, and tyro lists it among the choices whatever is asked of it.
        print(re.sub(r", 'None'|'None', | \(default: None\)", "", script.getvalue()), end="")
