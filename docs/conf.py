"""How Sphinx builds these pages; `make docs` runs it with warnings as errors."""

import sys
from importlib.metadata import version as installed_version
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

project = "gossipgrad"
author = "The gossipgrad developers"
project_copyright = author
version = release = installed_version("gossipgrad")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "docs_extension",
]
exclude_patterns = ["_build"]
nitpicky = True
# Types of other packages: their pages are elsewhere, and a build loads nothing from the network.
nitpick_ignore_regex = [
    (
        r"py:.*",
        r"(torch|numpy|np|jaxtyping|collections|concurrent|pathlib|os|abc|enum|typing|threading|signal|weakref"
        r"|contextlib|dataclasses|dist|nn|datetime|transformers|accelerate|lightning)\..*",
    ),
    (
        r"py:.*",
        r"(Tensor|Float|Int|Bool|UInt8|Shaped|Num|ndarray|Callable|Iterator|Iterable|Sequence"
        r"|Mapping|Path|Optimizer|Module|ABC|Protocol|networkx\..*)",
    ),
    (r"py:.*", r"gossipgrad\.(\w+\.)*_\w+\.\w+"),  # what is private has no page
    (r"py:.*", r"'[\w ]+'"),  # shapes
]

default_role = "code"  # docstrings write code between single backticks, as Markdown does
autodoc_default_options = {"members": True}
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_mock_imports = [
    name
    for name in ("accelerate", "lightning", "torchtitan", "transformers")
    if not find_spec(name)
]
napoleon_use_ivar = True
napoleon_use_rtype = False
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"

myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = "gossipgrad"
html_static_path = ["static"]
html_css_files = ["figures.css"]
html_math_renderer = "mathml"
html_copy_source = False
html_show_sourcelink = False
