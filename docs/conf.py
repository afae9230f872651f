"""How the site is built: Markdown through MyST, the API from docstrings, the look of furo; nothing is fetched."""

import json
from importlib import metadata

from sphinx.application import Sphinx

project = "pmae"
author = "the authors of pmae"
release = metadata.version("pmae")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
source_suffix = {".md": "markdown", ".ipynb": "markdown"}
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "pmae"
html_static_path: list[str] = []
html_show_sourcelink = False
html_show_copyright = False
# A block without a language is what one types into a shell.
highlight_language = "bash"
copybutton_prompt_text = "$ "
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
# Pages of results link to files of the repository, which the site does not have.
suppress_warnings = ["myst.xref_missing", "myst.header"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"


def setup(app: Sphinx) -> None:
    """Notebooks become Markdown; docstrings are plain sentences, where a bar is the bar of |x|."""
    app.connect("source-read", _read_notebook)
    app.connect("autodoc-process-docstring", _escape_bars)


def _read_notebook(app: Sphinx, name: str, source: list[str]) -> None:
    if not name.startswith("notebooks/"):
        return
    cells = json.loads(source[0])["cells"]
    texts = ["".join(cell["source"]) for cell in cells]
    kinds = [cell["cell_type"] == "code" for cell in cells]
    source[0] = "\n\n".join(f"```python\n{t}\n```" if code else t for t, code in zip(texts, kinds, strict=True))


def _escape_bars(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    lines[:] = [line.replace("|", "\\|") for line in lines]
