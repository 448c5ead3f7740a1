"""Picks the command, and turns mistakes into one line."""

import io
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import TextIO

from gossipgrad.errors import GossipError

_COMMANDS = {
    "train": "train a model on several workers, here or inside torchrun or Slurm",
    "launch": "start a script of your own on several workers, of which some may die",
    "demo": "train on digits by gossip and by all-reduce, and compare the two",
    "probe": "measure what messages cost between live workers",
    "predict": "predict step times on a network, and recommend what to use there",
    "report": "write report.html of a run, compare several, or serve it while the run goes",
    "export": "write the consensus of a checkpoint as a safetensors file",
}
_USAGE = """\
usage: gossipgrad [-h] [--version] COMMAND ...

Train one PyTorch model on many workers over slow, uneven or unreliable networks, by gossip.

commands:
{commands}

`gossipgrad COMMAND --help` shows the options of a command.

exit codes (launch has one more, see its help):
  0    done; a gossip run is done even if ranks were lost on the way
  1    the run failed
  2    the command cannot work as it was given
  130  stopped by Ctrl-C, what was reached is kept (143: by SIGTERM)
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`, by default that of the process; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _print_any_name()
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_usage(), end="")
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"gossipgrad {version('gossipgrad')}")
        return 0
    command, *rest = arguments
    if command not in _COMMANDS:
        return _complain(f"no command {command!r}; there are {', '.join(_COMMANDS)}")
    if missing := [package for package in ("tyro", "rich") if find_spec(package) is None]:
        return _complain(f"this needs {' and '.join(missing)}: pip install 'gossipgrad[cli]'")
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        return _run(command, rest)


def _run(command: str, arguments: list[str]) -> int:
    # A command is imported when it is called: most load torch, which takes a second.
    try:
        return import_module(f"gossipgrad.cli._{command}").main(arguments)
    except ValueError as error:
        return _complain(str(error))
    except GossipError as error:
        from gossipgrad.train import RunFailedError

        return _complain(str(error), 1 if isinstance(error, RunFailedError) else 2)
    except KeyboardInterrupt:
        print("gossipgrad: stopped by SIGINT", file=sys.stderr)
        return 130


def _print_any_name() -> None:
    """Lets folders be printed whose names are no text: as the bytes that they are, like `ls`."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="surrogateescape")


def _complain(text: str, code: int = 2) -> int:
    print(f"gossipgrad: error: {text}", file=sys.stderr)
    return code


def _usage() -> str:
    return _USAGE.format(
        commands="\n".join(f"  {name:<10}{text}" for name, text in _COMMANDS.items())
    )


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    print(f"gossipgrad: warning: {message}", file=sys.stderr)
