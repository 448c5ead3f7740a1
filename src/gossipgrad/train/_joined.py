"""Ranks that joined a run under way: awaiting them at its end, and telling of them."""

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from ._invitation import withdraw
from ._layout import RunDir
from ._losses import last_step
from ._result import RankResult

_POLL_SECONDS = 0.1
# They show signs of life twice a second; a busy machine may be late with them.
_SILENT_SECONDS = 15.0
# They end with the others, but may be alone with an evaluation.
_END_SECONDS = 120.0

# As `Ending.hand_in` leaves it: a "result", or the "cause" why there is none.
HandedIn = Mapping[str, Any]


def known_joined(results: Iterable[RankResult]) -> dict[int, dict[str, Any]]:
    """Who has joined, by what the ranks know."""
    told = {int(rank): how for result in results for rank, how in result.joined.items()}
    return dict(sorted(told.items()))


def known_lost(results: Iterable[RankResult]) -> dict[int, str]:
    """Who was taken for dead and why, by what the ranks know."""
    return {int(rank): loss["why"] for result in results for rank, loss in result.lost.items()}


def taken_for_dead(why: str) -> str:
    """Of a rank in `known_lost`, in words that begin with the rank."""
    return f"was taken for dead: {why}"


def collect_joined(
    run_dir: RunDir,
    results: Mapping[int, RankResult],
    *,
    read: Callable[[int], HandedIn | None],
    hurry: Callable[[], bool] = lambda: False,
) -> tuple[dict[int, RankResult], dict[int, str]]:
    """What those who joined handed in, and why some did not; waits for a while.

    One that was taken for dead is not awaited, nor one that shows no sign of life for 15 seconds;
    nor anybody any more after two minutes, unless they alone are left.

    Args:
        run_dir: Where they show signs of life.
        results: Of ranks that are known to have come to their end: those are not awaited.
        read: Gives what a rank has handed in.
        hurry: Whether to wait no longer; asked in between.
    """
    began = time.monotonic()
    found: dict[int, RankResult] = {}
    lost: dict[int, str] = {}
    dead = known_lost(results.values())
    for rank in sorted({*known_joined(results.values()), *_came(run_dir)} - {*results}):
        while (content := read(rank)) is None and rank not in dead and not hurry():
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
            lost[rank] = nothing if why is None else taken_for_dead(why)
        elif "result" in content:
            found[rank] = RankResult.from_json(content["result"])
        else:
            lost[rank] = content["cause"]
    return found, lost


def let_go(run_dir: RunDir) -> None:
    """Remove what was to be put together of a run that failed, unless some who joined go on."""
    now = folder_seconds(run_dir)
    if any(now - _last_sign_seconds(run_dir, rank) < _SILENT_SECONDS for rank in _came(run_dir)):
        withdraw(run_dir)
    else:
        run_dir.remove_partial()


def some_go_on(run_dir: RunDir, results: Mapping[int, RankResult], lost: Iterable[int]) -> bool:
    """Whether ranks that joined may train on, beside those that came to their end or are lost."""
    now = folder_seconds(run_dir)
    return any(
        read_file(run_dir, rank) is None
        and now - _last_sign_seconds(run_dir, rank) < _SILENT_SECONDS
        for rank in {*_came(run_dir)} - {*results} - {*lost}
    )


def living_joiner(run_dir: RunDir) -> int | None:
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


def tell_joined(results: Mapping[int, RankResult], run_dir: RunDir | None) -> list[dict[str, Any]]:
    """For each rank that joined: when, from whom, what it did, and how it ended.

    What a lost one did is read from its metrics, and known to the last line that it wrote.
    """
    return [
        {
            "rank": rank,
            "when_seconds": how["when_seconds"],
            "from_rank": how["from_rank"],
            "generation": how["generation"],
            **_part_of(rank, results.get(rank), run_dir),
        }
        for rank, how in known_joined(results.values()).items()
    ]


def _part_of(rank: int, result: RankResult | None, run_dir: RunDir | None) -> dict[str, Any]:
    if result is not None:
        end = "left" if result.left else "finished"
        return {"steps": result.steps, "samples": result.samples, "end": end}
    if run_dir is None:
        return {"steps": 0, "samples": 0, "end": "lost"}
    last = last_step(run_dir, rank)
    begun = last.get("step", 0)
    with suppress(KeyError, OSError, ValueError):
        begun = json.loads(run_dir.rank_joined(rank).read_text())["step"]
    steps = max(0, last.get("step", 0) - begun)
    return {"steps": steps, "samples": last.get("samples", 0), "end": "lost"}


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
