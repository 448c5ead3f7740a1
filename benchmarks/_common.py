"""What every benchmark writes down beside its figures."""

import json
import os
import platform
import shlex
import sys
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"


def circumstances() -> dict:
    """Machine, versions and the command."""
    command = f"python -m benchmarks.{Path(sys.argv[0]).stem} {shlex.join(sys.argv[1:])}"
    return {
        "machine": {
            "system": platform.platform(),
            "processor": _processor(),
            "cores": os.cpu_count(),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        },
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "command": command.strip(),
    }


def write(name: str, figures: dict) -> Path:
    """Writes `results/NAME.json`, whole or not at all."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({**circumstances(), **figures}, indent=2) + "\n")
    partial.replace(path)
    return path


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
