"""The same words as a completion script of bash, zsh or fish."""

import shlex
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Flag:
    """What may be typed: the names of a flag, none for a word that stands alone, and the words that may follow."""

    names: tuple[str, ...]
    words: tuple[str, ...] = ()
    takes: str = "one"
    """How many words follow: none, one or many."""
    files: bool = True
    """Whether a path may be among them."""
    help: str = ""


Flags = dict[str, list[Flag]]
"""What every command takes."""


def bash(commands: dict[str, str], flags: Flags) -> str:
    """One function that looks at the word before and at the last flag; where it knows nothing, bash offers files."""
    return f"""# Written by `pmae completions bash`.
_pmae() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD - 1]}} flag= flags= words= i
  for ((i = 2; i < COMP_CWORD; i++)); do [[ ${{COMP_WORDS[i]}} == -* ]] && flag=${{COMP_WORDS[i]}}; done
  if ((COMP_CWORD == 1)); then words="{" ".join(commands)} --help --version"; else case ${{COMP_WORDS[1]}} in
{"".join(_bash_command(command, flags[command]) for command in commands)}  esac; fi
  [[ $word == -* && -n $flags ]] && words=$flags
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _pmae pmae
"""


def _bash_command(command: str, flags: list[Flag]) -> str:
    names = " ".join(name for flag in flags for name in flag.names)
    alone = " ".join(word for flag in flags if not flag.names for word in flag.words)
    lines = [f"    {command})", f'      flags="{names}" words="{alone}"']
    for variable, takes in (("before", "one"), ("flag", "many")):
        cases = [
            f'{"|".join(flag.names)}) words="{" ".join(flag.words)}" ;;'
            for flag in flags
            if flag.names and flag.takes == takes
        ]
        lines += [f"      case ${variable} in", *(f"        {case}" for case in cases), "      esac"] if cases else []
    return "\n".join([*lines, "      ;;\n"])


def zsh(commands: dict[str, str], flags: Flags) -> str:
    """A function for a folder of $fpath; the specifications are those of `_arguments`."""
    described = " ".join(shlex.quote(f"{name}:{sentence}") for name, sentence in commands.items())
    return f"""#compdef pmae
# Written by `pmae completions zsh`.
_pmae() {{
  local -a commands=({described})
  if ((CURRENT == 2)); then _describe command commands; return; fi
  local command=$words[2]
  shift words; ((CURRENT--))
  case $command in
{"".join(_zsh_command(command, flags[command]) for command in commands)}  esac
}}
# Found in $fpath this file is the function's body; sourced, it announces the function.
if [[ $funcstack[1] == _pmae ]]; then _pmae "$@"; else compdef _pmae pmae; fi
"""


def _zsh_command(command: str, flags: list[Flag]) -> str:
    specifications = [shlex.quote(each) for flag in flags for each in _zsh_specifications(flag)]
    return f"    {command}) _arguments {' '.join(specifications)} ;;\n"


def _zsh_specifications(flag: Flag) -> list[str]:
    known = f"compadd -- {' '.join(flag.words)}"
    action = f"{{{known}; _files}}" if flag.words and flag.files else f"({' '.join(flag.words)})"
    action = action if flag.words else "_files"
    if not flag.names:
        return [f"*:word:{action}"]
    about = f"[{flag.help.translate(str.maketrans('[]', '()'))}]" if flag.help else ""
    after = {"none": "", "one": f":word:{action}", "many": f":*-*:word:{action}"}[flag.takes]
    return [f"*{name}{about}{after}" for name in flag.names]


def fish(commands: dict[str, str], flags: Flags) -> str:
    """One line a command and one a flag."""
    lines = ["# Written by `pmae completions fish`."]
    for command, sentence in commands.items():
        lines.append(f"complete -c pmae -n __fish_use_subcommand -f -a {command} -d {_fish_quote(sentence)}")
        here = f"complete -c pmae -n '__fish_seen_subcommand_from {command}'"
        lines += [f"{here} {_fish_flag(flag)}" for flag in flags[command]]
    return "\n".join(lines) + "\n"


def _fish_flag(flag: Flag) -> str:
    names = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in flag.names)
    after = {True: "-r" if flag.files else "-x", False: ""}[bool(flag.names) and flag.takes != "none"]
    words = f"-a {_fish_quote(' '.join(flag.words))}" if flag.words else ""
    alone = "-f" if not flag.names and not flag.files else ""
    about = f"-d {_fish_quote(flag.help)}" if flag.help else ""
    return " ".join(part for part in (names, after, alone, words, about) if part)


def _fish_quote(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SHELLS: dict[str, Callable[[dict[str, str], Flags], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
