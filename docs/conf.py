"""Sphinx: python -m sphinx -W --keep-going -n -q docs build/docs

`docstrings.py` beside this file turns the project's plain docstrings into reStructuredText.
"""

import configparser
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
# The checkout that these pages belong to, installed or not; and the extension beside this file.
sys.path[:0] = [str(HERE.parent), str(HERE)]

_setup = configparser.ConfigParser()
_setup.read(HERE.parent / "setup.cfg")

project = "shardrt"
author = _setup["metadata"]["author"]
release = _setup["metadata"]["version"]
copyright = author

extensions = ["myst_parser", "sphinx.ext.autodoc", "docstrings"]
exclude_patterns = ["_*"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"shardrt {release}"
html_copy_source = False
html_show_sphinx = False

# The reference needs torch alone: what integrations import is replaced, installed or not.
autodoc_mock_imports = ["accelerate", "cupy", "lightning", "mpi4py", "transformers"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88

nitpicky = True
# Signatures name types of other projects, and of ours that no page documents. What docstrings and pages link to is py:obj.
nitpick_ignore_regex = [("py:class", ".*")]
