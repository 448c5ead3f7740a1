"""The end of a run: each rank hands in its result, and the lowest that lives puts them together."""

import json
import signal
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from gossipgrad.comm import AskedStore

from ._config import TrainConfig
from ._files import where_weights_are, write_whole
from ._invitation import withdraw
from ._layout import RunDir
from ._result import Outcome, RankResult, RunFailedError, exit_code_of
from ._summary import choose_exported, compose, finish, known_joined

# Prefix of what the ranks of a run write into the store.
MAILBOX = "gossipgrad/train"
# As `hand_in` leaves it: a "result" and the signal that has stopped the rank, or the "cause" why
# there is none.
HandedIn = Mapping[str, Any]
_POLL_SECONDS = 0.1
_BEAT_SECONDS = 0.5
# A store that hangs is not awaited: what is in it is in the folder, too.
_STORE_SECONDS = 2.0
# For a rank whose beats cannot be read, since the store is lost.
_BLIND_SECONDS = 1800.0


def hand_in(run_dir: RunDir, store: AskedStore, rank: int, content: HandedIn) -> None:
    """Leave what is to be known of a rank's end, in the folder and in the store."""
    text = json.dumps({**content, "when_seconds": time.time()})
    with suppress(OSError):  # a full disk; or the run is over, and its folder cleaned
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
    """Remove what a run that failed has left to be put together, if there is nothing of use.

    What ranks have learned stays, and what belongs to ranks that joined and may go on.
    """
    withdraw(run_dir)
    ends = [read_end(run_dir, store, rank) or {} for rank in ranks]
    if not any("result" in end for end in ends) and not any(run_dir.partial.glob("joined-rank*")):
        run_dir.remove_partial()


class Beats:
    """Which ranks show signs of life in the store.

    Args:
        store: The store, which may be lost, or hang.
        silent_seconds: How long a rank that lives may show none.
    """

    def __init__(self, store: AskedStore, silent_seconds: float) -> None:
        self._store, self._silent_seconds = store, silent_seconds
        self._seen: dict[int, tuple[int | None, int]] = {}
        self._over = threading.Event()

    def start(self, rank: int) -> None:
        """Beat for this rank until `close`."""

        def beat() -> None:
            while not self._over.is_set():
                with suppress(RuntimeError):
                    self._store.ask(lambda store: store.add(f"beat{rank}", 1))
                self._over.wait(_BEAT_SECONDS)

        # The first question starts the thread that asks: never from two threads at once.
        self._store.begin(lambda store: None)
        threading.Thread(target=beat, name="gossipgrad-beats", daemon=True).start()

    def close(self) -> None:
        """Beat no more."""
        self._over.set()

    def is_silent(self, rank: int) -> bool:
        """Whether a rank has not beaten for too long; to be asked every 0.1 s while waiting.

        If the store is lost, whether that has lasted for half an hour.
        """
        beat, limit_seconds = None, _BLIND_SECONDS
        with suppress(RuntimeError):
            beat = self._store.ask(lambda store: store.add(f"beat{rank}", 0))
            limit_seconds = self._silent_seconds
        before, looks = self._seen.get(rank, (None, 0))
        # Looks are counted, not seconds: this process may have been stopped.
        looks = looks + 1 if beat == before else 0
        self._seen[rank] = beat, looks
        return looks * _POLL_SECONDS > limit_seconds


class Ending:
    """What one rank does at the end of the run; it beats from when this is made until `close`.

    Args:
        config: The options, resolved.
        run_dir: The folder, the same for all ranks.
        store: The store, which may be lost, or hang; with prefix `MAILBOX`.
        rank: This rank.
    """

    def __init__(self, config: TrainConfig, run_dir: RunDir, store: dist.Store, rank: int) -> None:
        assert config.nproc is not None, "resolve the configuration first"
        self._config, self._founders = config, range(config.nproc)
        self._run_dir, self._rank = run_dir, rank
        self._store = AskedStore(store, timeout_seconds=_STORE_SECONDS)
        self._beats = Beats(self._store, config.lost_after_seconds)
        self._beats.start(rank)

    def close(self) -> None:
        """Beat no more; the others take this rank for dead if they still wait for it."""
        self._beats.close()

    def hand_in(self, content: HandedIn) -> None:
        """Leave what this rank has to say for the one that puts the run together."""
        self._own = content
        hand_in(self._run_dir, self._store, self._rank, content)

    def finish(self) -> Outcome | None:
        """Put the run together if this is the lowest rank that lives; None once another has.

        Called when this rank has handed in its result. All others that live are awaited: those that
        are not lost by the membership, and beat in the store or have handed in.

        Raises:
            RunFailedError: The rank that put the run together died over it.
        """
        result = self._own["result"]
        ranks = {*self._founders, *map(int, result["joined"]), self._rank}
        while not self._is_over():
            first = next(rank for rank in sorted(ranks) if not self._is_lost(rank, result["lost"]))
            if first == self._rank:
                if (owner := self._claim()) == self._rank:
                    return self._put_together()
                if self._is_lost(owner, result["lost"]):
                    raise RunFailedError(
                        f"rank {owner} was lost while it put the run together: "
                        f"{where_weights_are(self._run_dir)}"
                    )
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
        return str(rank) in known or self._beats.is_silent(rank)

    def _claim(self) -> int:
        """Which rank puts the run together: this one unless another has begun to.

        If the store is lost nobody else is at it who is not in `RankResult.lost`.
        """
        own = str(self._rank)
        with suppress(RuntimeError):
            return int(self._store.ask(lambda store: store.compare_set("end", "", own)))
        return self._rank

    def _put_together(self) -> Outcome:
        ends = {self._rank: self._own}
        for rank in {*self._founders} - {self._rank}:
            ends[rank] = self._await_end(rank, ends)
        for rank in known_joined(_results(ends).values()).keys() - ends.keys():
            ends[rank] = self._await_end(rank, ends)
        run_dir, results = self._run_dir, _results(ends)
        signals = [end["stopped_by"] for end in ends.values() if end.get("stopped_by")]
        stopped_by = signal.Signals(signals[0]) if signals else None
        exported = choose_exported(
            {rank: one for rank, one in results.items() if run_dir.rank_model(rank).exists()}
        )
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
            # The others may see it nowhere else yet, and the store may go with this process.
            time.sleep(3 * _POLL_SECONDS * (len(self._founders) > 1))
        return Outcome(
            exit_code=exit_code_of(stopped_by if summary["interrupted"] else None),
            run_dir=run_dir.path,
            summary=summary,
            report=report,
        )

    def _await_end(self, rank: int, ends: Mapping[int, HandedIn]) -> HandedIn:
        """What a rank hands in, or why it does not; waits for one that lives."""
        known = {key: loss for one in _results(ends).values() for key, loss in one.lost.items()}
        while (end := read_end(self._run_dir, self._store, rank)) is None:
            if (loss := known.get(str(rank))) is not None:
                return {"cause": f"was taken for dead: {loss['why']}"}
            if self._beats.is_silent(rank):
                return {"cause": "has handed nothing in, and shows no sign of life"}
            time.sleep(_POLL_SECONDS)
        return end


def _results(ends: Mapping[int, HandedIn]) -> dict[int, RankResult]:
    return {r: RankResult.from_json(end["result"]) for r, end in ends.items() if "result" in end}
