"""Agents of torchrun, as commands of the documentation start them, without a start of Python."""

import multiprocessing
import os
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from support.waiting import HANG_SECONDS

__all__ = ["Agents", "agents", "run_torchrun"]


class Agents:
    """Agents that run, and the processes of their workers."""

    def __init__(self, processes: list[multiprocessing.Process], logs: list[Path]) -> None:
        self.processes = processes
        self._logs = logs

    def workers(self) -> dict[int, int]:
        """The process ids of workers that live, by rank."""
        found = {}
        for pid in self._children():
            try:
                environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if ranks := [int(each[5:]) for each in environ if each.startswith(b"RANK=")]:
                found[ranks[0]] = pid
        return found

    def said(self) -> str:
        """What all of them and their workers have said."""
        return "\n".join(log.read_text() for log in self._logs)

    def end(self) -> None:
        """Leave no process."""
        # An agent that stands still neither forgets a worker meanwhile nor starts another one.
        for pid in [agent.pid for agent in self.processes if agent.pid is not None]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        for pid in self._children():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.kill()
            process.join()

    def _children(self) -> list[int]:
        # A worker that has ended is there until its agent has looked.
        found = []
        for agent in self.processes:
            try:
                children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text()
            except OSError:
                continue
            found += [int(child) for child in children.split()]
        return found


@contextmanager
def agents(commands: list[str], logs: Path) -> Iterator[Agents]:
    """Starts an agent a command, `torchrun ...`; ends what is left of them."""
    files = [logs / f"agent{number}.txt" for number in range(len(commands))]
    environ = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    processes = []
    for command, file in zip(commands, files, strict=True):
        program, *arguments = shlex.split(command)
        assert program == "torchrun"
        processes.append(_agent(arguments, Path.cwd(), environ, file, file))
    running = Agents(processes, files)
    for process in running.processes:
        process.start()
    try:
        yield running
    finally:
        running.end()


def run_torchrun(
    arguments: Sequence[str | Path], folder: Path, timeout_seconds: float = HANG_SECONDS
) -> subprocess.CompletedProcess[str]:
    """Runs `torchrun` with such arguments in a folder, to its end."""
    words = [str(argument) for argument in arguments]
    with tempfile.TemporaryDirectory() as logs:
        out, errors = (Path(logs) / name for name in ("out", "errors"))
        process = _agent(words, folder, dict(os.environ), out, errors)
        running = Agents([process], [out, errors])
        process.start()
        try:
            process.join(timeout_seconds)
            if (code := process.exitcode) is None:
                raise TimeoutError(f"not over after {timeout_seconds:g} s:\n{running.said()}")
            return subprocess.CompletedProcess(words, code, out.read_text(), errors.read_text())
        finally:
            running.end()


def _agent(
    arguments: list[str], folder: Path, environ: dict[str, str], out: Path, errors: Path
) -> multiprocessing.Process:
    # torchrun itself is this function of torch; the fork server has loaded it.
    context = multiprocessing.get_context("forkserver")
    places = str(folder), str(out), str(errors)
    return context.Process(target=_run_agent, args=(arguments, environ, *places))


def _run_agent(
    arguments: list[str], environ: dict[str, str], folder: str, out: str, errors: str
) -> None:
    from torch.distributed.run import main

    # Blocked in the fork server, and so in what it forks.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    os.environ.clear()  # of the time when the fork server began
    os.environ.update(environ)
    os.chdir(folder)
    for stream, path in ((1, out), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    main(arguments)
