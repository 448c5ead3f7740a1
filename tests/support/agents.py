"""Agents of torchrun, as commands of the documentation start them."""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from support.waiting import HANG_SECONDS

__all__ = ["Agents", "agents", "run_torchrun"]

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


class Agents:
    """Agents that run, and the processes of their workers."""

    def __init__(self, processes: list[subprocess.Popen], logs: list[Path]) -> None:
        self.processes = processes
        self.logs = logs

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
        return "\n".join(log.read_text() for log in self.logs)

    def end(self) -> None:
        """Leave no process."""
        # A stopped agent neither loses a worker from its list nor starts another one.
        for agent in self.processes:
            agent.send_signal(signal.SIGSTOP)
        for pid in self._children():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for agent in self.processes:
            agent.kill()
            agent.wait()

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
    environ = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    running = Agents([], [])
    try:
        for number, command in enumerate(commands):
            program, *arguments = shlex.split(command)
            assert program == "torchrun"
            running.logs.append(logs / f"agent{number}.txt")
            with running.logs[-1].open("w") as log:
                streams = {"stdout": log, "stderr": subprocess.STDOUT}
                process = subprocess.Popen([*TORCHRUN, *arguments], env=environ, **streams)
            running.processes.append(process)
        yield running
    finally:
        running.end()


def run_torchrun(arguments: Sequence[str | Path], folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs `torchrun` with such arguments in a folder, to its end."""
    command = [*TORCHRUN, *map(str, arguments)]
    return subprocess.run(
        command, cwd=folder, timeout=HANG_SECONDS, capture_output=True, text=True, check=False
    )
