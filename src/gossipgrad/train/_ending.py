"""The end of a run: each rank hands in, and one of those that live puts it together."""

import contextlib
import fcntl
import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch.distributed as dist

from gossipgrad.comm import AskedStore, Loss

from ._config import TrainConfig
from ._invitation import withdraw
from ._layout import RunDir
from ._result import Outcome, RankResult, RunFailedError, exit_code_of
from ._summary import choose_exported, compose, finish, known_joined

# As `Ending.hand_in` leaves it: a "result", or the "cause" why there is none.
HandedIn = Mapping[str, Any]
# Prefix of what the ranks of a run write into the store.
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
                with summary_lock(self._run_dir) as mine:
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
                lost[rank] = nothing if why is None else lost_cause(why)
            elif "result" in content:
                results[rank] = RankResult.from_json(content["result"])
            else:
                lost[rank] = content["cause"]
                self.when_seconds[rank] = content["when_seconds"]
        joined, missing = collect_joined(self._run_dir, results, read=self._read)
        return results | joined, lost | missing

    def put_together(self, config: TrainConfig, stopped_by: signal.Signals | None) -> Outcome:
        """Put the run together, once the others have handed in, and tell them."""
        results, lost = self.collect()
        outcome = put_together(
            config,
            self._run_dir,
            results,
            lost,
            stopped_by=stopped_by,
            when_seconds=self.when_seconds,
        )
        self.done()
        return outcome

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


# They show signs of life twice a second; a busy machine may be late with them.
_SILENT_SECONDS = 15.0
# They end with the others, but may be alone with an evaluation.
_END_SECONDS = 120.0


def known_lost(results: Iterable[RankResult]) -> dict[int, str]:
    """Who was taken for dead and why, by what the ranks know."""
    return {int(rank): loss["why"] for result in results for rank, loss in result.lost.items()}


def lost_cause(why: str) -> str:
    """Of a rank in `known_lost`, in words that begin with the rank."""
    return f"was taken for dead: {why}"


def collect_joined(
    run_dir: RunDir,
    results: Mapping[int, RankResult],
    *,
    read: Callable[[int], HandedIn | None],
) -> tuple[dict[int, RankResult], dict[int, str]]:
    """What those who joined handed in, and why some did not; waits for a while.

    One that was taken for dead is not awaited, nor one that shows no sign of life for 15 seconds;
    nor any rank after two minutes, unless joined ranks alone are left.

    Args:
        run_dir: Where they show signs of life.
        results: Of ranks that have ended: those are not awaited.
        read: Gives what a rank has handed in.
    """
    began = time.monotonic()
    found: dict[int, RankResult] = {}
    lost: dict[int, str] = {}
    dead = known_lost(results.values())
    for rank in sorted({*known_joined(results.values()), *_came(run_dir)} - {*results}):
        while (content := read(rank)) is None and rank not in dead:
            waited_seconds = time.monotonic() - began
            silent_seconds = folder_seconds(run_dir) - _last_sign_seconds(run_dir, rank)
            if min(waited_seconds, silent_seconds) > _SILENT_SECONDS:
                break
            if results and waited_seconds > _END_SECONDS:
                break
            time.sleep(_POLL_SECONDS)
        if content is None:
            why = dead.get(rank)
            nothing = "had handed nothing in by the end of the run"
            lost[rank] = nothing if why is None else lost_cause(why)
        elif "result" in content:
            found[rank] = RankResult.from_json(content["result"])
        else:
            lost[rank] = content["cause"]
    return found, lost


def clean_up(run_dir: RunDir) -> None:
    """Remove what was to be put together of a run that failed, unless some who joined go on."""
    now = folder_seconds(run_dir)
    if any(now - _last_sign_seconds(run_dir, rank) < _SILENT_SECONDS for rank in _came(run_dir)):
        withdraw(run_dir)
    else:
        run_dir.remove_partial()


def has_living_joiners(
    run_dir: RunDir, results: Mapping[int, RankResult], lost: Iterable[int]
) -> bool:
    """Whether ranks that joined may train on, beside those that have ended or are lost."""
    now = folder_seconds(run_dir)
    return any(
        read_file(run_dir, rank) is None
        and now - _last_sign_seconds(run_dir, rank) < _SILENT_SECONDS
        for rank in {*_came(run_dir)} - {*results} - {*lost}
    )


def find_living_joiner(run_dir: RunDir) -> int | None:
    """A rank that joined and shows a sign of life now.

    Where the last one is less than 15 seconds old, the next one is awaited until it were.
    """
    seen = {rank: _last_sign_seconds(run_dir, rank) for rank in _came(run_dir)}
    newest_seconds = max(seen.values(), default=0.0)
    deadline = time.monotonic() + _SILENT_SECONDS
    while seen and time.monotonic() < deadline:
        if folder_seconds(run_dir) - newest_seconds >= _SILENT_SECONDS:
            break
        for rank, sign_seconds in seen.items():
            if _last_sign_seconds(run_dir, rank) > sign_seconds:
                return rank
        time.sleep(_POLL_SECONDS)
    return None


def read_file(run_dir: RunDir, rank: int) -> HandedIn | None:
    """What a rank has left in the folder of the run."""
    with suppress(OSError, ValueError):
        return json.loads(run_dir.rank_result(rank).read_text())
    return None


def _came(run_dir: RunDir) -> list[int]:
    """Who has joined, by the files of their signs of life."""
    names = (path.stem for path in run_dir.partial.glob("joined-rank*.json"))
    return [int(name.removeprefix("joined-rank")) for name in names]


def folder_seconds(run_dir: RunDir) -> float:
    """Now, by the clock that dates files there: those of machines need not agree with it."""
    with suppress(OSError):
        os.utime(run_dir.partial)
        return run_dir.partial.stat().st_mtime
    return time.time()


def _last_sign_seconds(run_dir: RunDir, rank: int) -> float:
    with suppress(OSError):
        return run_dir.rank_joined(rank).stat().st_mtime
    return 0.0


@contextmanager
def summary_lock(run_dir: RunDir) -> Iterator[bool]:
    """Tries to hold the lock inside; gives whether it does. Does not wait.

    On a file system without locks a file stands for it, which one who is killed leaves behind:
    nobody else puts the run together then.
    """
    try:
        file = (run_dir.partial / "lock").open("w")
    except OSError:
        yield False
        return
    with file:
        is_held, has_locks = False, True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_held = True
        except BlockingIOError:
            pass
        except OSError:
            has_locks = False
            with suppress(OSError):
                (run_dir.partial / "taken").touch(exist_ok=False)
                is_held = True
        try:
            yield is_held
        finally:
            if is_held and not has_locks:
                (run_dir.partial / "taken").unlink(missing_ok=True)


def put_together_orphan(
    config: TrainConfig, run_dir: RunDir, results: Mapping[int, RankResult]
) -> dict[str, Any] | None:
    """The summary of a run that nobody else puts together: all ranks of its start are lost.

    None if they are not, or somebody is at it, or those here have left it and others go on.

    Args:
        config: The options, resolved.
        run_dir: The folder of the run.
        results: Of the ranks that joined here and reached their end.
    """
    assert config.nproc is not None, "resolve the configuration first"
    lost = known_lost(results.values())
    founders = range(config.nproc)
    if not set(founders) <= set(lost):
        return None
    if all(one.left for one in results.values()) and has_living_joiners(run_dir, results, lost):
        return None
    with summary_lock(run_dir) as mine:
        if not mine:
            return None
        others, missing = collect_joined(run_dir, results, read=partial(read_file, run_dir))
        every = {**results, **others}
        why = {rank: lost_cause(lost[rank]) for rank in founders}
        return put_together(config, run_dir, every, {**why, **missing}).summary


def put_together(
    config: TrainConfig,
    run_dir: RunDir,
    results: Mapping[int, RankResult],
    lost: Mapping[int, str],
    *,
    stopped_by: signal.Signals | None = None,
    when_seconds: Mapping[int, float] | None = None,
) -> Outcome:
    """Write the model, the summary and the report of a run; arguments as those of `compose`."""
    assert config.nproc is not None, "resolve the configuration first"
    exported = choose_exported(
        {rank: one for rank, one in results.items() if run_dir.rank_model(rank).exists()}
    )
    summary = compose(
        config,
        results,
        lost,
        world_size=config.nproc,
        exported=exported,
        stopped_by=stopped_by,
        run_dir=run_dir,
        when_seconds=when_seconds,
    )
    return Outcome(
        report=finish(run_dir, summary, exported),
        exit_code=exit_code_of(stopped_by if summary["interrupted"] else None),
        run_dir=run_dir.path,
        summary=summary,
    )
