"""The floors: a room imports only from floors below its own, and fronts only re-export."""

import ast
import importlib
import pkgutil
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import gossipgrad

SOURCE = Path(gossipgrad.__file__).parent
ROOT = Path(__file__).parents[1]
FLOORS = (
    ("errors", "_claims", "_messages", "_unknown_scaler"),
    ("topology", "planning"),
    ("comm", "compression"),
    ("engine",),
    ("decentralized", "sparsification", "apoptosis", "muon", "second_order"),
    ("report", "simulate", "checkpoint", "data"),
    ("_lazy",),
    ("__init__",),  # `import gossipgrad`: whatever is above uses the library as users do
    ("launch",),
    ("train",),
    ("cli", "integrations"),
    ("__main__",),
)
"""Rooms and root modules, bottom floor first: each imports only from floors below its own."""
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names}
KNOWN: dict[str, str] = {}
"""Violations that still stand, each with its reason; one that is mended has to leave this list."""
DOOR = "comm/_ranks.py"
MOST_LINES = 455
MAY_NOT = ("get_rank", "get_world_size", "is_initialized", "init_process_group", "WORLD")


@cache
def parse(path: Path) -> ast.Module:
    """Parse a module, once for all tests."""
    return ast.parse(path.read_text())


def find_imports(path: Path, source: Path) -> Iterator[tuple[str, ...]]:
    """Yield all that a module imports from its package, below the package's own name."""
    package = (source.name, *path.relative_to(source).parent.parts)
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            names = [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            base += tuple(node.module.split(".")) if node.module else ()
            names = [(*base, alias.name) for alias in node.names]
        else:
            continue
        yield from (name[1:] for name in names if name[0] == source.name)


def find_violations(source: Path) -> set[str]:
    """Find imports of the package in this folder that go up or sideways, or reach for privates."""
    found = set()
    for path in source.rglob("*.py"):
        name = path.relative_to(source)
        room = name.parts[0].removesuffix(".py")
        if room not in FLOOR_OF:
            found.add(f"{name}: {room} has no floor")
            continue
        for imported in find_imports(path, source):
            other = imported[0] if imported and imported[0] in FLOOR_OF else "__init__"
            if other == room:
                continue
            if FLOOR_OF[other] >= FLOOR_OF[room]:
                found.add(f"{name}: imports {other}, which is not on a floor below")
            if any(re.match("_(?!_)", part) for part in imported[1:]):
                found.add(f"{name}: imports the private {'.'.join(imported)}")
    return found


def test_imports_go_down_and_through_the_front_of_a_room():
    assert find_violations(SOURCE) == set(KNOWN)


@pytest.mark.parametrize(
    ("path", "line", "found"),
    [
        ("comm/_link.py", "from gossipgrad.engine import Flow", "imports engine"),
        ("comm/_link.py", "from gossipgrad import train", "imports train"),
        ("comm/_link.py", "import gossipgrad.train", "imports train"),
        ("comm/_link.py", "def late():\n    from ..engine import Flow", "imports engine"),
        ("comm/deeper/_link.py", "from ...engine import Flow", "imports engine"),
        ("comm/_link.py", "from .. import engine", "imports engine"),
        ("comm/_link.py", "from gossipgrad import gossip", "imports __init__"),
        ("comm/_link.py", "import gossipgrad", "imports __init__"),
        ("comm/__init__.py", "from ..muon import Muon", "imports muon"),
        ("comm/_link.py", "from gossipgrad.compression import top_k", "imports compression"),
        (
            "muon/_session.py",
            "from gossipgrad.decentralized import gossip",
            "imports decentralized",
        ),
        ("errors.py", "from gossipgrad.topology import ring", "imports topology"),
        ("_messages.py", "from .comm import Group", "imports comm"),
        ("comm/_link.py", "from gossipgrad.topology._ring import Ring", "private topology._ring"),
        ("comm/_link.py", "from gossipgrad.topology import _ring", "private topology._ring"),
        ("comm/_link.py", "import gossipgrad.topology._ring", "private topology._ring"),
        ("comm/_link.py", "from ..topology._ring import Ring", "private topology._ring"),
        ("__main__.py", "from gossipgrad.cli._main import main", "private cli._main"),
        ("attic/_box.py", "import torch", "attic has no floor"),
        ("attic.py", "import torch", "attic has no floor"),
        ("comm/_link.py", "from gossipgrad.topology import ring", None),
        ("comm/_link.py", "from gossipgrad._messages import first_line", None),
        ("comm/_link.py", "from ..errors import GossipError", None),
        ("comm/_link.py", "from ._wire import Wire", None),
        ("comm/deeper/_link.py", "from .._wire import Wire", None),
        ("comm/_link.py", "from torch._C import Node", None),
        ("__init__.py", "from gossipgrad import topology as topology", None),
        ("__init__.py", "from gossipgrad._lazy import __getattr__", None),
    ],
)
def test_every_kind_of_violation_is_found(tmp_path, path, line, found):
    file = tmp_path / "gossipgrad" / path
    file.parent.mkdir(parents=True)
    file.write_text(line)
    violations = "; ".join(find_violations(tmp_path / "gossipgrad"))
    assert found in violations if found else violations == ""


def test_the_default_process_group_is_touched_at_the_door_only():
    for path in SOURCE.rglob("*.py"):
        name = path.relative_to(SOURCE).as_posix()
        room = name.split("/")[0].removesuffix(".py")
        if FLOOR_OF[room] >= FLOOR_OF["train"] or name == DOOR:
            continue
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Attribute) and node.attr in MAY_NOT:
                assert not ast.unparse(node).startswith(("dist.", "torch.distributed.")), name
            if isinstance(node, ast.ImportFrom) and node.module == "torch.distributed":
                assert not {alias.name for alias in node.names} & {*MAY_NOT}, name


@pytest.mark.parametrize(
    "path", sorted(SOURCE.rglob("__init__.py")), ids=lambda path: str(path.relative_to(SOURCE))
)
def test_fronts_only_reexport(path):
    for node in parse(path).body:
        allowed = ast.ImportFrom | ast.Expr
        if path.parent == SOURCE:
            allowed |= ast.Assign  # __version__
        imports = [node]
        if isinstance(node, ast.If) and ast.unparse(node.test) == "_TYPE_CHECKING":
            imports = [*node.body, *node.orelse]  # what is loaded when it is asked for
            allowed = ast.ImportFrom
        for each in imports:
            assert isinstance(each, allowed), ast.unparse(node)
            if isinstance(each, ast.ImportFrom):
                assert all(alias.asname for alias in each.names), ast.unparse(node)


def code_lines(path):
    """Lines without docstrings, comments and blank ones."""
    text = path.read_text()
    if text.count("\n") <= MOST_LINES:
        return 0  # whatever they are
    prose = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                prose |= {*range(first.lineno, first.end_lineno + 1)}
    lines = enumerate(text.splitlines(), 1)
    return sum(n not in prose and line.strip()[:1] not in ("", "#") for n, line in lines)


def test_a_file_is_one_idea():
    """Too long for one: a class has too many jobs. It is not cut, it gives a job away."""
    places = (SOURCE, *(ROOT / name for name in ("benchmarks", "examples", "tests")))
    paths = [path for place in places for path in place.rglob("*.py")]
    long = {
        str(path.relative_to(ROOT)): lines
        for path in paths
        if (lines := code_lines(path)) > MOST_LINES
    }
    assert long == {}


def test_every_public_name_is_documented():
    for info in pkgutil.iter_modules([str(SOURCE)]):
        if info.name.startswith("_"):
            continue
        room = importlib.import_module(f"gossipgrad.{info.name}")
        assert room.__doc__
        for name, value in vars(room).items():
            if not name.startswith("_") and callable(value):
                assert value.__doc__, f"{info.name}.{name}"


IMPORT = """
import sys, torch
before = {name.split(".")[0] for name in sys.modules}
import gossipgrad
print(*sorted({name.split(".")[0] for name in sys.modules} - before - sys.stdlib_module_names))
"""


def test_import_is_silent_and_loads_little_beside_torch():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", IMPORT], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    others = {name for name in done.stdout.split() if not name.startswith("_cython_")}
    assert others <= {"gossipgrad", "cython_runtime", "filelock", "jaxtyping", "zmq"}


def test_processes_find_the_functions_of_tests():
    """A function of `tests/train/...` is pickled as `tests.train...`: plain `pytest` needs both."""
    root = SOURCE.parents[1]
    settings = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["pytest"]
    assert settings["ini_options"]["pythonpath"] == [".", "tests"]
    assert str(root) in sys.path
