"""What every benchmark writes down beside its figures, and the cells that it keeps."""

import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gossipgrad.train._summary import machine, versions

RESULTS = Path(__file__).parent / "results"


def made_by(name: str, *, module: str | None = None) -> dict:
    """Command and versions of this run, for figures that stand beside those of others."""
    command = f"python -m benchmarks.{module or name} {shlex.join(sys.argv[1:])}".strip()
    return {"command": command, "versions": versions()}


def write_json(path: Path, value: object) -> None:
    """Writes JSON, whole or not at all, with a list of numbers or words in one line."""
    text = json.dumps(value, indent=1)
    flat = re.sub(
        r"\[\n\s+([^\[\]{}]*?)\n\s*\]",
        lambda found: "[" + re.sub(r",\n\s+", ", ", found[1]) + "]",
        text,
    )
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(flat + "\n", encoding="utf-8")
    partial.replace(path)


def write(
    name: str,
    figures: dict,
    *,
    raw: Any = None,
    module: str | None = None,
    path: Path | None = None,
) -> Path:
    """Writes a benchmark's figures with machine, versions and command; whole or not at all.

    Args:
        name: Of the results, and of the benchmark.
        figures: What the pages quote: medians, spreads, seeds.
        raw: What they were made of; goes to `results/raw/NAME.json`, which git ignores.
        module: The benchmark, where its results are called otherwise.
        path: Where to; `results/NAME.json` by default.
    """
    path = path or RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    made = made_by(name, module=module)
    if raw is not None:
        beside = path.parent / "raw" / path.name
        beside.parent.mkdir(exist_ok=True)
        write_json(beside, {**made, "raw": raw})
    write_json(path, {"command": made.pop("command"), "machine": machine(), **made, **figures})
    return path


def once(path: Path, setting: dict, compute: Callable[[], dict]) -> dict:
    """The figures of a cell: from `path` if it is done, else computed and kept there.

    So a benchmark that was interrupted goes on with the cell that it was at.

    Raises:
        ValueError: The cell was done with another setting.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "cell.json"
        ...     [once(path, {"seed": 0}, lambda: {"loss": loss}) for loss in (1.0, 2.0)]
        [{'loss': 1.0}, {'loss': 1.0}]
    """
    setting = json.loads(json.dumps(setting))
    if path.exists():
        held = json.loads(path.read_text(encoding="utf-8"))
        if held["setting"] != setting:
            raise ValueError(
                f"{path} was made with {held['setting']}, and now the setting is {setting}: "
                "choose another --folder, or remove the file"
            )
        return held["figures"]
    figures = compute()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"setting": setting, "figures": figures})
    return figures
