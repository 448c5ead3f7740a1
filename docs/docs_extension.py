"""What Sphinx lacks for these pages: math and pictures without scripts, rooms, constants."""

import html
import importlib
import inspect
import itertools
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.docutils import SphinxDirective
from sphinx.writers.html5 import HTML5Translator

import gossipgrad

SOURCE = Path(gossipgrad.__file__).parent
KINDS = ("function", "class", "exception", "data")


def inline_math(translator: HTML5Translator, node: nodes.math) -> None:
    """Writes MathML, which browsers draw themselves."""
    translator.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def block_math(translator: HTML5Translator, node: nodes.math_block) -> None:
    """The same, on a line of its own."""
    translator.body.append(f"<div>{tex2mathml(node.astext(), as_block=True)}</div>")
    raise nodes.SkipNode


def inline_figures(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Puts our SVGs into the page itself, where they follow its light or dark theme."""
    if app.builder.format != "html":
        return
    for image in list(doctree.findall(nodes.image)):
        path = Path(app.srcdir) / image["uri"]
        if path.suffix != ".svg" or not path.exists():
            continue
        label = html.escape(image.get("alt", ""), quote=True)
        svg = path.read_text().replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
        image.replace_self(nodes.raw("", f'<div class="drawn">{svg}</div>', format="html"))


class Docstrings:
    """Makes reStructuredText of our docstrings, which borrow from Markdown.

    `$x$` is math, a table is one of pipes, and the line below a field is prose even where it holds
    a colon, which napoleon takes for a type.
    """

    def __init__(self) -> None:
        self._fields: dict[str, list[str]] = {}

    def before_napoleon(
        self, app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]
    ) -> None:
        """Translates, and keeps the text of fields."""
        if what == "data":
            lines[:] = constant_docs(name)
        elif what in ("attribute", "property") and "Raises:" not in lines:
            self._fields[name] = list(lines)
        lines[:] = tables([re.sub(r"\$([^$]+)\$", r":math:`\1`", line) for line in lines])

    def after_napoleon(
        self, app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]
    ) -> None:
        """Brings the text of fields back."""
        if name in self._fields:
            lines[:] = self._fields.pop(name)


def tables(lines: list[str]) -> list[str]:
    """The lines with every table of pipes as a `list-table`."""
    result: list[str] = []
    for is_table, group in itertools.groupby(lines, lambda line: line.lstrip().startswith("|")):
        block = list(group)
        if not is_table:
            result += block
            continue
        indent = block[0][: len(block[0]) - len(block[0].lstrip())]
        result += [f"{indent}.. list-table::", f"{indent}   :header-rows: 1", ""]
        for line in block:
            cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
            if all(set(cell) <= set("-:") for cell in cells):
                continue
            for number, cell in enumerate(cells):
                result.append(f"{indent}   {'  -' if number else '* -'} {cell}")
        result.append("")
    return result


class Room(SphinxDirective):
    """`.. room:: MODULE`: all that a module exports: functions, classes, exceptions, constants.

    What `gossipgrad` exports too is described there only.
    """

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Leaves the work to autodoc."""
        (module,) = self.arguments
        lines = [f".. automodule:: {module}", "   :no-members:", ""]
        entries = []
        for name, value in vars(importlib.import_module(module)).items():
            at_the_top = module != "gossipgrad" and vars(gossipgrad).get(name) is value
            if name.startswith("_") or inspect.ismodule(value) or (at_the_top and callable(value)):
                continue
            entries.append((KINDS.index(kind_of(value)), f"{module}.{name}"))
        for kind, name in sorted(entries, key=lambda entry: entry[0]):
            lines += [f".. auto{KINDS[kind]}:: {name}", ""]
        return self.parse_text_to_nodes("\n".join(lines))


def kind_of(value: object) -> str:
    """What autodoc calls it; one of `KINDS`."""
    if inspect.isclass(value):
        return "exception" if issubclass(value, BaseException) else "class"
    return "function" if inspect.isfunction(value) else "data"


def readable_defaults(
    app: Sphinx, what: str, name: str, value: Any, options: Any, signature: str, returns: str
) -> tuple[str, str] | None:
    """A default that is made anew for each object is no Python: `...` stands for it."""
    return (signature.replace("<factory>", "..."), returns) if signature else None


def constant_docs(name: str) -> list[str]:
    """The string below `NAME = ...` in whichever private module of the package has it."""
    package, _, constant = name.rpartition(".")
    folder = SOURCE.joinpath(*package.split(".")[1:])
    for path in sorted(folder.glob("_*.py")):
        if path.stem == "__init__":
            continue
        found = ModuleAnalyzer.for_module(f"{package}.{path.stem}").find_attr_docs()
        if ("", constant) in found:
            return found["", constant]
    return []


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_directive("room", Room)
    app.add_html_math_renderer("mathml", (inline_math, None), (block_math, None))
    docstrings = Docstrings()
    app.connect("autodoc-process-docstring", docstrings.before_napoleon, priority=400)
    app.connect("autodoc-process-docstring", docstrings.after_napoleon, priority=600)
    app.connect("autodoc-process-signature", readable_defaults)
    app.connect("doctree-resolved", inline_figures)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
