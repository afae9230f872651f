"""Pretrain a small PMAE on photographs that ship with scikit-image and show what it learned."""

import argparse

EXAMPLES = """examples:
  pmae demo
  pmae demo --epochs 1 --out runs/quick
"""


def run(arguments: list[str]) -> None:
    """Parse, call, print."""
    options = parser().parse_args(arguments)
    from pmae.demo import demo as run_demo

    run_demo(options.out, options.epochs)


def parser() -> argparse.ArgumentParser:
    """What the command takes."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "pmae demo", description=__doc__, epilog=EXAMPLES, formatter_class=raw, allow_abbrev=False
    )
    parser.add_argument("--out", default="runs/demo", help="run folder; an old demo there is replaced")
    parser.add_argument("--epochs", type=int, default=None, help="passes over the crops")
    return parser
