"""Fetch and verify a named data set; the only command that uses the network."""

import argparse

EXAMPLES = """examples:
  pmae data cifar10
  pmae data bloodmnist --root data
"""


def run(arguments: list[str]) -> None:
    """Parse, call, print."""
    options = parser().parse_args(arguments)
    from pathlib import Path

    from pmae.data.fetch import fetch

    print("\n".join(fetch(options.name, Path(options.root))))


def parser() -> argparse.ArgumentParser:
    """What the command takes."""
    from pmae.data.fetch import FETCHABLE

    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "pmae data", description=__doc__, epilog=EXAMPLES, formatter_class=raw, allow_abbrev=False
    )
    parser.add_argument("name", help=f"one of {', '.join(FETCHABLE)}")
    parser.add_argument("--root", default="data", help="folder that holds named sets")
    return parser
