"""A worker that joins a run under way: how it comes in, trains, leaves, and hands in."""

import contextlib
import json
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

import gossipgrad as gg
from gossipgrad.data import ElasticBatches

from ._checkpoints import LoopState
from ._config import TrainConfig
from ._ending import MAILBOX, Ending
from ._files import write_errors
from ._invitation import Invitation, fingerprint_of, root_of
from ._layout import RunDir
from ._metrics import Event
from ._progress import make_progress
from ._rank import train_rank
from ._result import RankResult, short_cause
from ._signals import Stops, end_at_once, hear_stops
from ._tasks import load_job
from ._worker import silence
from ._world import find_world, open_store
from .strategies import RunningStrategy
from .strategies._stopping import StopFlag

_JOIN_SECONDS = 300.0
_LOOK_SECONDS = 0.5
_ASK_SECONDS = 0.1


class RunJoiner:
    """Joins a run, and stops with it, or leaves it before.

    While it trains it polls whether the run stops.

    Args:
        address: Of the run, for `gg.join`.
        run_dir: The folder of the run.
        stop: Set from outside when this worker is to leave; set here when the run stops.
        emit: Takes a "joined" event.

    Attributes:
        carried: The state of the donor's loop.
        begun_step: The step of the run after which this worker begins.
        mailbox: Where ranks hand in; None before it has joined.
    """

    def __init__(
        self,
        address: str,
        run_dir: RunDir,
        *,
        stop: threading.Event,
        emit: Callable[[Event], None],
    ) -> None:
        self._address = address
        self._run_dir = run_dir
        self._stop = stop
        self._emit = emit
        self.begun_step = 0
        self.mailbox: dist.Store | None = None
        self.carried: dict[str, Any] = {}
        self._batches: ElasticBatches | None = None
        self._called = False
        self._asked_seconds = -math.inf
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def leaves(self) -> bool:
        """Whether this worker is to stop, and the run is not."""
        return self._stop.is_set() and not self._called

    @property
    def is_over(self) -> bool:
        """Whether the run was put together already, without this worker."""
        return self._run_dir.summary.exists()

    def enter(
        self, model: nn.Module, optimizers: Sequence[Optimizer], settings: Mapping[str, Any]
    ) -> gg.GossipSession:
        """Join; model and optimizers are then those of a living rank, but for the initial rates.

        Args:
            model: Its weights are overwritten.
            optimizers: Their state is.
            settings: Those of the run's session.

        Raises:
            ValueError, GossipError: As `gg.join`.
        """
        rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
        session = gg.join(
            model, optimizers, self._address, **settings, timeout_seconds=_JOIN_SECONDS
        )
        for optimizer, initial in zip(optimizers, rates, strict=True):
            for group, rate in zip(optimizer.param_groups, initial, strict=True):
                group["initial_lr"] = rate  # what schedules go by
        assert session.joined_with is not None
        self.mailbox = dist.PrefixStore(MAILBOX, root_of(session.group.store))
        self.carried = session.joined_with
        how = session.membership.joined[session.rank]
        marker = self._run_dir.rank_joined(session.rank)
        with contextlib.suppress(OSError):
            if not self._run_dir.summary.exists():
                marker.parent.mkdir(exist_ok=True)
                begun = self.carried["strategy"]["ahead"] + session.position
                marker.write_text(json.dumps({"step": begun}))
        self._thread = threading.Thread(
            target=self._look,
            args=(StopFlag(session.group.store),),
            name="gossipgrad-joiner",
            daemon=True,
        )
        self._thread.start()
        self._emit({"event": "joined", "rank": session.rank, "from_rank": how.donor})
        return session

    def make_loop_state(self, strategy: RunningStrategy, batches: ElasticBatches) -> LoopState:
        """Where the run is, by the donor's state and the newest epoch in the store; local.

        Args:
            strategy: Goes on from the donor's.
            batches: Know the newest epoch, and are flushed by `flush`.
        """
        self._batches = batches
        carried, strategy_state = self.carried, dict(self.carried["strategy"])
        epoch = max(carried["epoch"], batches.newest_epoch() or 0)
        strategy_state["evaluations"] += epoch - carried["epoch"]  # one at the end of each
        strategy.load_state_dict(strategy_state)
        self.begun_step = strategy.position(0)
        metrics = {
            "steps": self.begun_step,
            "epochs": epoch,
            "position": carried["position"],
            "seconds": carried["seconds"],
            "offset": None,
            **dict.fromkeys(("samples", "epoch_samples"), 0),
            **dict.fromkeys(("train_seconds", "loss_sum", "epoch_seconds"), 0.0),
        }
        return LoopState(epoch=epoch, batch=0, metrics=metrics)

    def flush(self) -> None:
        """Tell which samples were used, before this worker leaves, so that no others are lost."""
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
        """Look no more."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _look(self, word: StopFlag) -> None:
        while not self._over.wait(_LOOK_SECONDS):
            if not self._called:
                said = word.is_set()
                if said or (said is None and self._run_dir.summary.exists()):
                    self._called = True
                    self._stop.set()
        word.close()


def join_main() -> int:
    """Body of a worker that joins a run, as the launcher has left it in the store; never returns.

    A signal has it leave the run at the next step, in order; before it has joined, and a second
    time, it ends it.
    """
    world = find_world(os.environ)
    assert world is not None, "the launcher sets RANK and WORLD_SIZE"
    silence(world)
    store = open_store(world.rank, world.world_size)
    options = json.loads(store.get("join"))
    address = options["invitation"].pop("store")
    invitation = Invitation(
        **options["invitation"], store=None if address is None else tuple(address)
    )
    joiner = _JoinWorker(TrainConfig.from_json(options["config"]), invitation, number=world.rank)
    with hear_stops(joiner.on_stop):
        end = joiner.run()
    store.set(f"end{world.rank}", json.dumps(end))
    sys.stdout.flush()
    sys.stderr.flush()
    # A broken process group may hang in its own teardown.
    os._exit(int("cause" in end))


class _JoinWorker:
    """A worker that joins."""

    def __init__(self, config: TrainConfig, invitation: Invitation, *, number: int) -> None:
        assert config.out is not None
        self._config, self._run_dir = config, RunDir(config.out)
        self._invitation, self._number = invitation, number
        self._progress = make_progress(config)
        self._stop = threading.Event()
        self._rank: int | None = None
        self._joiner: RunJoiner | None = None
        self._ending: Ending | None = None

    def on_stop(self, stops: Stops) -> None:
        """Take a signal."""
        if self._rank is None or stops.insisted:
            end_at_once(stops)
        self._progress.notice("leaving the run, which goes on; once more to end at once")
        self._stop.set()

    def run(self) -> dict[str, Any]:
        """Join, train and hand in; gives the result, or the cause why there is none."""
        try:
            result = self._train()
        except Exception as error:
            rank = self._rank
            where = self._run_dir.join_errors(os.getpid())
            where = where if rank is None else self._run_dir.errors(rank)
            write_errors(where, traceback.format_exc())
            return {"cause": f"failed: {short_cause(error)}", "rank": rank, "trace": str(where)}
        finally:
            self._progress.close()
        return {"result": result.to_json(), "rank": self._rank}

    def _emit(self, event: Event) -> None:
        event.pop("living", None)
        if event["event"] == "joined":
            self._rank = rank = event["rank"]
            assert self._joiner is not None
            assert self._joiner.mailbox is not None
            self._ending = Ending(self._config, self._run_dir, self._joiner.mailbox, rank)
            self._progress.notice(
                f"joined as rank {event['rank']}, with the weights of rank {event['from_rank']}"
            )
        if self._number == 0 or event["event"] == "checkpoint":
            self._progress.take(event)

    def _train(self) -> RankResult:
        config, run_dir, invitation = self._config, self._run_dir, self._invitation
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
        joiner = self._joiner = RunJoiner(
            invitation.address, run_dir, stop=self._stop, emit=self._emit
        )
        with closing(joiner):
            try:
                result = train_rank(
                    config,
                    job,
                    run_dir,
                    rank=self._number,
                    world_size=config.nproc,
                    stop=self._stop,
                    emit=self._emit,
                    joiner=joiner,
                )
                assert self._ending is not None, "it has joined"
                self._ending.hand_in({"result": result.to_json()})
                if not result.left:
                    self._ending.finish(result, None)
                return result
            except Exception as error:
                if self._ending is not None:
                    self._ending.hand_in({"cause": f"failed: {short_cause(error)}"})
                raise
            finally:
                if self._ending is not None:
                    self._ending.close()
