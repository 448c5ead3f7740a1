"""Frameworks of the integrations, and examples, as workers of torchrun run them."""

import contextlib
import io
import os
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch.distributed as dist

__all__ = ["EXAMPLES", "needs", "run_example", "torchrun_environment"]

EXAMPLES = Path(__file__).parents[2] / "examples"


def needs(framework: str) -> pytest.MarkDecorator:
    """Skips tests where a framework is not installed."""
    missing = find_spec(framework) is None
    return pytest.mark.skipif(missing, reason=f"{framework} is not installed")


def run_example(rank: int, store: dist.Store, name: str, folder: Path, *arguments: str) -> str:
    """Runs an example as a worker of torchrun, in a folder; what it has printed."""
    sys.argv = [name, *arguments]
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return printed.getvalue()


def torchrun_environment(rank: int, port: int, world_size: int = 2) -> None:
    """Has frameworks find in this process what torchrun tells a worker."""
    os.environ |= {
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
    }
