"""A rank of a given world, as torchrun starts one, that is told to stop by a signal of its own."""

import contextlib
import io
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from gossipgrad.train import TrainConfig, _start, run
from gossipgrad.train.strategies import _stopping
from support.waiting import HANG_SECONDS, NEVER_SECONDS, until

__all__ = ["refused", "stopped_by_signal", "waits_alone"]


def refused(rank: int, store: Any, port: int, out: str) -> str:
    """Takes part in a run that rank 0, which hosts the store, refuses; how this rank ends."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "3", "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    _start._SEEN_SECONDS = HANG_SECONDS  # however late the others come
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            outcome = run(TrainConfig(model="lenet", out=Path(out)))
        except Exception as error:
            if rank == 0:
                os._exit(2)  # and with it the store
            return f"{type(error).__name__}: {error}"
    return f"exit code {outcome.exit_code}"


def waits_alone(environ: dict[str, str], folder: str) -> None:
    """Begins a run whose other rank does not come; what it says goes to a file."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    os.environ |= environ
    with (Path(folder) / "errors").open("w") as errors, contextlib.redirect_stderr(errors):
        run(TrainConfig(out=Path(folder) / "run"))


def stopped_by_signal(
    rank: int, store: Any, port: int, out: str, strategy: str, first: int, skew_seconds: float
) -> tuple[int, dict | None]:
    """Trains until rank `first` gets a SIGINT, and the other one its own a little later.

    The exit code, and the summary on rank 0.
    """
    # Blocked in a fork server that a launch of workers has started, and so in what it forks.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    # None leaves without the other, nor waits for as long as one that is told alone.
    _stopping._GRACE_SECONDS = NEVER_SECONDS

    def tell() -> None:
        metrics = Path(out) / "metrics-rank1.jsonl"
        until(lambda: metrics.exists() and metrics.stat().st_size > 0)
        if rank != first:
            time.sleep(skew_seconds)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=tell, daemon=True).start()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        outcome = run(
            TrainConfig(strategy=strategy, epochs=3000, log_every=1, trace=0, out=Path(out))
        )
    return outcome.exit_code, outcome.summary
