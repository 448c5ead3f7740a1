"""What the membership says of the rendezvous store, kept for the user."""

import logging
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from gossipgrad.comm import MemberWatch
from gossipgrad.data import ElasticBatches

_SHARES = f"{ElasticBatches.__module__}_dealer"

# Since when, until when if it came back, in seconds since 1970, and why.
StoreLoss = dict[str, Any]


@contextmanager
def store_news() -> Iterator[list[StoreLoss]]:
    """Hears, inside, when the store was lost, and notes each time.

    That samples are dealt without it is not told beside that: the summary says what came of it.
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
    return tuple(_tell(loss) for loss in losses)


def _tell(loss: StoreLoss) -> str:
    told = f"{loss['why']}, at {_clock(loss['since_seconds'])}"
    if loss["until_seconds"] is None:
        return f"{told}: nobody can be given up from then on"
    until = _clock(loss["until_seconds"])
    return f"{told}; until it answered again, at {until}, nobody could be given up"


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))
