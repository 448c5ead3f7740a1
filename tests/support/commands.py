"""Commands as the pages give them, run in this process, which has torch loaded."""

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gossipgrad import cli, train
from gossipgrad.train import JoinConfig, TrainConfig

__all__ = ["given", "run_here"]


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


def given(*arguments: str) -> Any:
    """What `gossipgrad train` with such arguments begins: a `TrainConfig` or a `JoinConfig`.

    None where it refuses them; what it says goes to stderr.
    """
    begun: list[TrainConfig | JoinConfig] = []
    run = train.Outcome(exit_code=0)
    joined = train.JoinOutcome(exit_code=0, run_dir=Path(), rank=1, steps=0, samples=0, left=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "run", lambda config, **_: begun.append(config) or run)
        patch.setattr(train, "join_run", lambda config: begun.append(config) or joined)
        assert cli.main(["train", *arguments]) == (0 if begun else 2)
    return begun[0] if begun else None
