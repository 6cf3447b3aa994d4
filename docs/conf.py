"""How the documentation is built: ``make docs``.

Pages are Markdown. Generated at each build are run settings, node config, JSON documents, command
line, messages and what they reveal (``_ext/reference.py``), and the gallery, by running its
scripts. Nothing is downloaded, so links into Flower's and XGBoost's documentation are resolved only
with ``INTERSPHINX=1`` in the environment.

The picture in README.md, ``_static/report.png``, is the first screen of a report, made by::

    make first RUN=pax
    chromium --headless --hide-scrollbars --window-size=1100,860 --screenshot=report.png \\
        file://$PWD/pax/report.html
    python -c "from PIL import Image as I; I.open('report.png').convert('RGB').quantize(64)\\
        .save('report.png', optimize=True)"
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import version as version_of
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE / "_ext")]

project, author, copyright = "fedapp", "the fedapp authors", "the fedapp authors"
version = release = version_of("fedapp")
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "sphinx_design",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
    "reference",
]
exclude_patterns = ["_build", "examples/*"]
smartquotes = False
myst_enable_extensions = ["colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 3
html_theme, html_title, html_static_path = "furo", "fedapp", ["_static"]
html_show_sphinx = False
pygments_style, pygments_dark_style = "friendly", "monokai"
copybutton_prompt_text, copybutton_prompt_is_regexp = r"\$ |>>> ", True
copybutton_line_continuation_character = "\\"

autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_google_docstring = False
napoleon_use_rtype = False
intersphinx_mapping = (
    {
        "python": ("https://docs.python.org/3", None),
        "flwr": ("https://flower.ai/docs/framework", None),
        "xgboost": ("https://xgboost.readthedocs.io/en/stable", None),
    }
    if os.environ.get("INTERSPHINX")
    else {}
)
sphinx_gallery_conf = {
    "examples_dirs": "examples",
    "gallery_dirs": "gallery",
    "filename_pattern": r"/plot_",
    "within_subsection_order": "FileNameSortKey",
    "download_all_examples": False,
    "remove_config_comments": True,
    "show_memory": False,
    "show_signature": False,
    "abort_on_example_error": True,
    "plot_gallery": "True",
}
html_css_files = ["pages.css"]
