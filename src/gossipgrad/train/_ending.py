"""The end of a run in a given world: each rank hands in, and one of those left puts it together."""

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch.distributed as dist

from gossipgrad.comm import AskedStore, Loss

from ._joined import HandedIn, collect_joined, folder_seconds, read_file, taken_for_dead
from ._layout import RunDir
from ._result import RankResult, RunFailedError
from ._run_lock import run_lock

# Of what ranks of a given world say to each other, in its store.
MAILBOX = "gossipgrad/train"
_POLL_SECONDS = 0.1
_REPORT_SECONDS = 120.0
# Between handing in and taking the lock one that lives does nothing.
_TURN_SECONDS = 5.0
# For another to put the run together, since a rank has last written metrics.
_LAST_SECONDS = 1800.0
# A store that hangs is not waited for: what is in it is in the folder, too.
_STORE_SECONDS = 2.0


class Ending:
    """What the ranks hand in, in the store and in the folder of the run.

    The one who puts the run together is the lowest rank that is not known to be lost. If it dies
    over that, or never comes, another takes its place: a lock on a file tells whether somebody is
    at it, and goes with the process that holds it. So neither rank 0 nor the store is needed. A
    rank is awaited for as long as it writes metrics, and two minutes more.

    Args:
        run_dir: The folder; best the same for all ranks.
        mailbox: The store, which may be lost, or hang.
        rank: This rank.
        world_size: How many there were at the start.

    Attributes:
        when_seconds: When ranks were lost, in seconds since 1970, as far as it is known here.
    """

    def __init__(self, run_dir: RunDir, mailbox: dist.Store, rank: int, world_size: int) -> None:
        self._run_dir = run_dir
        self._mailbox = AskedStore(mailbox, timeout_seconds=_STORE_SECONDS)
        self._rank = rank
        self._world_size = world_size
        self._absent: dict[int, str] = {}
        self._lost: dict[int, str] = {}
        self.when_seconds: dict[int, float] = {}

    def miss(self, losses: Mapping[int, Loss]) -> None:
        """Take note of ranks that were lost before the start."""
        self._absent = {rank: loss.why for rank, loss in losses.items()}
        known = (loss for loss in losses.items() if loss[1].when_seconds)
        self.when_seconds = {rank: loss.when_seconds or 0.0 for rank, loss in known}

    def hand_in(self, content: HandedIn) -> None:
        """Leave what this rank has to say for the others; the last thing that a rank does."""
        text = json.dumps({**content, "when_seconds": time.time()})
        with contextlib.suppress(RuntimeError):
            self._mailbox.ask(lambda store: store.set(f"rank{self._rank}", text))
        path = self._run_dir.rank_result(self._rank)
        with contextlib.suppress(OSError):  # the run may have been put together without us
            partial = path.with_suffix(".partial")
            partial.write_text(text)
            partial.replace(path)
        known = content.get("result", {}).get("lost", {})
        self._lost = {int(rank): str(loss["why"]) for rank, loss in known.items()} | self._absent

    @contextmanager
    def turn(self) -> Iterator[bool]:
        """Inside, it is this rank's to put the run together, if so; waits until that is known.

        The others get False, once it was done.

        Raises:
            RunFailedError: Nobody has done it for half an hour, though no rank trains any more.
        """
        first = min(set(range(self._world_size)) - set(self._lost), default=self._rank)
        begun_seconds = folder_seconds(self._run_dir)
        came_seconds: float | None = None
        while not self._is_done():
            now = time.monotonic()
            if came_seconds is None and self._read(first) is not None:
                came_seconds = now
            overdue = self._quiet_seconds(first, begun_seconds) > _REPORT_SECONDS
            absent = came_seconds is not None and now > came_seconds + _TURN_SECONDS
            if self._rank == first or overdue or absent:
                with run_lock(self._run_dir) as mine:
                    if mine and not self._is_done():
                        yield True
                        return
            ranks = range(self._world_size)
            if min(self._quiet_seconds(rank, begun_seconds) for rank in ranks) > _LAST_SECONDS:
                raise RunFailedError(
                    f"rank {self._rank} waited {_LAST_SECONDS:g} s for another to put the run "
                    f"together; what the ranks have learned is in {self._run_dir.partial}"
                )
            time.sleep(_POLL_SECONDS)
        yield False

    def collect(self) -> tuple[dict[int, RankResult], dict[int, str]]:
        """What the ranks handed in, and why some did not; those known to be lost do not count."""
        results: dict[int, RankResult] = {}
        lost: dict[int, str] = {}
        begun_seconds = folder_seconds(self._run_dir)
        for rank in range(self._world_size):
            while (content := self._read(rank)) is None and rank not in self._lost:
                if self._quiet_seconds(rank, begun_seconds) > _REPORT_SECONDS:
                    break
                time.sleep(_POLL_SECONDS)
            if content is None:
                nothing = f"handed nothing in within {_REPORT_SECONDS:.0f} s"
                why = self._lost.get(rank)
                lost[rank] = nothing if why is None else taken_for_dead(why)
            elif "result" in content:
                results[rank] = RankResult.from_json(content["result"])
            else:
                lost[rank] = content["cause"]
                self.when_seconds[rank] = content["when_seconds"]
        joined, missing = collect_joined(self._run_dir, results, read=self._read)
        return results | joined, lost | missing

    def done(self) -> None:
        """Tell the others that the run is put together."""
        with contextlib.suppress(RuntimeError):
            self._mailbox.ask(lambda store: store.set("done", ""))
            # They may learn it from nowhere else, and the store may go with this process.
            time.sleep(3 * _POLL_SECONDS * (self._world_size > 1))

    def _quiet_seconds(self, rank: int, begun_seconds: float) -> float:
        """How long nothing was heard of a rank, since this one began to wait at most."""
        with contextlib.suppress(OSError):
            begun_seconds = max(begun_seconds, self._run_dir.metrics(rank).stat().st_mtime)
        return folder_seconds(self._run_dir) - begun_seconds

    def _read(self, rank: int) -> HandedIn | None:
        if (content := read_file(self._run_dir, rank)) is not None:
            return content
        key = f"rank{rank}"
        with contextlib.suppress(RuntimeError):
            if self._mailbox.ask(lambda store: store.check([key])):
                return json.loads(self._mailbox.ask(lambda store: store.get(key)))
        return None

    def _is_done(self) -> bool:
        if self._run_dir.summary.exists() or not self._run_dir.partial.exists():
            return True
        with contextlib.suppress(RuntimeError):
            return self._mailbox.ask(lambda store: store.check(["done"]))
        return False
