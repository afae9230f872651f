"""Every command and Python block of README and docs runs, page by page, as written but for sizes that fit a test."""

import contextlib
import glob
import itertools
import multiprocessing
import re
import shutil
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import run as distributed_run
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from pmae.app import explorer
from pmae.cli import COMMANDS, main

from .conftest import SMALL, pixels
from .pages import EXEMPT, PAGES, ROOT, Step, commands, files_of, is_file, steps, words

SIZES = [("encoder.width", 16), ("encoder.depth", 4), ("decoder.width", 16), ("decoder.depth", 1)]
SETTINGS = [*SIZES, ("encoder.heads", 2), ("decoder.heads", 2), ("train.batch_size", 16)]
FLAGS = [word for key, value in SETTINGS for word in (f"--{key.replace('_', '-')}", str(value))]
SET = ["--device", "cpu", "--set", *(f"{key}={value}" for key, value in SETTINGS)]
MORE: dict[str, list[str]] = {
    "pretrain": ["--epochs", "1", *FLAGS, "--device", "cpu"],
    "sweep": ["--epochs", "1", *SET],
    "paper": ["--ratios", "0.2", "--head-epochs", "1", "--protocols", "linear", "knn", *SET],
    "spaces": ["--head-epochs", "1", *SET],
    "evaluate": ["--device", "cpu"],
    "embed": ["--device", "cpu"],
    "finetune": ["--epochs", "1", "--device", "cpu"],
    "predict": ["--device", "cpu"],
    "explore": ["--no-browser"],
    "demo": ["--epochs", "1"],
}
"""What a test adds to a command, by its name: the smallest model for one epoch, and no browser."""


def smaller(command: list[str]) -> list[str]:
    """The same command on smaller images, for one epoch and one seed, fewer runs and a smaller network of timm's."""
    text = "\0".join(command).replace("vit_small_patch16_224", "test_vit")
    text = text.replace("0.2\x000.3\0optim.base_lr\x002.4e-3\0", "0.3\0optim.base_lr\0")  # four of nine
    for pattern, value in (("epochs", "1"), ("minutes", "0.2"), ("data.resize", "16"), ("seeds", "0")):
        text = re.sub(rf"({pattern}[\0=])[\d\0]*\d", rf"\g<1>{value}", text)
    # Four processes go on where two stopped; one does the same, also another number, for a quarter of the time.
    command = re.sub(r"(nproc-per-node\0)4|(at-once\0)\d", r"\1\g<2>1", text).split("\0")
    name = next(word for word in command if word in COMMANDS)
    no_epochs = "--minutes" in command or (name == "finetune" and "linear" in command)
    more = MORE.get(name, [])[2 if no_epochs else 0 :]
    more = [*more, *(["--draws", "2"] if "--shots" in command or "--label-fraction" in command else [])]
    if "--encoder" in command:  # whose sizes are its own
        more = [word for flag in zip(more[::2], more[1::2], strict=True) if "encoder." not in flag[0] for word in flag]
    more = [*more, *(["--optim.warmup-epochs", "1"] if "released" in command else [])]
    if "digits" in command:  # more than a thousand images, where stand-ins have tens
        more = re.sub(r"(batch.size[\0=])16", r"\g<1>128", "\0".join(more)).split("\0")
    return command if "--resume" in command or "--list" in command else [*command, *more]


def expanded(command: list[str], line: str) -> list[str]:
    """Patterns of file names as a shell would replace them, where they are not in quotes."""
    bare = [("*" in word and f"'{word}'" not in line, word) for word in command]
    return [each for pattern, word in bare for each in (sorted(glob.glob(word)) if pattern else [word])]


def pmae(command: list[str]) -> None:
    """A command in this process; what it was told to write is there afterwards."""
    arguments, _, target = "\0".join(command).partition("\0>\0")
    if target:
        with Path(target).expanduser().open("w") as file, contextlib.redirect_stdout(file):
            assert main(arguments.split("\0")) == 0
        assert Path(target).expanduser().read_text()
        return
    assert main(command) == 0
    for flag, value in itertools.pairwise(command):
        assert flag not in ("-o", "--out") or Path(value).exists(), f"{value} was to be written"


def torchrun(command: list[str]) -> None:
    """Processes of their own, over Gloo on this machine, of a server that has imported what they need."""
    multiprocessing.set_forkserver_preload(["pmae.train.loop"])

    def launch(config: LaunchConfig, entrypoint: str) -> Callable[..., object]:
        config.start_method = "forkserver"
        return lambda *arguments: elastic_launch(config, main)(list(arguments[arguments.index("pmae") + 1 :]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed_run, "elastic_launch", launch)
        patch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGQUIT")  # and leave those alone that other tests send
        distributed_run.main(command)


RUN: dict[str, Callable[[list[str]], None]] = {"pmae": pmae, "torchrun": torchrun}


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Each page that `pmae explore` opens is asked for once, and then ended as by Ctrl-C."""
    pages: list[str] = []
    open_page = explorer.open_page

    def opened(*arguments: Any) -> tuple[Any, str]:
        page, address = open_page(*arguments)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(address, timeout=60) as answer:
            pages.append(answer.read().decode())
        return page, address

    def stop() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(explorer, "open_page", opened)
    monkeypatch.setattr(explorer, "wait", stop)
    return pages


@pytest.fixture
def namespace() -> dict[str, Any]:
    """What the blocks of a page take for granted."""
    images = pixels(32, 16, 16, 3)
    batch = torch.from_numpy(images[:8].transpose(0, 3, 1, 2).copy())
    labels = np.arange(len(images)) % 2
    given = {"images": images, "labels": labels, "others": images[:8], "array": images, "batch": batch}
    return {**given, "small": SMALL, "__name__": "my_spaces"}


def execute(block: str, names: dict[str, Any]) -> None:
    """A block of Python with the smallest settings."""
    block = re.sub(r"epochs=\d+", "epochs=1", block).replace("(200, 32, 32, 3)", "(32, 16, 16, 3)")
    block = block.replace("pmae.Config()", "small").replace("PMAE(", "PMAE(config=small, ")
    # Blocks lean on the imports of the page's introduction.
    exec("import pmae", names)
    exec(block, names)


def prepare(page: Path, folder: Path, run: Path) -> None:
    """What the page begins with: runs that it only reads, our results, its class in a file, no set that it fetches."""
    text = "\n".join(commands(page))
    written = {*re.findall(r"--out (runs/\w+)", text), "runs/demo"}
    for name in set(re.findall(r"(?<![\w/])runs/\w+", text)) - written:
        shutil.copytree(run, folder / name)
    for file, block in files_of(page).items():
        (folder / file).write_text(block)
    if "pmae data cifar10" in text:
        shutil.rmtree(folder / "data" / "cifar-10-batches-bin")
    (folder / "results").symlink_to(ROOT / "results")


def perform(step: Step, names: dict[str, Any], run: str) -> None:
    """Run one step; a run folder that it makes anew makes room for it."""
    for out in re.findall(r"(?:--out |out=\")(runs/\w+)", step.text):
        if "--resume" not in step.text:
            shutil.rmtree(out, ignore_errors=True)
    if step.kind == "python" and not is_file(step):
        execute(step.text, names)
    if step.kind == "python":
        return
    program, *rest = words(step.text.replace(" RUN ", f" {run} "))
    RUN[program](expanded(smaller(rest), step.text))


@pytest.mark.parametrize("name", [name for name, page in PAGES.items() if steps(page)])
def test_a_page_runs_from_top_to_bottom(
    name: str,
    reader: Path,
    stand_ins: Path,
    namespace: dict[str, Any],
    served: list[str],
    registry: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = PAGES[name]
    prepare(page, reader, stand_ins / "run")
    shown = [step for step in steps(page) if " ".join(words(step.text)) not in EXEMPT or step.kind == "python"]
    mine = [out for step in shown for out in re.findall(r"--out (runs/\w+)", step.text)]
    for step in shown:
        perform(step, namespace, mine[0] if mine else "")
    asked = [step for step in shown if step.text.startswith("pmae explore")]
    assert len(served) == len(asked)
    assert all("gradio" in html for html in served)
