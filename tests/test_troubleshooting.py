"""docs/troubleshooting.md has every error of the run, and every warning, of the package."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "gossipgrad"
TREES = {path: ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
LISTED = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", PAGE)]


def name_of(node):
    return getattr(node, "id", None) or getattr(node, "attr", None)


def errors():
    """The classes of `GossipError`."""
    found, before = {"GossipError"}, set()
    classes = [n for tree in TREES.values() for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
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
    known = errors()
    for path, tree in TREES.items():
        for call in ast.walk(tree):
            if not isinstance(call, ast.Call) or not call.args:
                continue
            name, of = name_of(call.func), name_of(getattr(call.func, "value", None))
            is_warning = name == "warn" or (name == "warning" and of == "logger")
            if name in known or is_warning:
                said = text(call.args[0])
                if len(re.findall(r"\w{2,}", said)) >= 3:  # else another site has the words
                    yield f"{path.relative_to(SOURCE)}:{call.lineno}", said


MESSAGES = dict(messages())


@pytest.mark.parametrize("site", MESSAGES)
def test_a_message_is_on_the_page(site):
    """Where this fails, add some words of the message to a section of the page."""
    assert any(span in MESSAGES[site] for span in LISTED if len(span.split()) > 1), MESSAGES[site]
