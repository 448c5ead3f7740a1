"""Agents of torchrun, a worker each, as commands of the documentation start them."""

import multiprocessing
import os
import shlex
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["Agents", "agents"]


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
        for pid in self._children():
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
    # torchrun itself is this function of torch; the fork server has loaded it.
    context = multiprocessing.get_context("forkserver")
    files = [logs / f"agent{number}.txt" for number in range(len(commands))]
    running = Agents(
        [
            context.Process(target=_run_agent, args=(shlex.split(command), str(file)))
            for command, file in zip(commands, files, strict=True)
        ],
        files,
    )
    for process in running.processes:
        process.start()
    try:
        yield running
    finally:
        running.end()


def _run_agent(command: list[str], log: str) -> None:
    from torch.distributed.run import main

    # Blocked in a fork server that a launch of workers has started, and so in what it forks.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    program, *arguments = command
    assert program == "torchrun"
    file = os.open(log, os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    main(arguments)
