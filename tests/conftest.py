"""Settings for all tests: one thread a rank, real data by environment, no deadlines of chance."""

import gc
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import hypothesis
import pytest
import torch
from jaxtyping import install_import_hook

from support.patience import be_patient
from support.unchecked import types_unchecked

SOURCES = Path(__file__).parents[1] / "src"


def check_shapes_at_run_time() -> None:
    """Of modules that name shapes; plain types are the type checker's, which costs no test time."""
    modules = {
        ".".join(path.relative_to(SOURCES).with_suffix("").parts)
        for path in SOURCES.glob("gossipgrad/**/*.py")
        if "jaxtyping" in path.read_text()
    }
    install_import_hook(sorted(modules), "beartype.beartype")


def leave_warnings_alone() -> None:
    """Has beartype catch none as it decorates, which it does to functions within functions, too.

    Filters are of the process: two threads that swap them at once leave those of one behind, and
    what a test awaits a warning with hears nothing.
    """
    import beartype  # noqa: F401  (what it loads is what changes)

    for name, module in [*sys.modules.items()]:
        catches = getattr(module, "catch_warnings", None) is warnings.catch_warnings
        if catches and name.startswith(("beartype._decor.", "beartype._check.")):
            module.__dict__["catch_warnings"] = lambda **_: nullcontext([])


check_shapes_at_run_time()
leave_warnings_alone()
be_patient()

# Chance draws others each time: many runs of few examples find what one run of many does.
hypothesis.settings.register_profile("shared machine", deadline=None, max_examples=30)
hypothesis.settings.load_profile("shared machine")
torch.set_num_threads(1)

# Whoever connects to a TCPStore is asked for its name, for five seconds where no resolver answers.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
os.environ.setdefault("GOSSIPGRAD_DATA", str(Path(__file__).parents[2] / "shared" / "data"))


@pytest.fixture
def unchecked_types() -> Iterator[None]:
    """For what is refused in words, where nothing checks types, and for what checks misread."""
    with types_unchecked():
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Has all processes of tests come out of one fork server that has loaded all they need.

    One thread for each test: a test before it may have left more.
    """
    torch.set_num_threads(1)
    if item.get_closest_marker("process") is not None:
        from support.processes import start_fork_server

        start_fork_server()


def pytest_configure(config: pytest.Config) -> None:
    """Starts the fork server before the workers of xdist, which share it."""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        from support.processes import start_fork_server

        start_fork_server()


def pytest_collection_finish() -> None:
    """Keeps what imports and the collection have made out of every collection of garbage."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what needs a GPU where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu") is not None:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture
def secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with a secret, which the environment names."""
    path = tmp_path / "run.secret"
    path.write_text("0123456789abcdef" * 4)
    path.chmod(0o600)
    monkeypatch.setenv("GOSSIPGRAD_SECRET_FILE", str(path))
    return path
