"""From words to a command's dataclass by tyro, and the options that commands share.

A mistake is one sentence with the option, the rule and the value.
"""

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeVar

import tyro

from pmae.config import DataConfig
from pmae.errors import UserError

T = TypeVar("T")

Text = Annotated[str | None, tyro.conf.arg(metavar="TEXT", help_behavior_hint="")]
Count = Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")]
Number = Annotated[float | None, tyro.conf.arg(metavar="X", help_behavior_hint="")]
"""Options that may be left out, where their sentence says what happens then."""
ColumnNames = Annotated[tuple[str, ...], tyro.conf.arg(metavar="WHAT=NAME...", help_behavior_hint="")]
Folders = Literal["none", "folders"] | None
RunFolder = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN", help_behavior_hint="")]
RunOrWeights = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN_OR_WEIGHTS", help_behavior_hint="")]
Out = Annotated[str, tyro.conf.arg(aliases=["-o"], metavar="PATH")]
Switch = Annotated[tyro.conf.FlagCreatePairsOff[bool], tyro.conf.arg(help_behavior_hint="")]


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """How image files are read, where it is not as those that were trained on."""

    resize: Count = None
    """Resize image files to this side; as those that were trained on if not given."""
    channels: Literal[1, 3] | None = None
    """Convert image files; as those that were trained on if not given."""
    root: Text = None
    """Folder of named sets, if not the run's."""
    max_unreadable: Count = None
    """How many unreadable files may be passed over; 10, and any number when labels are predicted, if not given."""

    def applied(self, reading: DataConfig, **more: Any) -> DataConfig:
        more |= {name: getattr(self, name) for name in ("resize", "channels", "root", "max_unreadable")}
        return replace(reading, **{name: value for name, value in more.items() if value is not None})


@dataclass(frozen=True, kw_only=True)
class OtherData(Conversion):
    """How to read images that are not the run's own."""

    def read_as(
        self, of_run: DataConfig, shape: Sequence[int] | None, source: str | None, given: str | None, labels: str | None
    ) -> DataConfig:
        """A source, or the run's own, in the run's way and for its shape; labels as given, or else these."""
        from pmae.data.sets import is_sharded, read_like

        where: dict[str, Any] = {"source": source, "root": self.root, "labels": labels}
        where = {name: value for name, value in where.items() if value is not None}
        reading = replace(of_run, **where, max_images=of_run.max_images if source is None else None)
        reading = reading if shape is None else read_like(reading, shape)
        reading = replace(reading, labels="none") if is_sharded(reading) else reading
        return self.applied(reading, labels=given)


SHORT = {
    "data": "data.source",
    "root": "data.root",
    "epochs": "train.epochs",
    "batch_size": "train.batch_size",
    "seed": "train.seed",
    "device": "train.device",
    "space": "space.name",
    "masked_variance": "masking.masked_variance",
    "masked_patches": "masking.masked_patches",
    "init": "encoder.weights",
    "encoder": "encoder.name",
    "patch_size": "encoder.patch_size",
    "decoder": "decoder.name",
    "probe_data": "probe.data",
}
"""The settings that have a short option."""
NAMED = {setting: option for option, setting in SHORT.items()} | {"fewlabels.fractions": "label_fraction"}
WORDS = {
    "{None}|": "",
    "'None', ": "",
    ", 'None'": "",
    "INT": "a whole number",
    "FLOAT": "a number",
    "{True,False}": "True or False",
}
RULES = (
    (r"Error parsing (\S+): no type matching (.+) could be instantiated from \[(.*?)\].*", r"\1 must be \2, got \3"),
    (r"Error parsing (\S+): invalid literal for int\(\) with base 10: (.*)", r"\1 must be a whole number, got \2"),
    (r"Error parsing (\S+): could not convert string to float: (.*)", r"\1 must be a number, got \2"),
    (r"Error parsing (--\S+): Could not find valid parse for arguments: \[(.*)\]", r"\1 must be numbers, got \2"),
    (r"Error parsing (\S+): Could not parse arguments \[(.*)\] into .*", r"\1 must be numbers, got \2"),
    (r"Error parsing \S+: (.*)", r"\1"),
    (r"invalid choice (.*) for argument '(\S+)'. Expected one of \((.*)\).*", r"\2: unknown name \1; choices: \3"),
    (r"Missing value for argument '(\S+)'. Expected (\d+) values.*", r"\1: expected \2 values"),
    (r"Missing from pmae \w+: (.*)", r"arguments must be complete, missing \1"),
    (r"Unrecognized options: (\S+?)(?:, .*)?", r"options must be among those of this command, got '\1'"),
)
"""What tyro says of a mistake, and how we say it."""


def parse(kind: type[T], arguments: Sequence[str], command: str, default: T | None = None) -> T:
    """The dataclass that a command line describes; `--help` prints its page and leaves."""
    arguments, said, asked = joined(arguments, "--set"), io.StringIO(), bool({"-h", "--help"} & set(arguments))
    # None may be typed, to undo what a recipe or a file says; a page of help does not offer it.
    how = {"prog": f"pmae {command}", "default": default, "config": (tyro.conf.DisallowNone,) if asked else ()}
    try:
        with contextlib.redirect_stderr(said), _help() if asked else _unwrapped():
            return tyro.cli(kind, args=list(arguments), **how)  # type: ignore[call-overload]
    except SystemExit as stop:
        if not stop.code:
            raise
        raise UserError(sentence(said.getvalue())) from None


def as_typed(message: str, arguments: Sequence[str]) -> str:
    """An error with the option that was typed in place of the setting or parameter that it begins with."""
    found = re.match(r"([a-z_]+(?:\.[a-z_]+)?)(?=\[| must| is |: | ')", message)
    if found is None:
        return message
    typed = {word.partition("=")[0].replace("_", "-") for word in arguments}
    setting = found[1]
    names = (setting, NAMED.get(setting, setting.rpartition(".")[2]))
    options = [f"--{name.replace('_', '-')}" for name in names] + ["-o"] * (setting == "out")
    option = next((option for option in options if option in typed), setting)
    return option + message[found.end() :]


def joined(arguments: Sequence[str], option: str) -> list[str]:
    """The values of an option that was given several times behind its first mention: tyro takes the last alone."""
    rest, values, inside = list[str](), list[str](), False
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name == option:
            inside, values = not equals, values + [value] * bool(equals)
            continue
        inside = inside and not argument.startswith("--")
        (values if inside else rest).append(argument)
    return [*rest, option, *values] if values else list(arguments)


def sentence(page: str) -> str:
    """tyro's box of text as one sentence, with the options it would have expected instead."""
    page = re.sub("[│╭╮╰╯]", " ", page)
    _, text, *rest = re.split(r"^.*[─-]{5,} *$", page, flags=re.MULTILINE)
    # What is missing is listed with a sentence on each, indented further.
    text = re.sub(r"^ {10}.*$", "", text, flags=re.MULTILINE) if "Missing from" in text else text
    text = " ".join(text.partition("Got errors:")[0].split())
    text = next((match.expand(said) for pattern, said in RULES if (match := re.fullmatch(pattern, text))), text)
    for symbol, word in WORDS.items():
        text = text.replace(symbol, word)
    near = re.findall(r"^ {4,}(?:-\w \w+, )?(--[\w.-]+)", rest[0], re.MULTILINE) if "Perhaps you meant" in page else []
    return text + (f"; did you mean {' or '.join(near[:3])}?" if near else "")


class _Page(io.StringIO):
    """What is printed, as for the real output: with colours on a terminal."""

    encoding = property(lambda self: sys.__stdout__.encoding if sys.__stdout__ else "utf-8")

    def isatty(self) -> bool:
        return bool(sys.__stdout__ and sys.__stdout__.isatty())


@contextlib.contextmanager
def _help() -> Iterator[None]:
    """A page of help without defaults that are None or empty: the option's sentence says what happens then."""
    page = _Page()
    try:
        with contextlib.redirect_stdout(page):
            yield
    finally:
        default = r"\(default:((?:[\s│]|\x1b\[[\d;]*m)+)(None)?\)"
        print(re.sub(default, lambda m: f"{' ' * 9}{m[1]}{' ' * len(m[2] or '')} ", page.getvalue()), end="")


@contextlib.contextmanager
def _unwrapped() -> Iterator[None]:
    """A terminal so wide that tyro breaks no line of an error."""
    before = os.environ.pop("COLUMNS", None)
    os.environ["COLUMNS"] = "1000"
    try:
        yield
    finally:
        del os.environ["COLUMNS"]
        os.environ.update({} if before is None else {"COLUMNS": before})
