"""What every benchmark writes down beside its figures."""

import shlex
import sys
from pathlib import Path

from gossipgrad.train._summary import machine, versions, write_json

RESULTS = Path(__file__).parent / "results"


def write(name: str, figures: dict) -> Path:
    """Writes `results/NAME.json` with machine, versions and command; whole or not at all."""
    command = f"python -m benchmarks.{name} {shlex.join(sys.argv[1:])}".strip()
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    write_json(path, {"command": command, "machine": machine(), "versions": versions(), **figures})
    return path
