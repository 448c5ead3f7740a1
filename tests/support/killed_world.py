"""A rank of a given world, of which one kills itself in the middle of a run."""

import contextlib
import io
import os
import signal
from pathlib import Path
from typing import Any

from gossipgrad.train import GossipConfig, TrainConfig, run
from support.alone import each_step

__all__ = ["train_with_a_death"]


def train_with_a_death(
    rank: int, store: Any, environs: list[dict[str, str]], out: str, victim: int
) -> tuple[int, dict | None, str]:
    """Trains; `victim` is killed after a few steps.

    The environment of each rank says in which world it is. The exit code, the summary if this rank
    put the run together, and what it said on stderr.
    """
    os.environ |= {**environs[rank], "GLOO_SOCKET_IFNAME": "lo"}

    def die(step: int) -> None:
        if rank == victim and step > 20:
            os.kill(os.getpid(), signal.SIGKILL)

    told, options = io.StringIO(), {"gossip": GossipConfig(topology="matching")}
    with (
        each_step(die),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(told),
    ):
        outcome = run(TrainConfig(epochs=4, log_every=1, trace=0, out=Path(out), options=options))
    return outcome.exit_code, outcome.summary, told.getvalue()
