"""Fronts of rooms re-export documented names, and what is imported stays little.

Which room may import which other is import-linter's, in pyproject.toml.
"""

import ast
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import gossipgrad

SOURCE = Path(gossipgrad.__file__).parent
IMPORT = """
import sys, torch
before = {name.split(".")[0] for name in sys.modules}
import gossipgrad
print(*sorted({name.split(".")[0] for name in sys.modules} - before - sys.stdlib_module_names))
"""


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


def test_import_is_silent_and_loads_little_beside_torch():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", IMPORT], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    others = {name for name in done.stdout.split() if not name.startswith("_cython_")}
    assert others <= {"gossipgrad", "cython_runtime", "filelock", "jaxtyping"}
