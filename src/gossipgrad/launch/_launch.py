"""Start workers, wait for them, and pass signals on."""

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from gossipgrad.comm import interface_towards
from gossipgrad.errors import GossipError

from ._rendezvous import Rendezvous
from ._worker import Command, Exit, Worker

SOME_LOST = 3
"""The exit code when some workers failed and others reached their end."""

_LOOPBACK = "127.0.0.1"
_ECHO_SECONDS = 1.0
# Of an island of which a rank has died: the others may wait for it in a collective.
_ISLAND_SECONDS = 60.0
_POLL_SECONDS = 0.05
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Echoes:
    """Tells another request to stop from an echo of the first one.

    A signal to a process group may come twice: from there, and again from `timeout` or torchrun.
    """

    def __init__(self) -> None:
        self._until_seconds = math.inf

    def has_one_now(self) -> bool:
        """Whether a signal that comes now is an echo; the first one is none."""
        now = time.monotonic()
        if self._until_seconds == math.inf:
            self._until_seconds = now + _ECHO_SECONDS
            return False
        return now <= self._until_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Launched:
    """How the workers of this node ended.

    Attributes:
        exits: The end of each, by rank.
        stopped_by: The signal that stopped them, if one did.
    """

    exits: dict[int, Exit]
    stopped_by: signal.Signals | None = None

    @property
    def exit_code(self) -> int:
        """For the shell: 0, 1 if all failed, `SOME_LOST` if some did, 128 + N after signal N."""
        if self.stopped_by is not None:
            return 128 + self.stopped_by
        failed = [one for one in self.exits.values() if one.code]
        if len(failed) == len(self.exits):
            return 1
        return SOME_LOST if failed else 0


def launch(
    command: Command,
    rendezvous: Rendezvous,
    *,
    grace_seconds: float = 30.0,
    supervise: Callable[[Sequence[Worker]], None] = lambda workers: None,
    show: bool = True,
    describe: Callable[[Exit], str | None] = lambda end: end.cause,
    prefix: bool = False,
    log_dir: Path | None = None,
    respawn: int = 0,
    island: int = 1,
) -> Launched:
    """Run a command in this node's processes with torchrun's environment, until each has ended.

    A worker that dies is named, and the others continue. The first SIGINT, SIGTERM or SIGHUP is
    passed on to all workers, which have `grace_seconds` to end before they are killed; another one
    kills them immediately, if it comes more than a second later. No worker outlives this call. If
    this process is killed, the workers of a command end, and those of a function continue.

    Args:
        command: A program and its arguments, or a function, which starts quickly if the fork server
            has its module loaded.
        rendezvous: The store, and the ranks of this node.
        grace_seconds: Time from a signal until running workers are killed.
        supervise: Called 20 times a second with the workers, which it may signal or kill.
        show: Whether to show the workers' standard error, and failures.
        describe: Returns the description of a failed worker, to follow "rank 3"; None: nothing.
        prefix: Begin each line of what a program prints with its rank.
        log_dir: Folder for rank0.log, rank1.log and so on, which get what programs print, behind
            what is there; None: that is shown.
        respawn: How many times a worker that failed is started again while others run. The program
            then finds `TORCHELASTIC_RESTART_COUNT` above 0, and has to join the run by `gg.join`.
        island: How many workers end and start together: if one fails, the others of its island are
            ended, too. Started again, they are a world of their own, with its store: `RANK` and
            `WORLD_SIZE` are those of the island, and they join by
            `gg.join(..., island=dist.group.WORLD)`.

    Returns:
        How the workers ended.

    Raises:
        ValueError: The workers of this node are not whole islands; nothing was started.
        GossipError: A process could not be started; none is left then.
    """
    if rendezvous.nproc % island:
        raise ValueError(
            f"{rendezvous.nproc} workers of this node are no islands of {island}: give a multiple."
        )
    workers: list[Worker] = []
    spare, restarts = respawn, 0
    stores: list[dist.TCPStore] = []  # of islands that were started again
    caught: list[signal.Signals] = []
    stop_seconds: float | None = None
    ending: dict[int, tuple[float, bool]] = {}  # since when, and whether they start again
    with _catch_signals(caught):
        try:
            base = _defaults(rendezvous) | {**os.environ}

            def start(local_rank: int) -> Worker:
                rank = rendezvous.first_rank + local_rank
                own = _environment(rendezvous, local_rank)
                own["TORCHELASTIC_RESTART_COUNT"] = str(restarts)
                if stores:
                    own |= {"RANK": str(local_rank % island), "WORLD_SIZE": str(island)}
                    own |= {"MASTER_ADDR": _LOOPBACK, "MASTER_PORT": str(stores[-1].port)}
                return Worker(
                    command,
                    base | own,
                    rank,
                    show=show,
                    prefix=f"[rank {rank}] " if prefix else "",
                    log=None if log_dir is None else log_dir / f"rank{rank}.log",
                )

            for local_rank in range(rendezvous.nproc):
                if caught:
                    break
                workers.append(start(local_rank))
            while running := [worker for worker in workers if worker.exit is None]:
                if caught and stop_seconds is None:
                    stop_seconds = time.monotonic()
                    for worker in running:
                        worker.send_signal(caught[0])
                late = stop_seconds is not None and time.monotonic() > stop_seconds + grace_seconds
                if late or len(caught) > 1:
                    break
                supervise(workers)
                for worker in running:
                    first = (worker.rank - rendezvous.first_rank) // island * island
                    if (end := worker.poll()) is None or not end.code or caught or first in ending:
                        continue
                    members = workers[first : first + island]
                    ends = [each for member in members if (each := member.poll()) and each.code]
                    end = min(ends, key=lambda each: each.code)  # one that a signal killed
                    left = sum(each.poll() is None for each in workers if each not in members)
                    comes_again = bool(spare and (left or (island > 1 and rendezvous.nodes > 1)))
                    spare -= comes_again
                    ending[first] = time.monotonic(), comes_again
                    for member in members:
                        if member.poll() is None:
                            member.send_signal(signal.SIGTERM)
                    if show and (what := describe(end)) is not None:
                        whose = "; its island ends with it" if island > 1 else ""
                        plural = "workers continue" if left > 1 else "worker continues"
                        others = f"; {left} {plural}" if left else ""
                        again = "; it is started again, to join" * comes_again
                        text = f"rank {end.rank} {what}{whose}{others}{again}"
                        print(f"gossipgrad: {text}", file=sys.stderr, flush=True)
                for first, (since_seconds, comes_again) in [*ending.items()]:
                    members = workers[first : first + island]
                    for member in members:
                        if time.monotonic() > since_seconds + min(grace_seconds, _ISLAND_SECONDS):
                            member.kill()
                    if comes_again and not caught and all(m.poll() is not None for m in members):
                        del ending[first]
                        restarts += 1
                        if island > 1:  # torch finds ranks that are gone in the store of the run
                            stores.append(
                                dist.TCPStore(_LOOPBACK, 0, is_master=True, wait_for_workers=False)
                            )
                        for local_rank in range(first, first + island):
                            workers[local_rank] = start(local_rank)
                time.sleep(_POLL_SECONDS)
        except OSError as error:
            raise GossipError(f"a worker could not be started: {error}") from error
        finally:
            for worker in workers:
                worker.kill()
    exits = {worker.rank: worker.exit for worker in workers if worker.exit is not None}
    return Launched(exits=exits, stopped_by=caught[0] if caught else None)


def _environment(rendezvous: Rendezvous, local_rank: int) -> dict[str, str]:
    """Return torchrun's variables for a worker; the store is the launcher's."""
    rank, world_size = rendezvous.first_rank + local_rank, rendezvous.world_size
    variables = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": rendezvous.nproc,
        "GROUP_RANK": rendezvous.node_rank,
        "GROUP_WORLD_SIZE": rendezvous.nodes,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world_size,
        "ROLE_NAME": "default",
        "MASTER_ADDR": rendezvous.host,
        "MASTER_PORT": rendezvous.port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_RUN_ID": "gossipgrad",
    }
    return {name: str(value) for name, value in variables.items()}


def _defaults(rendezvous: Rendezvous) -> dict[str, str]:
    """Return variables that the user's environment may override."""
    # One compute thread per worker, like torchrun. Gloo listens on loopback, or where the machine
    # reaches the store; by default at the address of the host's name, which may be loopback too.
    threads = {"OMP_NUM_THREADS": "1"} if rendezvous.nproc > 1 else {}
    is_local = rendezvous.host in ("localhost", "::1") or rendezvous.host.startswith("127.")
    interface = "lo" if is_local else interface_towards(rendezvous.host)
    is_known = interface is not None and sys.platform == "linux"
    found = threads | ({"GLOO_SOCKET_IFNAME": interface} if is_known else {})
    if rendezvous.nodes == 1 and not is_local:  # joiners of other machines have to reach the links
        found["GOSSIPGRAD_BIND"] = rendezvous.host
    return found


@contextmanager
def _catch_signals(caught: list[signal.Signals]) -> Iterator[None]:
    """Collect signals inside, the first one without its echoes.

    Outside the main thread Python delivers none.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    echoes = Echoes()

    def note(number: int, frame: FrameType | None) -> None:
        if not echoes.has_one_now():
            caught.append(signal.Signals(number))

    before = {
        number: signal.signal(number, note)
        for number in _SIGNALS
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN  # nohup
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
