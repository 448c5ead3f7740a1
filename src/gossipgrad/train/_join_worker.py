"""A worker process that joins a run: loads what it needs, comes in, trains, hands in."""

import os
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ._config import TrainConfig
from ._ending import Ending
from ._invitation import Invitation, fingerprint_of
from ._layout import RunDir
from ._metrics import Event
from ._newcomer import Newcomer
from ._rank import train_rank
from ._result import RankResult
from ._serving import serve, short_cause
from ._tasks import load_job
from ._worker import LOOPBACK


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinSpec:
    """What a worker that joins is told."""

    config: TrainConfig
    run_dir: RunDir
    invitation: Invitation
    number: int
    """Which of those that are started together."""


def join_main(spec: JoinSpec, pipe: Connection) -> None:
    """Body of a worker process that joins a run.

    See `serve` for what goes over `pipe`; the word to stop means to leave the run.
    """
    came: dict[str, int] = {}

    def work(stop: threading.Event, emit: Callable[[Event], None]) -> RankResult:
        def heard(event: Event) -> None:
            if event["event"] == "joined":
                came["rank"] = event["rank"]
            emit(event)

        config, run_dir, invitation = spec.config, spec.run_dir, spec.invitation
        if invitation.store is not None and invitation.store[0] == LOOPBACK:
            # As the run's own workers do, whose collectives this one takes part in.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        job = load_job(config)
        if fingerprint_of(job) != invitation.data:
            what = f"job {config.job}" if config.job else f"data set {config.data}"
            raise ValueError(
                f"the {what} is another here than where the run was started: its model, or the "
                "number or the labels of its samples. Put the same here; --data-dir names another "
                "folder of data sets."
            )
        assert invitation.address is not None
        assert config.nproc is not None
        with closing(Newcomer(invitation.address, run_dir, stop=stop, emit=heard)) as newcomer:
            try:
                result = train_rank(
                    config,
                    job,
                    run_dir,
                    rank=spec.number,
                    world_size=config.nproc,
                    stop=stop,
                    emit=heard,
                    newcomer=newcomer,
                )
            except Exception as error:
                hand_in(newcomer, {"cause": f"failed: {short_cause(error)}"})
                raise
            hand_in(newcomer, {"result": result.to_json()})
            return result

    def hand_in(newcomer: Newcomer, content: dict[str, Any]) -> None:
        if newcomer.mailbox is not None:
            assert spec.config.nproc is not None
            ending = Ending(spec.run_dir, newcomer.mailbox, came["rank"], spec.config.nproc)
            ending.hand_in(content)

    def errors() -> Path:
        return spec.run_dir.errors(came["rank"]) if came else spec.run_dir.join_errors(os.getpid())

    serve(pipe, work, errors=errors, quiet=spec.number != 0)
