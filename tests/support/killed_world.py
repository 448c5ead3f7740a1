"""A rank of a given world, of which one kills itself in the middle of a run."""

import contextlib
import io
import os
import signal
import threading
from pathlib import Path
from typing import Any

import torch.distributed as dist

from gossipgrad.train import GossipConfig, TrainConfig, run
from support.waiting import until

__all__ = ["train_with_a_death"]


def train_with_a_death(
    rank: int, store: Any, world_size: int, port: int, out: str, victim: int
) -> tuple[int, dict | None]:
    """Trains; `victim` is killed after a few steps. The exit code, and the summary if this rank
    put the run together."""
    dist.destroy_process_group()
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # it is hosted by no rank
        "GLOO_SOCKET_IFNAME": "lo",
    }
    if rank == victim:
        metrics = Path(out) / f"metrics-rank{rank}.jsonl"

        def die() -> None:
            until(lambda: metrics.exists() and metrics.read_text().count("\n") > 20, 80)
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=die, daemon=True).start()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        outcome = run(
            TrainConfig(
                epochs=4,
                log_every=1,
                trace=0,
                out=Path(out),
                gossip=GossipConfig(topology="matching"),
            )
        )
    return outcome.exit_code, outcome.summary
