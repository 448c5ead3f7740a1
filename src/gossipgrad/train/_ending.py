"""The end of a run: each rank hands in its result, and the lowest that lives puts them together."""

import json
import signal
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from gossipgrad.comm import AskedStore

from ._config import TrainConfig
from ._folder import RunDir, hold, is_held, where_weights_are, write_whole
from ._invitation import withdraw
from ._result import Outcome, RankResult, RunFailedError, exit_code_of
from ._summary import choose_exported, compose, finish, known_joined

# Prefix of what the ranks of a run write into the store.
MAILBOX = "gossipgrad/train"
# As `hand_in` leaves it: a "result" and the signal that has stopped the rank, or the "cause" why
# there is none.
HandedIn = Mapping[str, Any]
_POLL_SECONDS = 0.1
# A store that hangs is not awaited: what is in it is in the folder, too.
_STORE_SECONDS = 2.0
# For the store of a process that ends, to be read by others to which the folder is not visible yet.
_SEEN_SECONDS = 0.3


def hand_in(run_dir: RunDir, store: AskedStore, rank: int, content: HandedIn) -> None:
    """Leave how a rank ended, in the folder, and in the store for a disk that is full."""
    text = json.dumps({**content, "when_seconds": time.time()})
    with suppress(OSError):
        write_whole(run_dir.rank_result(rank), text)
    with suppress(RuntimeError):
        store.ask(lambda store: store.set(f"rank{rank}", text))


def read_end(run_dir: RunDir, store: AskedStore, rank: int) -> HandedIn | None:
    """What `hand_in` has left of a rank, None if nothing."""
    with suppress(OSError, ValueError):
        return json.loads(run_dir.rank_result(rank).read_text())
    key = f"rank{rank}"
    with suppress(RuntimeError):
        text = store.ask(lambda store: store.get(key) if store.check([key]) else None)
        return None if text is None else json.loads(text)
    return None


def clean_up(run_dir: RunDir, store: AskedStore, ranks: Iterable[int]) -> None:
    """Remove what a run that failed has left, but not what its ranks have learned."""
    withdraw(run_dir)
    ends = [read_end(run_dir, store, rank) or {} for rank in ranks]
    if not any("result" in end for end in ends) and not any(run_dir.partial.glob("joined-rank*")):
        run_dir.remove_partial()


class Living:
    """Which ranks live: each locks a file of its own, which the system frees at its end.

    One that has no such file, as with a folder of its own, is awaited for `seconds`.
    """

    def __init__(self, run_dir: RunDir, seconds: float) -> None:
        self._run_dir, self._seconds = run_dir, seconds
        self._missing: dict[int, int] = {}

    def has(self, rank: int) -> bool:
        """Whether a rank lives; to be asked every 0.1 s while waiting."""
        held = is_held(self._run_dir.rank_lock(rank))
        # Looks are counted, not seconds: this process may have been stopped.
        self._missing[rank] = self._missing.get(rank, 0) + 1 if held is None else 0
        return held or (held is None and self._missing[rank] * _POLL_SECONDS <= self._seconds)


class Ending:
    """What one rank does at the end of the run; it counts as living from when this is made."""

    def __init__(self, config: TrainConfig, run_dir: RunDir, store: dist.Store, rank: int) -> None:
        assert config.nproc is not None, "resolve the configuration first"
        self._config, self._founders = config, range(config.nproc)
        self._run_dir, self._rank = run_dir, rank
        self._store = AskedStore(store, timeout_seconds=_STORE_SECONDS)
        self._living = Living(run_dir, config.lost_after_seconds)
        self._lock = hold(run_dir.rank_lock(rank))

    def close(self) -> None:
        """Count as dead, if others still wait for this rank."""
        if self._lock is not None:
            self._lock.close()

    def hand_in(self, content: HandedIn) -> None:
        """Leave what this rank has to say for the one that puts the run together."""
        self._own = content
        hand_in(self._run_dir, self._store, self._rank, content)

    def finish(self) -> Outcome | None:
        """Put the run together if this is the lowest rank that lives; None once another has.

        Called when this rank has handed in its result. All others that live are awaited. If the one
        that puts the run together dies over it, the next one begins again.
        """
        result = self._own["result"]
        ranks = {*self._founders, *map(int, result["joined"]), self._rank}
        while not self._is_over():
            first = next(rank for rank in sorted(ranks) if not self._is_lost(rank, result["lost"]))
            if first == self._rank:
                return self._put_together()
            time.sleep(_POLL_SECONDS)
        return None

    def _is_over(self) -> bool:
        if self._run_dir.summary.exists() or not self._run_dir.partial.exists():
            return True
        with suppress(RuntimeError):
            return self._store.ask(lambda store: store.check(["done"]))
        return False

    def _is_lost(self, rank: int, known: Mapping[str, Any]) -> bool:
        """Whether a rank will not put the run together."""
        if rank == self._rank:
            return False
        end = read_end(self._run_dir, self._store, rank)
        if end is not None and ("cause" in end or end["result"]["left"]):
            return True
        return str(rank) in known or not self._living.has(rank)

    def _put_together(self) -> Outcome:
        ends = {self._rank: self._own}
        for rank in {*self._founders} - {self._rank}:
            ends[rank] = self._await_end(rank, ends)
        for rank in known_joined(_results(ends).values()).keys() - ends.keys():
            ends[rank] = self._await_end(rank, ends)
        run_dir, results = self._run_dir, _results(ends)
        signals = [end["stopped_by"] for end in ends.values() if end.get("stopped_by")]
        stopped_by = signal.Signals(signals[0]) if signals else None
        with_model = {r: one for r, one in results.items() if run_dir.rank_model(r).exists()}
        if not with_model:
            raise RunFailedError(
                "another rank was lost while it put the run together: "
                + (
                    f"the model is in {run_dir.model}"
                    if run_dir.model.exists()
                    else where_weights_are(run_dir)
                )
            )
        exported = choose_exported(with_model)
        lost = {rank: end for rank, end in ends.items() if "cause" in end}
        summary = compose(
            self._config,
            results,
            {rank: end["cause"] for rank, end in lost.items()},
            world_size=len(self._founders),
            exported=exported,
            stopped_by=stopped_by,
            run_dir=run_dir,
            when_seconds={
                r: end["when_seconds"] for r, end in lost.items() if "when_seconds" in end
            },
        )
        report = finish(run_dir, summary, exported)
        with suppress(RuntimeError):
            self._store.ask(lambda store: store.set("done", ""))
            time.sleep(_SEEN_SECONDS * (len(self._founders) > 1))
        return Outcome(
            exit_code=exit_code_of(stopped_by if summary["interrupted"] else None),
            run_dir=run_dir.path,
            summary=summary,
            report=report,
        )

    def _await_end(self, rank: int, ends: Mapping[int, HandedIn]) -> HandedIn:
        """What a rank hands in, or why it does not; waits for one that lives."""
        known = {key: loss for one in _results(ends).values() for key, loss in one.lost.items()}
        while True:
            lives = self._living.has(rank)  # before its end is read, which comes first
            if (end := read_end(self._run_dir, self._store, rank)) is not None:
                return end
            if (loss := known.get(str(rank))) is not None:
                return {"cause": f"was taken for dead: {loss['why']}"}
            if not lives:
                return {"cause": "ended and wrote no result"}
            time.sleep(_POLL_SECONDS)


def _results(ends: Mapping[int, HandedIn]) -> dict[int, RankResult]:
    return {r: RankResult.from_json(end["result"]) for r, end in ends.items() if "result" in end}
