"""The command line: parse, call, print. A command's module is imported when the command is asked for."""

import atexit
import contextlib
import gc
import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from pmae.errors import Interrupted, UserError, unknown_name

TITLE = "pmae: learn image representations without labels by masking components instead of pixels"
COMMANDS = {
    "pretrain": ("pretrain", "Pretrain an encoder without labels on a named set, a folder or an array file."),
    "evaluate": ("encoder", "Score a run or given weights with probes, k-NN and fine-tuning, beside simple baselines."),
    "report": ("pages", "Write one self-contained HTML page about one or several runs."),
    "watch": ("pages", "Open a live page about all runs of a folder: curves, pictures, scores, time left."),
    "finetune": ("classify", "Train a classifier on labelled images, from a run or weights, and keep it."),
    "predict": ("classify", "Write label, probability and drift of any number of images to a .csv or .parquet file."),
    "embed": ("encoder", "Write the features of any number of images to a .npz, .csv or .parquet file."),
    "export": ("encoder", "Write a run's encoder for timm, Hugging Face, ONNX or torch; re-loaded and compared first."),
    "explore": ("pages", "Open a page on this machine to play with masks, walk the spectrum and find neighbours."),
    "sweep": ("research", "Pretrain over a grid of settings and find the best by validation."),
    "spaces": ("research", "Compare masking spaces at the same budget in one table, and draw what each hides."),
    "paper": ("research", "Reproduce a table or figure of the paper, beside the published numbers."),
    "data": ("first_steps", "Fetch and verify a named data set."),
    "doctor": ("first_steps", "Examine this machine: versions, devices, compiler, memory and disk."),
    "demo": ("first_steps", "Pretrain a small PMAE on photographs of scikit-image and show what it learned."),
    "completions": ("first_steps", "Print the script that completes commands and flags in bash, zsh or fish."),
}
"""Where a command is, and what `pmae --help` says of it; command `x` is the dataclass `X` there, and its `run`."""
HINTS = (
    "pmae COMMAND --help tells the rest; pmae --version",
    "--import FILE, with any command, brings spaces, losses and callbacks of your own (docs/extend.md)",
)
LASTING = ("pretrain", "evaluate", "finetune", "predict", "embed", "paper", "spaces", "sweep", "export", "demo")
"""Commands whose work is in files: who reads what they print may go away."""
WAITING = {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"}
"""How OpenMP threads wait, read when torch is first imported. By default they spin, and beside another busy process,
which then has the core that the last of them needs, training falls to a tenth of its speed."""
NEW_OBJECTS = 10_000
"""How many before Python looks for garbage. By its own 700 it looks hundreds of times at what torch and timm import,
none of which is garbage: 0.7 of 6.3 s."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; a user's mistake is one line and exit code 2."""
    given = command_first(sys.argv[1:] if arguments is None else arguments)
    if arguments is None:
        _reopen_closed_streams()
        gc.set_threshold(NEW_OBJECTS)
        if not any(name in os.environ for name in (*WAITING, "GOMP_SPINCOUNT")):
            os.environ.update(WAITING)
    if not given or given[0] in ("-h", "--help"):
        lines = [f"  {name:<11} {sentence}" for name, (_, sentence) in COMMANDS.items()]
        print("\n".join([TITLE, "", "commands:", *lines, "", *HINTS]))
        return 0
    if given[0] == "--version":
        from importlib.metadata import version

        print(f"pmae {version('pmae')}")
        return 0
    if given[0] not in LASTING:
        return _run(given)
    from pmae.train.journal import lasting_output

    codes = list[int]()
    if arguments is None:
        atexit.register(_leave, codes)  # the first to be registered is the last to be called
    with lasting_output():
        codes.append(_run(given))
    return codes[0]


def _leave(codes: list[int]) -> None:
    """End the process once all is written: to take the objects of torch apart, one by one, is more than a second."""
    if codes:
        for stream in (sys.stdout, sys.stderr):  # what others said at the end
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(codes[0])


def _run(given: list[str]) -> int:
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warn  # type: ignore[assignment]
            parsed(given[0], imported(given[1:])).run()
    except UserError as error:
        from pmae.cli.parse import as_typed

        print(f"pmae: error: {as_typed(str(error), given)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("pmae: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 1
    except Interrupted as stop:
        print(f"pmae: {stop}", file=sys.stderr)
        return stop.code
    return 0


def command_first(words: Sequence[str]) -> list[str]:
    """The words with `--import MODULE` after the command, where that stood before it."""
    at = 0
    while at < len(words) and words[at].partition("=")[0] == "--import":
        at += 1 if "=" in words[at] else 2
    return [*words[at:], *words[:at]]


def imported(arguments: list[str]) -> list[str]:
    """Arguments of any command without `--import MODULE`, as often as it is there, once each was imported."""
    rest, words = list[str](), iter(arguments)
    for word in words:
        option, _, module = word.partition("=")
        if option != "--import":
            rest.append(word)
            continue
        from pmae.plugins import load

        if not (module := module or next(words, "")):
            raise UserError("--import must be followed by a module or a .py file that registers names")
        load(module)
    return rest


def kind_of(command: str) -> Any:
    module, _ = COMMANDS[command]
    return getattr(import_module(f"pmae.cli.{module}"), command.capitalize())


def parsed(name: str, arguments: Sequence[str]) -> Any:
    """A command with its options, ready to `run`."""
    from pmae.cli.parse import parse

    if name not in COMMANDS:
        raise unknown_name("command", name, COMMANDS)
    kind = kind_of(name)
    return kind.parse(arguments) if hasattr(kind, "parse") else parse(kind, arguments, name)


def _reopen_closed_streams() -> None:
    """Standard streams that were closed (`>&-`) lead nowhere: else the next file opened would take their number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def _warn(message: Warning | str, category: type[Warning], *where: object) -> None:
    """Our own warnings as one plain line; other people's are for developers."""
    if category is UserWarning:
        print(f"pmae: warning: {message}", file=sys.stderr)
