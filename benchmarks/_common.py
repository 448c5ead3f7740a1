"""What every benchmark writes down beside its figures."""

import shlex
import sys
from pathlib import Path

from gossipgrad.train._summary import machine, versions, write_json

RESULTS = Path(__file__).parent / "results"


def made_by(name: str, *, module: str | None = None) -> dict:
    """Command and versions of this run, for figures that stand beside those of others."""
    command = f"python -m benchmarks.{module or name} {shlex.join(sys.argv[1:])}".strip()
    return {"command": command, "versions": versions()}


def write(name: str, figures: dict, *, module: str | None = None, path: Path | None = None) -> Path:
    """Writes a benchmark's figures with machine, versions and command; whole or not at all.

    Args:
        name: Of the results, and of the benchmark.
        figures: What was found.
        module: The benchmark, where its results are called otherwise.
        path: Where to; `results/NAME.json` by default.
    """
    path = path or RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    made = made_by(name, module=module)
    write_json(path, {"command": made.pop("command"), "machine": machine(), **made, **figures})
    return path
