"""Write one self-contained HTML page about one or several runs."""

import argparse
import sys

EXAMPLES = """examples:
  pmae report runs/a
  pmae report runs/a runs/b -o both.html
"""


def run(arguments: list[str]) -> None:
    """Parse, call, print."""
    options = parser().parse_args(arguments)
    from pmae.report.page import write_report

    for sentence in write_report(options.runs, options.out):
        print(f"left out: {sentence}", file=sys.stderr)
    print(f"report: {options.out}")


def parser() -> argparse.ArgumentParser:
    """What the command takes."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "pmae report", description=__doc__, epilog=EXAMPLES, formatter_class=raw, allow_abbrev=False
    )
    parser.add_argument("runs", nargs="+", help="run folders; a page about several compares them")
    parser.add_argument(
        "-o", "--out", default="report.html", help="the page to write; its tables and figures go beside"
    )
    return parser
