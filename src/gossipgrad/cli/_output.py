"""What commands share: how options are parsed, text is printed, and files are written."""

import io
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, TypeVar

import tyro
from rich.console import Console
from rich.table import Table

Options = TypeVar("Options")


_NO_PAIRS = (tyro.conf.FlagCreatePairsOff,)


def parse(
    kind: type[Options],
    arguments: Sequence[str],
    command: str,
    *,
    default: Options | None = None,
    config: tuple[Any, ...] = _NO_PAIRS,
) -> Options:
    """The options of a command; unless `config` is empty, flags have no `--no-` beside them.

    Raises:
        ValueError: Some cannot be read; it says so in one line.
    """
    said = io.StringIO()
    settings: dict[str, Any] = {} if default is None else {"default": default}
    try:
        with redirect_stderr(said):
            return tyro.cli(
                kind, args=arguments, prog=f"gossipgrad {command}", config=config, **settings
            )
    except SystemExit as end:
        if not end.code:  # it has shown the help
            raise
        raise ValueError(_one_line(said.getvalue(), command)) from None


def _one_line(box: str, command: str) -> str:
    """What tyro says in a box: a title, what is wrong, and perhaps help after a rule."""
    _, rest = box.strip("\n").split("\n", 1)
    # Only a terminal without UTF-8 has a rule below the title, too.
    parts = re.split(r"^\W*[-\u2500]{9,}\W*$", rest, flags=re.MULTILINE)
    wrong = next(part for part in parts if re.search(r"\w", part)).replace("\u2502", " ")
    text = re.sub(r"(?<=\)) (?=\.)", "", " ".join(wrong.split()))
    text = re.sub(r"^Error parsing [^-]\S*: ", "", text)
    if found := re.match(
        r"Error parsing (--\S+): no type matching (\S+) .* from \['(.*?)'\]", text
    ):
        name, kinds, value = found.groups()
        text = f"{name} is {value!r}, but must be {kinds.replace('{None}|', '')}."
    return f"{text[0].lower()}{text[1:].rstrip('.')}; see `gossipgrad {command} --help`"


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


def check_writable(option: str, path: Path | None) -> None:
    """Raise `ValueError` unless a file can be written, before anything is computed for it."""
    if path is None:
        return
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ValueError(f"{option} {path}: there is no folder {path.parent}")
    with writing(option, path):
        if path.exists():
            path.open("a").close()
        else:
            TemporaryFile(dir=folder).close()


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
