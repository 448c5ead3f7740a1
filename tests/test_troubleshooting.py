"""docs/troubleshooting.md has every error of the run, and every warning, of the package."""

import ast
import re
import traceback
from pathlib import Path

import pytest

import gossipgrad as gg

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "gossipgrad"
PAGE = ROOT / "docs" / "troubleshooting.md"


def name_of(node):
    return getattr(node, "id", None) or getattr(node, "attr", None)


def errors(nodes):
    """The classes of `GossipError`."""
    found, before = {"GossipError"}, set()
    classes = [node for _, node in nodes if isinstance(node, ast.ClassDef)]
    while found != before:
        before = set(found)
        found |= {c.name for c in classes if found & {name_of(base) for base in c.bases}}
    return found


def text(node):
    """A message, with … for what only a run knows."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[a-z]", "…", node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text(part) for part in node.values)
    return "…"


def messages():
    nodes = [
        (path, node)
        for path in sorted(SOURCE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
    ]
    known = errors(nodes)
    for path, call in nodes:
        if isinstance(call, ast.Call) and call.args:
            name, of = name_of(call.func), name_of(getattr(call.func, "value", None))
            is_warning = name == "warn" or (name == "warning" and of == "logger")
            if name in known or is_warning:
                said = text(call.args[0])
                if len(re.findall(r"\w{2,}", said)) >= 3:  # else another site has the words
                    yield f"{path.relative_to(SOURCE)}:{call.lineno}", said


def test_every_message_is_on_the_page():
    """Where this fails, add some words of the messages to a section of the page."""
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", PAGE.read_text())]
    listed = [span for span in spans if len(span.split()) > 1]
    missing = [one for one in messages() if not any(span in one[1] for span in listed)]
    assert not missing


@pytest.mark.parametrize(
    "kind", [gg.GossipError, gg.AgreementError, gg.EvictedError, gg.ReplicaChangedError]
)
def test_an_error_ends_with_the_section_that_has_it(kind):
    page, _, section = traceback.format_exception_only(kind("no"))[-1].split()[-1].partition("#")
    assert ROOT / page == PAGE
    headings = re.findall(r"^## (.+)$", PAGE.read_text(), re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}
    assert section in anchors | ({""} if kind is gg.GossipError else set())
