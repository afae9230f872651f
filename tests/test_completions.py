"""Completions in the shells themselves: commands, flags, the words that a flag takes, and files where it knows none."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from pmae.cli import COMMANDS, main
from pmae.cli.pretrain import SHORT
from pmae.data.sets import NAMED
from pmae.spaces import SPACES


def printed(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completions", shell]) == 0
    return capsys.readouterr().out


@pytest.fixture
def script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    (tmp_path / "pmae.bash").write_text(printed("bash", capsys))
    return tmp_path / "pmae.bash"


def offered(script: Path, *lines: str) -> list[set[str]]:
    """What bash offers after each line; the last word is the one that is being typed."""
    ask = 'COMP_WORDS=({words}); COMP_CWORD={last}; _pmae; echo "${{COMPREPLY[*]}}"'
    words = [[*line.split(), *([""] if line.endswith(" ") else [])] for line in lines]
    asked = [ask.format(words=" ".join(f"'{word}'" for word in each), last=len(each) - 1) for each in words]
    command = ["bash", "--norc", "-c", "\n".join([f"source {script}", *asked])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return [set(line.split()) for line in done.stdout.split("\n")[:-1]]


CASES: dict[str, set[str]] = {
    "pmae ": {*COMMANDS, "--help", "--version"},
    "pmae ev": {"evaluate"},
    "pmae pretrain --train.ep": {"--train.epochs"},
    "pmae pretrain --ep": {"--epochs"},
    "pmae pretrain --augment.no": {"--augment.no-crop", "--augment.no-flip"},
    "pmae pretrain --space ": set(SPACES),
    "pmae pretrain --space.name pc": {"pca"},
    "pmae pretrain --decoder ": {"released", "text", "small"},
    "pmae pretrain --data.channels ": {"1", "3"},
    "pmae pretrain --data ": set(NAMED),
    "pmae pretrain --data scans/": set(),
    "pmae evaluate runs/a --pre": {"--preset"},
    "pmae evaluate runs/a --preset ": {"paper", "released", "plain", "strong"},
    "pmae evaluate runs/a --preset paper ": set(),
    "pmae evaluate runs/a --protocols linear ": {"linear", "mlp", "knn", "finetune"},
    "pmae evaluate --with ": {"mae"},
    "pmae export runs/a --format hug": {"huggingface"},
    "pmae export runs/a --o": {"--out"},
    "pmae data ci": {"cifar10"},
    "pmae sweep space.na": {"space.name"},
    "pmae spaces ": {"figures", "table"},
    "pmae spaces table --spaces pca wave": {"wavelet"},
    "pmae spaces table --spaces ": set(SPACES),
    "pmae paper main --pooling ": {"cls", "mean"},
    "pmae paper main --methods mae_std mae_r": {"mae_random"},
    "pmae paper main --preset strong p": {"paper", "plain"},
    "pmae completions ": {"bash", "zsh", "fish"},
    "pmae nothing ": set(),
}


def test_bash_offers_what_may_follow(script: Path) -> None:
    assert dict(zip(CASES, offered(script, *CASES), strict=True)) == CASES


def test_where_it_knows_nothing_bash_offers_files(script: Path) -> None:
    told = subprocess.run(
        ["bash", "--norc", "-c", f"source {script}; complete -p pmae"], capture_output=True, text=True, check=True
    )
    assert told.stdout.split() == ["complete", "-o", "default", "-F", "_pmae", "pmae"]


def test_every_flag_of_every_command_is_there(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The flags that each command's help shows, drawn there by argparse and by tyro."""
    for command, flags in zip(COMMANDS, offered(script, *(f"pmae {name} -" for name in COMMANDS)), strict=True):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        shown = capsys.readouterr().out
        usage = shown.partition("examples:")[0] if command != "pretrain" else shown
        # tyro's own completion is no flag of ours.
        listed = set(re.findall(r"(?<![\w-])--[a-z][a-z.-]*[a-z]", usage)) - {"--tyro-print-completion"}
        assert listed <= flags, command
        assert {flag for flag in flags if flag.startswith("--")} <= listed | set(SHORT), command


def test_fish_and_zsh_take_their_scripts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for shell in ("fish", "zsh"):
        file = tmp_path / shell
        file.write_text(printed(shell, capsys))
        assert all(command in file.read_text() for command in COMMANDS)
        if shutil.which(shell):
            subprocess.run([shell, "-n", str(file)], check=True)
    if shutil.which("fish"):
        asked = "; ".join(f'complete -C "pmae {line}"' for line in ("pretrain --train.ep", "export --format hug", "ev"))
        command = ["fish", "--no-config", "-c", f"source {tmp_path / 'fish'}; {asked}"]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        assert [line.split("\t")[0] for line in lines] == ["--train.epochs", "huggingface", "evaluate"]


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completions", "bish"]) == 2
    assert "shell: unknown name 'bish'; did you mean" in capsys.readouterr().err
