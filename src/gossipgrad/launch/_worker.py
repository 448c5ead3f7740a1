"""One worker process: started with torchrun's environment, watched, and ended with its launcher."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TextIO

from ._fork_server import ForkedProcess

_HEADER = "Traceback (most recent call last):"
_TAIL_BYTES = 64 * 1024
# A grandchild may keep the pipe open after its parent has ended.
_DRAIN_SECONDS = 0.5
# Linux ends the worker with its launcher (PR_SET_PDEATHSIG), in any case. A separate interpreter
# requests it, since code between fork and exec is not safe with threads.
_BOOT = """
import os, sys
if sys.platform == "linux":
    import ctypes
    ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exit:
    """How a worker ended.

    Attributes:
        rank: Its rank.
        code: Its exit code; -N if signal N ended it.
        errors: The end of its standard error.
    """

    rank: int
    code: int
    errors: str = ""

    @property
    def traceback(self) -> str | None:
        """The error of its last traceback, None without one."""
        start = self.errors.rfind(_HEADER)
        return None if start < 0 else self.errors[start:].rstrip()

    @property
    def cause(self) -> str:
        """The cause, to follow "rank 3": "was killed by SIGKILL"."""
        if self.code < 0:
            try:
                name = signal.Signals(-self.code).name
            except ValueError:
                name = f"signal {-self.code}"
            return f"was killed by {name}" + " (out of memory?)" * (name == "SIGKILL")
        error = None if self.traceback is None else _last_line(self.traceback)
        return f"exited with code {self.code}" + ("" if error is None else f": {error}")


Command = Sequence[str] | Callable[[], object]


class Worker:
    """A process in its own session, so that Ctrl-C in a terminal reaches only the launcher.

    Its output goes to that of the launcher or to a file, and the end of its standard error is kept.

    Args:
        command: A program with its arguments, or a function that the fork server has loaded.
        environ: Its environment.
        rank: Its rank.
        show: Whether to show its standard error.
        prefix: Begins each line of what a program prints.
        log: File for what a program prints, which is appended to; None: that is shown.

    Raises:
        OSError: The process cannot be started.
    """

    def __init__(
        self,
        command: Command,
        environ: Mapping[str, str],
        rank: int,
        *,
        show: bool = True,
        prefix: str = "",
        log: Path | None = None,
    ) -> None:
        self.rank = rank
        self._show, self._prefix = show, prefix
        self._log = log
        self.exit: Exit | None = None
        self._tail = b""
        if callable(command):
            self._process = ForkedProcess(command, environ, name=f"gossipgrad-rank{rank}")
        else:
            boot = [sys.executable, "-I", "-S", "-c", _BOOT, str(os.getpid())]
            self._process = subprocess.Popen(
                [*boot, *command],
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if prefix or log else None,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        self._readers = [self._read(self._process.stderr, sys.stderr, self._keep)]
        if isinstance(self._process, subprocess.Popen) and self._process.stdout is not None:
            self._readers.append(self._read(self._process.stdout, sys.stdout))

    def poll(self) -> Exit | None:
        """How it ended, None if it runs."""
        if self.exit is None and (code := self._process.poll()) is not None:
            for reader in self._readers:
                reader.join(_DRAIN_SECONDS)
            # torch starts each line with [rankN] if there is a process group.
            text = self._tail.decode(errors="replace")
            text = re.sub(r"^\[rank\d+\]: ", "", text, flags=re.MULTILINE)
            self.exit = Exit(rank=self.rank, code=code, errors=text)
        return self.exit

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it and all processes of its session, and wait until it is gone."""
        if self._process.poll() is None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:  # a process that has just started has no session yet
                os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self.poll()

    def _keep(self, chunk: bytes) -> None:
        self._tail = (self._tail + chunk)[-_TAIL_BYTES:]

    def _read(
        self,
        pipe: IO[bytes] | None,
        stream: TextIO,
        keep: Callable[[bytes], None] = lambda chunk: None,
    ) -> threading.Thread:
        assert pipe is not None
        log = None if self._log is None else self._log.open("ab", buffering=0)

        def forward() -> None:
            rest = b""  # of a line, which others would break
            with pipe, log or contextlib.nullcontext():
                while chunk := os.read(pipe.fileno(), _TAIL_BYTES):
                    keep(chunk)
                    if log is not None:
                        log.write(chunk)
                        continue
                    if self._prefix:
                        *lines, rest = re.split(rb"(?<=[\n\r])", rest + chunk)
                        chunk = b"".join(self._prefix.encode() + line for line in lines)
                    self._write(chunk, stream)
            if rest:
                self._write(self._prefix.encode() + rest + b"\n", stream)

        thread = threading.Thread(target=forward, daemon=True)
        thread.start()
        return thread

    def _write(self, chunk: bytes, stream: TextIO) -> None:
        if self._show:
            stream.write(chunk.decode(errors="replace"))
            stream.flush()


def _last_line(traceback: str) -> str | None:
    """Return the error of a traceback: the first line after its frames."""
    found = re.search(r"^(?! |Traceback )\S.*$", traceback, re.MULTILINE)
    return None if found is None else found[0]
