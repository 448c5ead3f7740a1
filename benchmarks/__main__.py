"""Runs every benchmark that needs neither root nor hours; by name some of them.

Then `python -m benchmarks.tables` fills the pages.
"""

import subprocess
import sys

BENCHMARKS = (
    *("encryption", "step", "reference_drift", "accuracy", "accuracy --workloads", "shuffle"),
    *(
        "virtual_ranks",
        "staleness",
        "compressed_gossip",
        "stall",
        "checkpoint",
        "soak",
        "selection",
    ),
    *("plans", "simulate_check"),
)


def main() -> int:
    """Runs those that are named, or all; the exit status counts those that failed."""
    chosen = sys.argv[1:] or BENCHMARKS
    unknown = [name for name in chosen if name not in BENCHMARKS]
    if unknown:
        print(f"no benchmark {unknown[0]!r}: choose among {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    failed = 0
    for name in chosen:
        print(f"== {name}", flush=True)
        command = [sys.executable, "-m", *f"benchmarks.{name}".split()]
        failed += subprocess.run(command).returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
