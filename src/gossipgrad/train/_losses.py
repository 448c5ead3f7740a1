"""What became of ranks that were lost, and what of the data went with them."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ._config import TrainConfig
from ._layout import RunDir
from ._result import RankResult
from ._shares import tell_shares, what_was_dealt_anew


def tell_losses(
    config: TrainConfig,
    results: Mapping[int, RankResult],
    lost: Mapping[int, str],
    run_dir: RunDir | None,
    when_seconds: Mapping[int, float],
) -> dict[str, dict[str, Any]]:
    """For each lost rank how far it came, and which samples nobody trained on because of it.

    How far it came is read from its metrics, and known to the last line that it wrote. When it was
    lost is told by the others, by whose membership it was, or by `when_seconds`, of who saw it go.
    Where samples are dealt anew, those that nobody trained on are of all lost ranks together.
    """
    steps = max((result.steps for result in results.values()), default=0)
    ranks = list(results.values())
    each = max((r.samples / r.steps for r in ranks if r.steps), default=0.0)
    shares = tell_shares(ranks)
    told: dict[str, dict[str, Any]] = {}
    for rank in sorted(lost):
        last = {} if run_dir is None else last_step(run_dir, rank)
        known = [r.lost[str(rank)] for r in ranks if str(rank) in r.lost]
        unseen = (
            round(max(0, steps - last.get("step", 0)) * each)
            if shares is None
            else shares["samples_left"]
        )
        told[str(rank)] = {
            "because": lost[rank],
            "step": last.get("step", 0),
            "epoch": last.get("epoch", 0),
            "seconds": last.get("seconds", 0.0),
            "when_seconds": (known[0]["when_seconds"] if known else None) or when_seconds.get(rank),
            "generation": known[0]["generation"] if known else None,
            "samples_not_seen": unseen,
            "data": _data(config, ranks, unseen, lost, shares),
        }
    return told


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
        return what_was_dealt_anew(shares)
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


def stands_for_most(results: Mapping[int, RankResult]) -> RankResult:
    """Whose model to export: a consensus if there is one, of the lowest rank that has it."""
    return min(results.values(), key=lambda result: (not result.is_consensus, result.rank))
