"""Lists the benchmarks, each with its first line; `python -m benchmarks.NAME --help` says more.

python -m benchmarks              # lists them
python -m benchmarks stall gpu    # runs some, one after the other
"""

import ast
import subprocess
import sys
from pathlib import Path

NAMES = (
    *("network", "race", "time_to_accuracy", "stall", "equal_accuracy", "scale", "gpu"),
    *("chaos", "sparse", "apoptosis", "muon", "suda", "second_order", "local_steps"),
    *("islands", "mixing"),
)


def first_line(name: str) -> str:
    """What a benchmark says of itself."""
    folder = Path(__file__).parent
    path = folder / f"{name}.py"
    path = path if path.exists() else folder / name / "__main__.py"
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]


def main() -> int:
    """Runs those that are named; the exit status counts those that failed."""
    chosen = sys.argv[1:]
    if not chosen:
        for name in NAMES:
            print(f"python -m benchmarks.{name:17} {first_line(name)}")
        return 0
    if unknown := [name for name in chosen if name.split()[0] not in NAMES]:
        print(f"no benchmark {unknown[0]!r}: choose among {', '.join(NAMES)}", file=sys.stderr)
        return 2
    commands = [[sys.executable, "-m", *f"benchmarks.{name}".split()] for name in chosen]
    return sum(subprocess.run(command).returncode != 0 for command in commands)


if __name__ == "__main__":
    sys.exit(main())
