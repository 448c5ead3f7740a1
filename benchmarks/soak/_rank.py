"""What one rank does: small steps by the ten thousand, consensus and checkpoints now and then."""

import gc
import json
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import gossipgrad as gg
from gossipgrad import checkpoint

from ._sizes import entries, sizes

__all__ = ["PARTS", "Part", "rank_main"]

BUCKET_BYTES = 128
SAMPLES = 120  # of each part and rank
_CONSENSUS_EVERY = 1_000
_SAVE_EVERY = 2_500
_LAST_SAVE_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A stretch of the run.

    Attributes:
        name: In words.
        mode: How exchanges are mixed.
        topology: Who meets whom.
        share: Of the steps of the run.
        sessions: How many, one after the other.
    """

    name: str
    mode: str
    topology: str
    share: float
    sessions: int = 1


PARTS = (
    Part(name="overlap", mode="overlap", topology="dissemination", share=0.49),
    Part(name="stale", mode="stale", topology="matching", share=0.49),
    Part(name="sessions", mode="sync", topology="hypercube", share=0.02, sessions=100),
)


class Training:
    """A tiny model and its optimizer; a step takes a tenth of a millisecond."""

    def __init__(self, rank: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        generator = torch.Generator().manual_seed(rank)
        self._x = torch.randn(4, 8, generator=generator)
        self._y = torch.randn(4, 4, generator=generator)

    def step(self) -> None:
        nn.functional.mse_loss(self.model(self._x), self._y).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Log:
    """Writes samples down as they are taken, that they fill no memory."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = (folder / f"samples-rank{rank}.jsonl").open("a", buffering=1)
        self._start = time.monotonic()

    def sample(self, part: Part, session: gg.GossipSession, exchanges: int) -> None:
        gc.collect()  # a session that is over is a circle of objects
        figures = {"part": part.name, "exchanges": exchanges, **sizes(session)}
        self._write(figures | {"seconds": round(time.monotonic() - self._start, 1)})

    def places(self, part: Part, session: gg.GossipSession) -> None:
        """Which container has how many entries, to find the one that grows."""
        self._write({"part": part.name, "places": dict(entries(session).most_common(40))})

    def outcomes(self, part: Part, counted: dict[str, int]) -> None:
        self._write({"part": part.name, "outcomes": counted})

    def close(self) -> None:
        self._file.close()

    def _write(self, what: dict[str, Any]) -> None:
        self._file.write(json.dumps(what) + "\n")


def rank_main(
    rank: int, world_size: int, port: int, folder: Path, steps: int, names: Sequence[str]
) -> None:
    """Parts of the run, one after the other.

    Args:
        rank: This rank.
        world_size: How many there are.
        port: Of the store.
        folder: For samples and checkpoints.
        steps: Of all parts together.
        names: Which parts; what steps the others would take is left out.
    """
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    with closing(Log(folder, rank)) as log:
        for part in (part for part in PARTS if part.name in names):
            _run(part, rank, world_size, store, folder, log, steps)


def _run(
    part: Part, rank: int, world_size: int, store: dist.Store, folder: Path, log: Log, steps: int
) -> None:
    training = Training(rank)
    own = round(part.share * steps / part.sessions)
    counted: dict[str, int] = {}
    for number in range(part.sessions):
        group = gg.Group(dist.PrefixStore(f"{part.name}/{number}", store), rank, world_size)
        before = counted.get("delivered", 0)
        with gg.gossip(
            training.model,
            training.optimizer,
            topology=part.topology,
            mode=part.mode,
            bucket_bytes=BUCKET_BYTES,
            process_group=group,
        ) as session:
            every = max(1, own * part.sessions // SAMPLES)
            look = _looker(log, part, session, before, every, last=number == part.sessions - 1)
            _train(training, session, own, folder / f"{part.name}-{number}", look)
            for outcome, count in session.stats().outcomes.items():
                counted[outcome] = counted.get(outcome, 0) + count
    log.outcomes(part, counted)


def _looker(
    log: Log, part: Part, session: gg.GossipSession, before: int, every: int, *, last: bool
) -> Callable[[int, bool], None]:
    """Takes a sample every so many steps, or one a session where there are many."""

    def look(step: int, at_end: bool) -> None:
        if at_end and last:
            log.places(part, session)
        if (at_end and part.sessions > 1) or (part.sessions == 1 and step % every == 0):
            log.sample(part, session, before + session.stats().outcomes["delivered"])
        if part.sessions == 1 and step == every:
            log.places(part, session)

    return look


def _train(
    training: Training,
    session: gg.GossipSession,
    steps: int,
    directory: Path,
    look: Callable[[int, bool], None],
) -> None:
    rank, world_size = session.rank, session.world_size
    with checkpoint.Saver(directory, rank=rank, world_size=world_size, keep=2) as saver:
        for step in range(1, steps + 1):
            training.step()
            if step % _CONSENSUS_EVERY == 0:
                with session.consensus():
                    pass
            if step % _SAVE_EVERY == 0 or step == steps:
                state = session.state_dict(drain=True)
                saver.save(state, step=step, wait_seconds=_LAST_SAVE_SECONDS, copy=False)
                del state
            if step < steps:
                look(step, False)
        look(steps, True)
        session.group.barrier()  # one that has left would be missed by who is still to save
