"""What commands share: how options are parsed, text is printed, and files are written."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import tyro
from rich.console import Console
from rich.table import Table

Options = TypeVar("Options")


def parse(kind: type[Options], arguments: Sequence[str], command: str) -> Options:
    """The options of a command; flags have no `--no-` beside them."""
    return tyro.cli(
        kind,
        args=arguments,
        prog=f"gossipgrad {command}",
        config=(tyro.conf.FlagCreatePairsOff,),
    )


def say(*texts: str) -> None:
    """Print lines as they are: not wrapped, without markup and colours."""
    for text in texts:
        Console().print(text, soft_wrap=True, highlight=False, markup=False)


def new_table(*columns: str, title: str | None = None) -> Table:
    """A table whose columns are figures but the first, and never cut."""
    table = Table(title=title, title_justify="left")
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left", no_wrap=number > 0)
    return table


def show(table: Table) -> None:
    """Print a table."""
    Console().print(table)


def check_folder(option: str, path: Path | None) -> None:
    """Raise `ValueError` unless the folder of a file is there, before anything is computed."""
    if path is not None and not path.absolute().parent.is_dir():
        raise ValueError(f"{option} {path}: there is no folder {path.parent}")


def write_json(option: str, path: Path, value: Any) -> None:
    """Write plain values to a file."""
    with writing(option, path):
        path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


@contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """Inside, an error of the file system is a `ValueError` with the option and the file."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"cannot write {option} {path}: {error.strerror or error}") from error
