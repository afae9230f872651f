"""Examine this machine: versions, devices, compiler, all-reduce and, with --data, memory and disk for a set."""

import argparse
import sys

EXAMPLES = """examples:
  pmae doctor
  pmae doctor --data scans/

Each line is ok, a warning or a problem, with what to do; the exit code is 1 if there is a problem.
"""


def run(arguments: list[str]) -> None:
    """Parse, call, print."""
    options = parser().parse_args(arguments)
    from pmae.doctor import examine

    problems = 0
    for level, subject, words, advice in examine(options.data, options.root):
        print(f"{level:<8} {subject:<14} {words}{f'   -> {advice}' if advice else ''}", flush=True)
        problems += level == "problem"
    if problems:
        sys.exit(1)
    print("ready to train")


def parser() -> argparse.ArgumentParser:
    """What the command takes."""
    parser = argparse.ArgumentParser(
        "pmae doctor",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--data", help="a named set or the path of one, to see what training on it takes")
    parser.add_argument("--root", default="data", help="folder that holds named sets")
    return parser
