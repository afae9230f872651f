"""Write a run's encoder for timm, Hugging Face, ONNX or torch; it is re-loaded there and compared first."""

import argparse

EXAMPLES = """examples:
  pmae export runs/a --format timm -o exported/timm
  pmae export runs/a --format onnx -o exported/onnx --epoch 50
"""


def run(arguments: list[str]) -> None:
    """Parse, call, print."""
    options = parser().parse_args(arguments)
    from pmae.export import export

    difference = export(options.run, options.format, options.out, options.epoch)
    print(f"exported: {options.out}   (largest difference from the original {difference:.1e})")


def parser() -> argparse.ArgumentParser:
    """What the command takes."""
    parser = argparse.ArgumentParser(
        "pmae export",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run", help="run folder")
    parser.add_argument("--format", required=True, help="timm, huggingface, onnx or torch")
    parser.add_argument("-o", "--out", required=True, help="folder to write, new or empty")
    parser.add_argument("--epoch", type=int, help="which checkpoint; the last if not given")
    return parser
