"""What became of the samples of ranks that came or went, where they are dealt anew."""

from collections.abc import Mapping, Sequence
from typing import Any

from gossipgrad.data import ElasticStats

from ._result import RankResult

_SUMMED = (
    *("samples_dealt_anew", "samples_used_twice_at_most", "samples_untold"),
    *("store_requests", "exposed_seconds"),
)
_SEEN_BY_ALL = ("samples_left", "disturbed_epochs")


def tell_shares(ranks: Sequence[RankResult]) -> dict[str, Any] | None:
    """Figures of all ranks together, for the summary; None where nothing is dealt anew."""
    told = [rank.shares for rank in ranks if rank.shares is not None]
    if not told:
        return None
    return {
        **{name: sum(one[name] for one in told) for name in _SUMMED},
        **{name: max(one[name] for one in told) for name in _SEEN_BY_ALL},
    }


def what_was_dealt_anew(shares: Mapping[str, Any]) -> str:
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
