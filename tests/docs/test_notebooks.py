"""The notebooks run from top to bottom, are stored without outputs, and their site builds without a warning."""

import json
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

DOCS = Path(__file__).parents[2] / "docs"
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By IPython's own shell in this process: a kernel each would import torch anew, for most of a minute together."""
    shell = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    own = shell(user_ns={"__name__": "__main__"})
    try:
        for cell in cells:
            own.run_cell("".join(cell["source"])).raise_error()
    finally:
        own.history_manager.end_session()
        plt.close("all")


def test_the_site_builds_without_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for needed in ("furo", "myst_parser"):
        pytest.importorskip(needed)
    sphinx = pytest.importorskip("sphinx.cmd.build")
    options = ["-W", "-q", "-b", "html", "-d", str(tmp_path / "trees")]
    assert sphinx.main([*options, str(DOCS), str(tmp_path / "site")]) == 0, capsys.readouterr().err
    assert "ComponentMask" in (tmp_path / "site/api.html").read_text()
