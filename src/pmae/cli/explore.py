"""Open a page on this machine to play with masks, walk the spectrum and find neighbours."""

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pmae.config import DataConfig
    from pmae.runs import Run

EXAMPLES = """examples:
  pmae explore                              masks on the embedded photographs, without a trained model
  pmae explore runs/a                       with the run's data, predictions, R2 and neighbours
  pmae explore --data scans/ --resize 64    masks on a folder of one's own

The page is served to this machine alone; uploads stay on it and are deleted at the end.
"""


def run(arguments: list[str]) -> None:
    """Parse, call, print."""
    options = parser().parse_args(arguments)
    from pmae.app.explorer import explore, gather, gradio
    from pmae.runs import Run

    # Before the data is read and a space fitted: without Gradio there is no page.
    gradio()
    given = Run(options.run) if options.run else None
    material = gather(given, _data(options, given), _say)
    explore(material, options.port, not options.no_browser, _say)


def parser() -> argparse.ArgumentParser:
    """What the command takes."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "pmae explore", description=__doc__, epilog=EXAMPLES, formatter_class=raw, allow_abbrev=False
    )
    parser.add_argument("run", nargs="?", help="run folder; without one there are masks, but no predictions")
    parser.add_argument("--data", help="a named set, or the path of a folder, .npy or .npz file; the run's, or photos")
    parser.add_argument("--labels", choices=["none", "folders"], help="whether subfolders are classes")
    parser.add_argument("--resize", type=int, help="resize image files to this side; the run's setting if not given")
    parser.add_argument("--channels", type=int, choices=[1, 3], help="convert image files; the run's if not given")
    parser.add_argument("--root", help="folder of named sets, if not the run's")
    parser.add_argument("--port", type=int, help="port to serve on; 7860, or another free one, if not given")
    parser.add_argument("--no-browser", action="store_true", help="print the address and open nothing")
    return parser


def _data(options: argparse.Namespace, run: "Run | None") -> "DataConfig":
    """The run's own way of reading, or the usual one, with what the command line says otherwise."""
    import dataclasses

    from pmae.config import DataConfig
    from pmae.data.sets import converts

    names = {"source": "data", "root": "root", "labels": "labels", "resize": "resize", "channels": "channels"}
    given = {key: getattr(options, name) for key, name in names.items() if getattr(options, name) is not None}
    base = DataConfig() if run is None else run.config.data
    if options.data and not converts(dataclasses.replace(base, source=options.data)):
        # Only image files can be converted; another kind of source must not inherit that from the run.
        base = dataclasses.replace(base, resize=None, channels=None, labels="none")
    return dataclasses.replace(base, **given)


def _say(line: str) -> None:
    print(line, flush=True)
