"""A rank of a given world, of which one kills itself in the middle of a run."""

import contextlib
import io
import os
import signal
import threading
from pathlib import Path
from typing import Any

from gossipgrad.train import GossipConfig, TrainConfig, run
from support.waiting import until

__all__ = ["train_with_a_death"]


def train_with_a_death(
    rank: int, store: Any, environs: list[dict[str, str]], out: str, victim: int
) -> tuple[int, dict | None, str]:
    """Trains; `victim` is killed after a few steps.

    The environment of each rank says in which world it is. The exit code, the summary if this rank
    put the run together, and what it said on stderr.
    """
    os.environ |= {**environs[rank], "GLOO_SOCKET_IFNAME": "lo"}
    if rank == victim:
        metrics = Path(out) / f"metrics-rank{rank}.jsonl"

        def die() -> None:
            until(lambda: metrics.exists() and metrics.read_text().count("\n") > 20, 80)
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=die, daemon=True).start()
    told = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(told):
        outcome = run(
            TrainConfig(
                epochs=4,
                log_every=1,
                trace=0,
                out=Path(out),
                gossip=GossipConfig(topology="matching"),
            )
        )
    return outcome.exit_code, outcome.summary, told.getvalue()
