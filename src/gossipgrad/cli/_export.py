"""`gossipgrad export`: one model of a checkpoint, as a file that others read."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ._output import parse, writing


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportOptions:
    """Write the consensus of a checkpoint, the mean of all replicas, as a safetensors file."""

    directory: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="DIR")]]
    """Folder of a run, or of its checkpoints."""
    out: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="FILE")]]
    """File to write."""
    step: int | None = None
    """Of this step; None: of the newest that all ranks have committed."""
    rank: int | None = None
    """The replica of this rank alone, as it was; None: the consensus."""
    key: str = "model"
    """Where a state of your own has the weights."""
    force: bool = False
    """Replace the file if it exists."""


def main(arguments: list[str]) -> int:
    """Write the file and say where it is; returns the exit code."""
    options = parse(ExportOptions, arguments, "export")
    if options.out.exists() and not options.force:
        raise ValueError(f"{options.out} exists: give --force to replace it, or another file")
    from safetensors import safe_open

    from gossipgrad.checkpoint import export_safetensors

    inside = options.directory / "checkpoints"
    with writing("FILE", options.out):
        written = export_safetensors(
            inside if inside.is_dir() else options.directory,
            options.out,
            step=options.step,
            run=_run_name(options.directory),
            rank=options.rank,
            key=options.key,
            overwrite=options.force,
        )
    print(written)
    with safe_open(written, framework="numpy") as file:
        metadata = file.metadata()
    print(f"step {metadata['step']}, {metadata['replica']}", file=sys.stderr)
    return 0


def _run_name(folder: Path) -> str | None:
    """What the run is called whose folder it is, so that checkpoints of another are refused."""
    try:
        name = json.loads((folder / "config.json").read_text())["run_name"]
    except (OSError, ValueError, KeyError, TypeError):
        return None  # of a loop of the user's own, or no folder of a run
    return name if isinstance(name, str) else None
