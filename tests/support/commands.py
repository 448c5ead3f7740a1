"""Commands as the pages give them, run in this process, which has torch loaded."""

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from gossipgrad import cli

__all__ = ["run_here"]


def run_here(
    words: Sequence[str | Path], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> int | str | None:
    """Runs `gossipgrad ...` or `python SCRIPT ...` in a folder; the exit code.

    What they print goes to this process's streams; workers come out of its fork server.
    """
    program, *arguments = map(str, words)
    with monkeypatch.context() as patch:
        patch.chdir(folder)
        for variable in ("RANK", "WORLD_SIZE"):
            patch.delenv(variable, raising=False)
        if program == "gossipgrad":
            return cli.main(arguments)
        assert program == "python", program
        patch.setattr(sys, "argv", arguments)
        patch.setattr(sys, "path", [os.fspath(folder), *sys.path])
        try:
            runpy.run_path(arguments[0], run_name="__main__")
        except SystemExit as end:
            return end.code
    return 0
