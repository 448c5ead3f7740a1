"""Seconds that `import gossipgrad` takes after `import torch`, of checkouts that take turns.

python benchmarks/import_time.py CHECKOUT [CHECKOUT ...] [--runs 10]
"""

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

_CODE = """
import sys, time, torch
modules, wall, cpu = len(sys.modules), time.perf_counter(), time.process_time()
import gossipgrad
wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
own = sum(name.split(".")[0] == "gossipgrad" for name in sys.modules)
print(gossipgrad.__file__, wall, cpu, own, len(sys.modules) - modules)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkouts", type=Path, nargs="+")
    parser.add_argument("--runs", type=int, default=10)
    options = parser.parse_args()
    figures: dict[Path, list[list[float]]] = {root: [] for root in options.checkouts}
    for run in range(-1, options.runs):  # the first compiles, and is not counted
        for root in options.checkouts[:: 1 if run % 2 else -1]:
            source = (root / "src").resolve()
            file, *values = subprocess.run(
                [sys.executable, "-P", "-c", _CODE],
                env={**os.environ, "PYTHONPATH": str(source)},
                capture_output=True,
                text=True,
                check=True,
            ).stdout.split()
            assert Path(file).is_relative_to(source), f"{file} is not in {source}"
            if run >= 0:
                figures[root].append([float(value) for value in values])
    for root, runs in figures.items():
        wall, cpu, own, modules = ([of[place] for of in runs] for place in range(4))
        print(
            f"{root}: {statistics.median(cpu):.3f} s of processor ({min(cpu):.3f} to "
            f"{max(cpu):.3f}), {statistics.median(wall):.3f} s in all ({min(wall):.3f} to "
            f"{max(wall):.3f}), {own[0]:.0f} modules of its own, {modules[0]:.0f} in all"
        )


if __name__ == "__main__":
    main()
