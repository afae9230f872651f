"""Who may import whom: the rooms have one way up."""

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path
from pkgutil import resolve_name

import pmae

SOURCE = Path(pmae.__file__).parent
LEAVES = {"errors", "validation", "intervals", "config", "config_training", "config_file", "plugins", "system"}
FILES = {"files", "runs", "remote"}
ALLOWED = {
    "errors": set(),
    "validation": {"errors"},
    "config": {"errors", "validation", "config_training"},
    "config_training": {"errors", "validation"},
    "config_file": {"errors", "validation", "config"},
    "derive_case": LEAVES,
    "derive": LEAVES | {"derive_case"},
    "budget": LEAVES | {"derive", "files", "train"},
    "masking": LEAVES,
    "objectives": LEAVES,
    "muon": set(),
    "plugins": {"errors", "validation", "config"},
    "teacher": LEAVES | {"models"},
    "contrastive": LEAVES | {"models", "teacher"},
    "spaces": LEAVES,
    "models": LEAVES | FILES,
    "fast": LEAVES | {"masking", "models", "muon"},
    "data": LEAVES | {"files", "remote", "fast"},
    "method": LEAVES | {"masking", "objectives", "contrastive", "spaces", "models"},
    "flops": LEAVES | {"masking", "models", "contrastive", "spaces"},
    "intervals": {"validation"},
    "results": {"errors", "validation", "intervals"},
    "standing": {"results"},
    "system": set(),
    "files": {"errors", "system"},
    "remote": {"errors", "files"},
    "runs": LEAVES | {"files", "remote", "results"},
    "train": LEAVES | FILES | {"masking", "muon", "spaces", "models", "fast", "data", "method", "flops"},
    "evaluate": LEAVES
    | FILES
    | {"models", "fast", "data", "spaces", "results", "train.schedule"}
    | {"train.distributed"},
    "pretraining": LEAVES
    | FILES
    | {"budget", "derive", "models", "data", "train", "evaluate.probes"}
    | {"classify.labels", "classify.table"},
    # Sweeps and the paper train and evaluate whole runs through the front door and show them, so they stand above both.
    "sweep": LEAVES
    | FILES
    | {"derive", "masking", "spaces", "models", "data", "method", "evaluate.protocols", "report", "results", "standing"}
    | {"train.environment", "train.checkpoint", "api", "paper.recipes"},
    "paper": LEAVES
    | FILES
    | {"derive", "evaluate.protocols", "flops", "report", "results", "api", "sweep"}
    | {"train.stages"},
    "report": LEAVES | FILES | {"results", "standing"},
    "export": LEAVES | FILES | {"models", "data", "results", "standing", "train", "report", "classify"},
    "feature_files": {"errors"},
    "classify": LEAVES
    | FILES
    | {"models", "data", "results", "train", "evaluate", "embed", "feature_files"}
    | {"estimator", "estimator_inputs"},
    "estimator_inputs": LEAVES | {"data"},
    "doctor": LEAVES | {"derive", "spaces", "models", "data", "method", "train.environment"},
    # The page joins what the rooms below it compute, as the command line does.
    "app": LEAVES
    | FILES
    | {"derive", "masking", "spaces", "models", "data", "method", "evaluate", "classify", "report"}
    | {"train.monitor", "train.trained"},
    "component_mask": LEAVES | FILES | {"masking", "spaces", "data", "train"},
}


def rooms_imported(file: Path) -> set[str]:
    """Rooms of this package that a file imports anywhere, as dotted names below `pmae`."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "pmae":
            inner = node.module.split(".")[1:]
            found |= {".".join(inner)} if inner else {alias.name for alias in node.names}
        if isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("pmae.") for alias in node.names if alias.name.startswith("pmae.")}
    return found


def test_rooms_import_only_what_lies_below_them() -> None:
    wrong = []
    for file in SOURCE.rglob("*.py"):
        room = file.relative_to(SOURCE).parts[0].removesuffix(".py")
        for name in rooms_imported(file):
            outside = name.split(".")[0] != room
            allowed = ALLOWED.get(room, {name, name.split(".")[0]})
            if room in ALLOWED and outside and name.split(".")[0] not in allowed and name not in allowed:
                wrong.append(f"{file.relative_to(SOURCE)} imports pmae.{name}")
    assert not wrong


def test_no_files_import_each_other_in_a_circle() -> None:
    """Imports inside functions too; a package's own __init__ hands names on and may be imported by its parts."""
    names = {".".join(file.relative_to(SOURCE).with_suffix("").parts): file for file in SOURCE.rglob("*.py")}
    names = {name: file for name, file in names.items() if not name.endswith("__init__")}
    graph = {name: {other for other in files_imported(file) if other in names} for name, file in names.items()}
    assert list(TopologicalSorter(graph).static_order())


def files_imported(file: Path) -> set[str]:
    """Files of this package that a file imports anywhere, whether it names them or a name in them."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "pmae":
            inner = node.module.removeprefix("pmae").lstrip(".")
            found |= {inner} | {f"{inner}.{alias.name}".lstrip(".") for alias in node.names}
    return found


def test_recipes_are_settings_alone() -> None:
    assert rooms_imported(SOURCE / "paper" / "recipes.py") <= LEAVES


def test_help_imports_nothing_heavy() -> None:
    heavy = "[m for m in ('torch', 'timm', 'tyro', 'numpy') if m in sys.modules]"
    code = f"import sys; from pmae.cli import main; main(['--help']); print({heavy})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.rstrip().endswith("[]")


def test_messages_to_callers_in_python_name_no_options() -> None:
    """They have parameters, not `--options`; whole commands to type are told as such."""
    for_terminals = {"cli", "sweep", "paper", "doctor", "app", "config_file"}
    wrong = []
    for file in SOURCE.rglob("*.py"):
        if file.relative_to(SOURCE).parts[0].removesuffix(".py") not in for_terminals:
            refused = [node for node in ast.walk(ast.parse(file.read_text())) if is_refusal(node)]
            told = [ast.unparse(node) for node in refused]
            wrong += [text for text in told if re.search(r"""[ ("']--[a-z]""", text) and "pmae " not in text]
    assert not wrong


def is_refusal(node: ast.AST) -> bool:
    called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "require"
    return called or isinstance(node, ast.Raise)


def test_what_tests_on_a_gpu_replace_is_there() -> None:
    """They run where there is a card, so a name that moved would be found out late."""
    text = "".join(file.read_text() for file in (Path(__file__).parent / "gpu").glob("test_*.py"))
    named = re.findall(r'setattr\(\s*"(pmae\.[\w.]+)"', text)
    assert named
    for name in named:
        resolve_name(name)
