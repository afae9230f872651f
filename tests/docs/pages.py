"""What README and docs show: their commands and Python blocks in order, and the few lines that no test can run."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = {page.name: page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
EXEMPT = {
    "pip install .": "the wheel's own test builds and opens it",
    "make demo": "installs, then `pmae demo`, which the tutorial runs",
    "make test": "it is what runs this",
    "pmae watch runs/": "serves until Ctrl-C; tests/report/test_watch.py asks for its page",
    "pmae sweep ratio": "names the command inside a sentence; README and docs/choose-a-ratio.md run it with its values",
}
PROGRAMS = ("pmae", "torchrun", "make", "pip")
FENCE = r"^```(?P<language>[^\n]*)\n(?P<block>.*?)^```"
SPAN = r"(?<!`)`(?P<span>pmae [^`]+)`(?!`)"


class Step(NamedTuple):
    """A command line, or a block of Python."""

    kind: str
    text: str


def steps(page: Path) -> list[Step]:
    """All that a page asks its reader to run, from top to bottom."""
    found: list[Step] = []
    for match in re.finditer(f"{FENCE}|{SPAN}", page.read_text(), re.MULTILINE | re.DOTALL):
        if match["span"]:
            found += [Step("command", match["span"])] if is_command(match["span"]) else []
        elif match["language"] == "python":
            found.append(Step("python", match["block"]))
        elif match["language"] in ("", "bash"):
            lines = [line.removeprefix("$ ") for line in match["block"].splitlines()]
            found += [Step("command", line) for line in lines if line.split(" ")[0] in PROGRAMS]
    return found


def is_file(step: Step) -> bool:
    """Whether a block of Python is a file of the reader's, named in its first line."""
    return bool(re.match(r"# \w+\.py\n", step.text))


def files_of(page: Path) -> dict[str, str]:
    """The files that a page has its reader write; that on spaces shows one under another heading."""
    found = {step.text.split("\n")[0][2:]: step.text for step in steps(page) if is_file(step)}
    blocks = [step.text for step in steps(page) if step.kind == "python"]
    return found | ({"my_spaces.py": blocks[0]} if page.name == "add-a-space.md" else {})


def is_command(span: str) -> bool:
    """Whether words within a sentence can be typed as they are: not a command's bare name, and nothing left out."""
    return len(span.split()) > 2 and "..." not in span


def words(command: str) -> list[str]:
    """As a shell would split it, without the comment."""
    return shlex.split(command, comments=True)


def commands(page: Path) -> list[str]:
    """The command lines of a page, plain."""
    return [shlex.join(words(step.text)) for step in steps(page) if step.kind == "command"]
