"""What became of ranks that were lost or joined, of the data, and of the store."""

import json
import logging
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from gossipgrad.comm import MemberWatch
from gossipgrad.data import ElasticBatches, ElasticStats

from ._config import TrainConfig
from ._layout import RunDir
from ._result import RankResult


def summarize_losses(
    config: TrainConfig,
    results: Mapping[int, RankResult],
    lost: Mapping[int, str],
    run_dir: RunDir | None,
    when_seconds: Mapping[int, float],
) -> dict[str, dict[str, Any]]:
    """For each lost rank how far it came, and which samples nobody trained on because of it.

    How far it came is read from its metrics, and known to the last line that it wrote. When it was
    lost is known from the membership of the others, or from `when_seconds`.
    Where samples are dealt anew, those that nobody trained on are of all lost ranks together.
    """
    steps = max((result.steps for result in results.values()), default=0)
    ranks = list(results.values())
    each = max((r.samples / r.steps for r in ranks if r.steps), default=0.0)
    shares = summarize_shares(ranks)
    losses: dict[str, dict[str, Any]] = {}
    for rank in sorted(lost):
        last = {} if run_dir is None else last_step(run_dir, rank)
        known = [r.lost[str(rank)] for r in ranks if str(rank) in r.lost]
        unseen = (
            round(max(0, steps - last.get("step", 0)) * each)
            if shares is None
            else shares["samples_left"]
        )
        losses[str(rank)] = {
            "because": lost[rank],
            "step": last.get("step", 0),
            "epoch": last.get("epoch", 0),
            "seconds": last.get("seconds", 0.0),
            "when_seconds": (known[0]["when_seconds"] if known else None) or when_seconds.get(rank),
            "generation": known[0]["generation"] if known else None,
            "samples_not_seen": unseen,
            "data": _data(config, ranks, unseen, lost, shares),
        }
    return losses


def _data(
    config: TrainConfig,
    ranks: Sequence[RankResult],
    unseen: int,
    lost: Collection[int],
    shares: Mapping[str, Any] | None,
) -> str:
    if config.shuffle == "local":
        return (
            f"its shard was trained on by nobody after that ({unseen:,} samples, counted in each "
            "epoch)"
        )
    if config.shuffle == "ring":
        dealt = max((r.shuffle_rows_dealt for r in ranks), default=0) * (len(ranks) + len(lost))
        missing = max(0, dealt - sum(r.shuffle_rows_held for r in ranks))
        return (
            f"the rows that it alone held: of {dealt:,} samples {missing:,} are gone with the lost "
            "ranks, all together"
        )
    if shares is not None:
        return describe_shares(shares)
    return (
        f"its share of each epoch that was left ({unseen:,} samples); shares are drawn anew each "
        "epoch, so the others saw them in other epochs"
    )


def last_step(run_dir: RunDir, rank: int) -> dict[str, Any]:
    """The last step in the metrics of a rank; a line that it could not finish does not count."""
    last: dict[str, Any] = {}
    try:
        lines = run_dir.metrics(rank).read_text().splitlines()
    except OSError:
        return last
    for line in reversed(lines):
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if event.get("event") == "step":
            return event
    return last


def known_joined(results: Iterable[RankResult]) -> dict[int, dict[str, Any]]:
    """Who has joined, by what the ranks know."""
    joined = {int(rank): how for result in results for rank, how in result.joined.items()}
    return dict(sorted(joined.items()))


def summarize_joined(
    results: Mapping[int, RankResult], run_dir: RunDir | None
) -> list[dict[str, Any]]:
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


def choose_exported(results: Mapping[int, RankResult]) -> RankResult:
    """Whose model to export: a consensus if there is one, of the lowest rank that has it."""
    return min(results.values(), key=lambda result: (not result.is_consensus, result.rank))


_SUMMED = (
    *("samples_dealt_anew", "samples_used_twice_at_most", "samples_untold"),
    *("store_requests", "exposed_seconds"),
)
_SEEN_BY_ALL = ("samples_left", "disturbed_epochs")


def summarize_shares(ranks: Sequence[RankResult]) -> dict[str, Any] | None:
    """Figures of all ranks together, for the summary; None where nothing is dealt anew."""
    shares = [rank.shares for rank in ranks if rank.shares is not None]
    if not shares:
        return None
    return {
        **{name: sum(one[name] for one in shares) for name in _SUMMED},
        **{name: max(one[name] for one in shares) for name in _SEEN_BY_ALL},
    }


def describe_shares(shares: Mapping[str, Any]) -> str:
    """Of all lost ranks together, in words."""
    text = (
        "what was left of its share of an epoch was dealt anew among the others, and it had none "
        "in the next; of all lost ranks together, "
        f"{shares['samples_used_twice_at_most']:,} samples at most were used twice"
    )
    if shares["samples_left"]:
        text += f", and {shares['samples_left']:,} of the last epoch by nobody"
    return text


def notes_on_shares(shares: ElasticStats | None) -> list[str]:
    """What the user should know of them."""
    if shares is None or not shares.samples_untold or not shares.disturbed_epochs:
        return []
    return [
        "the rendezvous store did not answer while ranks came or went: of "
        f"{shares.samples_untold:,} samples some may have been used twice, and others not at all"
    ]


_SHARES = ElasticBatches.__module__

# Since when, until when if it came back, in seconds since 1970, and why.
StoreLoss = dict[str, Any]


@contextmanager
def record_store_losses() -> Iterator[list[StoreLoss]]:
    """Hears, inside, when the store was lost, and notes each time.

    What it meant for the samples is in the summary alone.
    """
    losses: list[StoreLoss] = []

    def hear(record: logging.LogRecord) -> bool:
        if hasattr(record, "store_lost"):
            why = record.store_lost
            if why is not None:
                losses.append({"since_seconds": record.created, "until_seconds": None, "why": why})
            elif losses:
                losses[-1]["until_seconds"] = record.created
        return True

    def told_already(record: logging.LogRecord) -> bool:
        return not hasattr(record, "store_silent")

    watch, shares = logging.getLogger(MemberWatch.__module__), logging.getLogger(_SHARES)
    watch.addFilter(hear)
    shares.addFilter(told_already)
    try:
        yield losses
    finally:
        watch.removeFilter(hear)
        shares.removeFilter(told_already)


def notes_on_store(losses: Collection[StoreLoss]) -> tuple[str, ...]:
    """A note on each time that the store was lost."""
    return tuple(_describe_store_loss(loss) for loss in losses)


def _describe_store_loss(loss: StoreLoss) -> str:
    text = f"{loss['why']}, at {_clock(loss['since_seconds'])}"
    if loss["until_seconds"] is None:
        return f"{text}: nobody can be given up from then on"
    until = _clock(loss["until_seconds"])
    return f"{text}; until it answered again, at {until}, nobody could be given up"


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))
