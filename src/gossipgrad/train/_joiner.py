"""A rank that joined a run: how it enters, when it stops, and whether it leaves before."""

import contextlib
import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

import gossipgrad as gg
from gossipgrad.data import ElasticBatches

from ._ending import MAILBOX
from ._folder import RunDir
from ._invitation import root_of
from ._metrics import Event
from ._state import LoopState
from .strategies import RunningStrategy, StopFlag

_JOIN_SECONDS = 300.0
_POLL_SECONDS = 0.5
_ASK_SECONDS = 0.1


class RunJoiner:
    """Joins a run, and stops with it, or leaves it before.

    While it trains it polls whether the run stops.
    """

    def __init__(
        self,
        address: str,
        run_dir: RunDir,
        *,
        stop: threading.Event,
        emit: Callable[[Event], None],
    ) -> None:
        self._address, self._run_dir = address, run_dir
        self._stop, self._emit = stop, emit
        self.begun_step = 0
        self.rank: int | None = None
        self.mailbox: dist.Store | None = None
        self.carried: dict[str, Any] = {}
        self._batches: ElasticBatches | None = None
        self._run_stops = False
        self._asked_seconds = -math.inf
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def leaves(self) -> bool:
        """Whether this worker is to stop, and the run is not."""
        return self._stop.is_set() and not self._run_stops

    @property
    def is_over(self) -> bool:
        """Whether the run was put together already, without this worker."""
        return self._run_dir.summary.exists()

    def enter(
        self, model: nn.Module, optimizers: Sequence[Optimizer], settings: Mapping[str, Any]
    ) -> gg.GossipSession:
        """Join; model and optimizers are then those of a living rank, but for the initial rates."""
        rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
        session = gg.join(
            model, optimizers, self._address, **settings, timeout_seconds=_JOIN_SECONDS
        )
        for optimizer, initial in zip(optimizers, rates, strict=True):
            for group, rate in zip(optimizer.param_groups, initial, strict=True):
                group["initial_lr"] = rate  # what schedules go by
        assert session.joined_with is not None
        self.rank = session.rank
        self.mailbox = dist.PrefixStore(MAILBOX, root_of(session.group.store))
        self.carried = session.joined_with
        marker = self._run_dir.rank_joined(session.rank)
        with contextlib.suppress(OSError):
            if not self.is_over:
                marker.parent.mkdir(exist_ok=True)
                begun = self.carried["strategy"]["ahead"] + session.position
                marker.write_text(json.dumps({"step": begun}))
        self._thread = threading.Thread(
            target=self._watch,
            args=(StopFlag(session.group.store),),
            name="gossipgrad-joiner",
            daemon=True,
        )
        self._thread.start()
        donor = session.membership.joined[session.rank].donor
        self._emit({"event": "joined", "rank": session.rank, "from_rank": donor})
        return session

    def make_loop_state(self, strategy: RunningStrategy, batches: ElasticBatches) -> LoopState:
        """Where the run is, by the donor's state and the newest epoch in the store; local."""
        self._batches = batches
        carried = self.carried
        epoch = max(carried["epoch"], batches.newest_epoch() or 0)
        strategy.load_state_dict(carried["strategy"])
        self.begun_step = strategy.position(0)
        metrics = {
            "steps": self.begun_step,
            "epochs": epoch,
            "position": carried["position"],
            "best": carried["best"],
            "seconds": carried["seconds"],
            "offset": None,
            "counted_from": self.begun_step,
            **dict.fromkeys(("samples", "epoch_samples"), 0),
            **dict.fromkeys(("train_seconds", "loss_sum", "epoch_seconds"), 0.0),
        }
        return LoopState(epoch=epoch, batch=0, metrics=metrics)

    def flush(self) -> None:
        """Report which samples were used, before this worker leaves, so that no others are lost."""
        if self._batches is not None:
            self._batches.close()

    def is_behind(self) -> bool:
        """Whether the others train in an epoch that this rank has not begun; asked often."""
        now = time.monotonic()
        if self._batches is None or now - self._asked_seconds < _ASK_SECONDS:
            return False
        self._asked_seconds = now
        return self._batches.is_behind()

    def close(self) -> None:
        """End the thread."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self, flag: StopFlag) -> None:
        while not self._over.wait(_POLL_SECONDS):
            if not self._run_stops:
                is_set = flag.is_set()
                if is_set or (is_set is None and self.is_over):
                    self._run_stops = True
                    self._stop.set()
        flag.close()
