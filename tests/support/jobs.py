"""Jobs of tests, by a name that `--job` takes in this process."""

import sys
import types
from collections.abc import Callable

import pytest

from gossipgrad.train import Job

__all__ = ["name_job"]


def name_job(monkeypatch: pytest.MonkeyPatch, make: Callable[[], Job]) -> str:
    """Makes a module of the function, for the time of a test."""
    module = types.ModuleType("job_of_a_test")
    vars(module)["make"] = make
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return f"{module.__name__}:make"
