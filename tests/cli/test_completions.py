"""Completions in the shells themselves: commands, flags and the words that a flag takes."""

import shutil
import subprocess
from pathlib import Path

import pytest

from pmae.cli import COMMANDS, main


def printed(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completions", shell]) == 0
    return capsys.readouterr().out


@pytest.fixture
def script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    (tmp_path / "pmae.bash").write_text(printed("bash", capsys))
    return tmp_path / "pmae.bash"


def offered(script: Path, line: str) -> set[str]:
    """What bash offers after a line; the last word is the one that is being typed."""
    words = [*line.split(), *([""] if line.endswith(" ") else [])]
    given = " ".join(f"'{word}'" for word in words)
    ask = f'COMP_WORDS=({given}); COMP_CWORD={len(words) - 1}; _tyro_pmae; echo "${{COMPREPLY[*]}}"'
    command = ["bash", "--norc", "-c", f"source {script}\n{ask}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


CASES: dict[str, set[str]] = {
    "pmae ev": {"evaluate"},
    "pmae pretrain --train.ep": {"--train.epochs"},
    "pmae pretrain --ep": {"--epochs"},
    "pmae pretrain --augment.no": {"--augment.no-crop", "--augment.no-flip"},
    "pmae pretrain --masking.per ": {"image", "batch"},
    "pmae evaluate runs/a --pre": {"--preset"},
    "pmae evaluate runs/a --preset ": {"paper", "released", "plain", "strong"},
    "pmae export runs/a --format hug": {"huggingface"},
}


@pytest.mark.parametrize("line", CASES)
def test_bash_offers_what_may_follow(line: str, script: Path) -> None:
    assert CASES[line] <= offered(script, line)


def test_bash_offers_every_command_and_never_none(script: Path) -> None:
    assert set(COMMANDS) <= offered(script, "pmae ")
    assert offered(script, "pmae evaluate runs/a --with ") == {"mae"}
    assert offered(script, "pmae embed runs/a --channels ") == {"1", "3"}


@pytest.mark.parametrize("shell", ["fish", "zsh"])
def test_other_shells_take_their_scripts(shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / shell).write_text(printed(shell, capsys))
    assert all(command in (tmp_path / shell).read_text() for command in COMMANDS)
    if shutil.which(shell):
        subprocess.run([shell, "-n", str(tmp_path / shell)], check=True)


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completions", "bish"]) == 2
    assert "shell: unknown name 'bish'; choices: 'bash', 'zsh', 'fish'" in capsys.readouterr().err
