"""A rank of a given world that trains until somebody has joined, and is then told to stop."""

import contextlib
import io
import os
import signal
import threading
from pathlib import Path
from typing import Any

from gossipgrad.train import TrainConfig, run
from support.launched import count
from support.waiting import until

__all__ = ["train_until_joined"]


def train_until_joined(
    rank: int, store: Any, environs: list[dict[str, str]], out: str
) -> tuple[int, dict | None]:
    """Trains; the exit code, and the summary if this rank put the run together."""
    # Blocked in a fork server that a launch of workers has started, and so in what it forks.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    os.environ |= {**environs[rank], "GLOO_SOCKET_IFNAME": "lo"}

    def tell() -> None:
        until(lambda: count(Path(out), 2) > 8)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=tell, daemon=True).start()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        outcome = run(TrainConfig(epochs=10_000, log_every=1, trace=0, out=Path(out)))
    return outcome.exit_code, outcome.summary
