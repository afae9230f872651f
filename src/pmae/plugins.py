"""Spaces, losses, augmentations, encoders and callbacks of your own: registered in your file, used by name.

A name may carry options, `jitter(strength=0.4)`, which are the keyword-only parameters of what is registered. Code is
never imported because a run's files name it: you import it, give it to `--import`, or install a package that offers it.
"""

import ast
import contextlib
import functools
import hashlib
import importlib.util
import inspect
import os
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import EntryPoints, entry_points
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pmae.config import Config
from pmae.errors import Interrupted, UserError, require, require_known, unknown_name
from pmae.validation import coerced

T = TypeVar("T")
GROUPS = {
    "space": "pmae.spaces",
    "objective": "pmae.objectives",
    "contrastive": "pmae.contrastive",
    "augmentation": "pmae.augmentations",
    "encoder": "pmae.encoders",
    "callback": "pmae.callbacks",
}
"""What can be registered, and the group of entry points under which an installed package offers it."""
TABLES: dict[str, dict[str, Any]] = {kind: {} for kind in GROUPS}
"""What is registered, by kind and name; the package's own spaces are here too."""
RESERVED = {"objective": "squared", "contrastive": "nt_xent", "encoder": "vit_tiny"}
LINE = re.compile(r"(\w+) (\w+) (.+) sha256:(\w+)")
VARIABLE = "PMAE_IMPORT"
"""Environment variable: modules and files that a process imports where a name is unknown; so workers know it too."""


def register(kind: str, name: str) -> Callable[[T], T]:
    """A decorator under whose name a class or a function is used: `@register("space", "hadamard")`."""
    require_known("kind", [kind], TABLES)
    require(name.isidentifier() and name != RESERVED.get(kind), "name", "a new Python name", name)

    def enter(made: T) -> T:
        old = TABLES[kind].get(name)
        # The same one again is a file that is imported twice, or a cell of a notebook that runs again.
        again = old is not None and (old.__module__, old.__qualname__) == (made.__module__, made.__qualname__)  # type: ignore[attr-defined]
        require(old is None or again, "name", f"one that no other {kind} has", name)
        TABLES[kind][name] = made
        return made

    return enter


def load(module: str) -> None:
    """Import a module by its dotted name or a file by its path, from the current folder too; it registers its names."""
    path = Path(module).expanduser()
    name = path.stem if path.suffix == ".py" else module
    try:
        if path.suffix == ".py":
            require(path.is_file(), "import", "a module or a file that exists", module)
            spec = importlib.util.spec_from_file_location(name, path.resolve())
            assert spec is not None
            assert spec.loader is not None
            sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[name])
        else:
            if os.getcwd() not in sys.path:
                sys.path.append(os.getcwd())
            import_module(name)
    except UserError:
        raise
    except Exception as error:  # it is somebody's program
        raise UserError(f"import of {module!r} failed: {type(error).__name__}: {error}") from error
    os.environ[VARIABLE] = os.pathsep.join(dict.fromkeys([*_given(), str(path.resolve()) if path.suffix else module]))


def _given() -> list[str]:
    return [each for each in os.environ.get(VARIABLE, "").split(os.pathsep) if each]


def command_line(*words: Path | str | int) -> str:
    """A command to copy, quoted for a shell, with the `--import` that this process was given: it needs them too."""
    here = [os.path.relpath(each) if Path(each).is_relative_to(Path.cwd()) else each for each in _given()]
    return shlex.join(["pmae", *map(str, words), *(word for each in here for word in ("--import", each))])


def parse(given: str, parameter: str) -> tuple[str, dict[str, Any]]:
    """`name` or `name(key=value, ...)` as a name and its options."""
    if "(" not in given:
        return given, {}
    try:
        call = ast.parse(given, mode="eval").body
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and not call.args:
            return call.func.id, {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
    except (SyntaxError, ValueError, TypeError):
        pass
    raise UserError(f"{parameter} must be a name, or one with options as name(key=value), got {given!r}")


def is_registered(kind: str, name: str) -> bool:
    """Whether the name is known, after a look at the variable and at what is installed."""
    if name not in TABLES[kind]:
        for module in _given():
            if (Path(module).stem if module.endswith(".py") else module) not in sys.modules:
                load(module)
    if name not in TABLES[kind]:
        for entry in _offered(GROUPS[kind]).select(name=name):
            TABLES[kind][name] = entry.load()
    return name in TABLES[kind]


@functools.cache
def _offered(group: str) -> EntryPoints:
    """What installed packages offer: a file of each is read, which takes longer than all else that settles a run."""
    return entry_points(group=group)


def find(kind: str, given: str, parameter: str) -> functools.partial[Any]:
    """The class or function that is registered under a name, with its options."""
    name, options = parse(given, parameter)
    if not is_registered(kind, name):
        raise unknown_name(parameter, name, {*TABLES[kind], *filter(None, [RESERVED.get(kind)])})
    made = TABLES[kind][name]
    parameters = inspect.signature(made).parameters.values()
    needed = (p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty)
    if missing := [option for option in needed if option not in options]:
        raise UserError(f"{parameter} must be {name}({missing[0]}=...), as that has no default, got {given!r}")
    return functools.partial(made, **_checked(name, made, options))


def build(kind: str, given: str, parameter: str) -> Any:
    """Something to be called: an object of a registered class, or a registered function."""
    found = find(kind, given, parameter)
    return found() if isinstance(found.func, type) else found


def _checked(name: str, made: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Options by the types of the keyword-only parameters that they are for."""
    if not options:
        return {}
    parameters = inspect.signature(made, eval_str=True).parameters.values()
    hints = {p.name: Any if p.annotation is p.empty else p.annotation for p in parameters if p.kind is p.KEYWORD_ONLY}
    require_known(f"option of {name}", options, hints)
    return {key: coerced(value, hints[key], f"{name}.{key}") for key, value in options.items()}


class Plugin(NamedTuple):
    """A registered name that a configuration uses, and whose file it is in; text in a run's config.json."""

    kind: str
    name: str
    file: str
    sha256: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name} {self.file} sha256:{self.sha256}"


def _names(config: Config) -> list[tuple[str, str, str]]:
    """Kind, name and setting of everything in a configuration that can be registered."""
    objective = config.objective
    given = [("space", config.space.name, "space.name"), ("objective", objective.loss, "objective.loss")]
    given += [("encoder", config.encoder.name, "encoder.name")]
    given += [("contrastive", objective.contrastive, "objective.contrastive")] * (objective.contrastive_weight != 0)
    given += [("augmentation", each, "augment.extra") for each in config.augment.extra or ()]
    return given + [("callback", each, "train.callbacks") for each in config.train.callbacks]


def used(config: Config) -> list[tuple[Plugin, Path | None]]:
    """What a configuration uses that is not ours, and the file that it comes from, where there is one."""
    found = []
    for kind, text, parameter in _names(config):
        name, _ = parse(text, parameter)
        if name != RESERVED.get(kind) and is_registered(kind, name):
            made = TABLES[kind][name]
            if not made.__module__.startswith("pmae."):
                path = _file_of(made)
                plugin = Plugin(kind, name, path.name if path else made.__module__, _digest(made, path))
                found.append((plugin, path))
    return found


def sources(config: Config) -> tuple[str, ...]:
    """One line for everything registered that a configuration uses: kind, name, file and the file's hash."""
    return tuple(str(plugin) for plugin, _ in used(config))


def _file_of(made: Any) -> Path | None:
    with contextlib.suppress(TypeError, OSError):
        found = inspect.getsourcefile(inspect.unwrap(made))
        return Path(found) if found and Path(found).is_file() else None
    return None


def _digest(made: Any, path: Path | None) -> str:
    """Of the file or, of a cell in a notebook, of the definition alone."""
    try:
        content = path.read_bytes() if path else inspect.getsource(made).encode()
    except (TypeError, OSError):
        return "unknown"
    return hashlib.sha256(content).hexdigest()[:16]


def require_plugins(config: Config, unchanged: bool = False) -> None:
    """Refuse names that nobody has registered here and, to go on with a run, files that have changed."""
    now = {(plugin.kind, plugin.name): plugin for plugin, _ in used(config)}
    for line in config.train.plugins:
        written = LINE.fullmatch(line)
        if written is None:
            raise UserError(f"train.plugins must be as a run writes it, got {line!r}")
        kind, name, file, digest = written.groups()
        if (kind, name) not in now:
            rule = f"must be registered before this run is used: import {file!r}, as it did"
            raise UserError(f"{kind} {name!r} {rule} (pmae COMMAND --import {file})")
        if unchanged and str(now[kind, name]) != line:
            changed = f"{file!r} has the SHA-256 {now[kind, name].sha256} and had {digest}"
            raise UserError(f"{kind} {name!r} must be what the run began with: {changed}; take it back or begin anew")
    for kind, text, parameter in _names(config):
        # Any model of timm is an encoder, which timm itself has to know.
        if kind != "encoder" and parse(text, parameter)[0] != RESERVED.get(kind):
            find(kind, text, parameter)


@contextlib.contextmanager
def plugin_errors(config: Config, when: Callable[[], str]) -> Iterator[None]:
    """One sentence for whatever the code of a plug-in raises, with its place; other errors are ours and stay."""
    try:
        yield
    except (UserError, Interrupted):
        raise
    except Exception as error:
        files = {str(path): plugin for plugin, path in used(config) if path}
        for frame in reversed(traceback.extract_tb(error.__traceback__)):
            if plugin := files.get(frame.filename):
                said = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
                where = f"{plugin.file}, line {frame.lineno}"
                raise UserError(f"{plugin.kind} {plugin.name!r} failed {when()}: {said} ({where})") from error
        raise
