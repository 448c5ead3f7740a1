"""Frameworks into which there are doors: whether they are installed, and scripts of their pages."""

import contextlib
import io
import os
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch.distributed as dist

__all__ = ["needs", "run_page", "torchrun_environment"]

DOCS = Path(__file__).parents[2] / "docs"


def needs(framework: str) -> pytest.MarkDecorator:
    """Skips tests where a framework is not installed."""
    missing = find_spec(framework) is None
    return pytest.mark.skipif(missing, reason=f"{framework} is not installed")


def run_page(rank: int, store: dist.Store, page: str, folder: Path) -> str:
    """Runs the script of a page as a worker of torchrun, in a folder; what it has printed."""
    (script,) = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(script, "train.py", "exec"), {"__name__": "__main__"})
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
