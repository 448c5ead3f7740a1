"""Versions of what decides the figures of a run."""

import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

_PACKAGES = ("gossipgrad", "torch", "numpy", "safetensors")
# Those by which the bits of a step may change.
_OF_FIGURES = ("gossipgrad", "torch", "numpy")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide the figures."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def other_versions(before: Mapping[str, object]) -> str:
    """In words, what was of another version before; empty if nothing was."""
    now = versions()
    others = [
        f"{name} {before[name]} (now {now[name]})"
        for name in _OF_FIGURES
        if name in before and name in now and before[name] != now[name]
    ]
    return ", ".join(others)
