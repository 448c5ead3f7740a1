"""The floors: a room imports only from floors below its own, and fronts only re-export."""

import ast
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import gossipgrad

SOURCE = Path(gossipgrad.__file__).parent
FLOORS = (
    ("errors", "_claims", "_messages", "_unknown_scaler"),
    ("topology", "planning"),
    ("comm", "compression"),
    ("engine",),
    ("decentralized", "sparsification", "apoptosis", "muon", "second_order"),
    ("report", "simulate", "checkpoint", "data"),
    ("_lazy",),
    ("__init__",),  # `import gossipgrad`: what is above uses the library as users do
    ("launch",),
    ("train",),
    ("cli", "integrations"),
    ("__main__",),
)
"""Rooms and root modules, bottom floor first."""
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names}


def find_imports(path, source):
    """What a module imports from its package, below the package's own name."""
    package = (source.name, *path.relative_to(source).parent.parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            base += tuple(node.module.split(".")) if node.module else ()
            names = [(*base, alias.name) for alias in node.names]
        else:
            continue
        yield from (name[1:] for name in names if name[0] == source.name)


def find_violations(source):
    """Imports of the package in this folder that go up or sideways, or reach for privates."""
    for path in source.rglob("*.py"):
        name = path.relative_to(source)
        room = name.parts[0].removesuffix(".py")
        for imported in find_imports(path, source):
            other = imported[0] if imported and imported[0] in FLOOR_OF else "__init__"
            if other == room:
                continue
            if FLOOR_OF[other] >= FLOOR_OF[room]:
                yield f"{name}: imports {other}, which is not on a floor below"
            if any(re.match("_(?!_)", part) for part in imported[1:]):
                yield f"{name}: imports the private {'.'.join(imported)}"


def test_imports_go_down_and_through_the_front_of_a_room():
    assert not [*find_violations(SOURCE)]


def test_an_import_of_a_floor_above_or_of_a_private_name_is_found(tmp_path):
    file = tmp_path / "gossipgrad" / "comm" / "_link.py"
    file.parent.mkdir(parents=True)
    for line in (
        "from gossipgrad.engine import Flow",
        "def late():\n    from ..engine import Flow",
        "import gossipgrad",
        "from gossipgrad.topology import _ring",
    ):
        file.write_text(line)
        assert [*find_violations(file.parents[1])], line
    file.write_text("from gossipgrad.topology import ring\nfrom ._wire import Wire")
    assert not [*find_violations(file.parents[1])]


def test_fronts_only_reexport():
    for path in SOURCE.rglob("__init__.py"):
        allowed = ast.ImportFrom | ast.Expr
        if path.parent == SOURCE:
            allowed |= ast.Assign | ast.If  # __version__, and what is loaded when it is asked for
        assert all(isinstance(node, allowed) for node in ast.parse(path.read_text()).body), path


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
