"""How the site is built: Markdown through MyST, the API from docstrings, the look of furo."""

from importlib import metadata

from sphinx.application import Sphinx

project = "pmae"
author = "the authors of pmae"
release = metadata.version("pmae")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build", "notebooks"]
html_theme = "furo"
html_title = "pmae"
html_static_path: list[str] = []
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
# Nothing is fetched while the site is built, and a reader's browser fetches no formula engine either.
myst_update_mathjax = False


def setup(app: Sphinx) -> None:
    """Docstrings are plain sentences: a bar in them is the bar of |x|, not markup."""
    app.connect("autodoc-process-docstring", _escape_bars)


def _escape_bars(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    lines[:] = [line.replace("|", "\\|") for line in lines]
