"""One worker of a run, from its environment to its end: find the others, train, hand in."""

import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from gossipgrad.comm import Group, Heartbeats, Membership
from gossipgrad.errors import AgreementError, EvictedError, GossipError

from ._check import check
from ._config import TrainConfig
from ._device import find_backend
from ._ending import MAILBOX, Ending
from ._files import check_shared, leave_token, write_errors
from ._gathering import Gathering
from ._invitation import place_of
from ._layout import RunDir, claim
from ._lock import hold_lock
from ._metrics import Event
from ._progress import Progress, make_progress
from ._rank import train_rank
from ._result import (
    DivergedError,
    Outcome,
    PeerLostError,
    RankResult,
    RunFailedError,
    after_checks,
    exit_code_of,
    short_cause,
)
from ._resume import reopen
from ._signals import Stops, end_at_once, hear_stops
from ._tasks import load_job
from ._versions import versions
from ._world import World, find_world, open_store, slurm_rendezvous

# At the start, where a busy machine loads packages and data.
_SILENT_SECONDS = 10.0
# Ctrl-C in a terminal comes twice: from there, and again from torchrun.
_ECHO_SECONDS = 1.0


def worker_main() -> int:
    """Body of a worker that `run` has started, which has left the options in the store.

    Never returns: a process group that is broken may hang in its own teardown.
    """
    world = find_world(os.environ)
    assert world is not None, "the launcher sets RANK and WORLD_SIZE"
    silence(world)
    code = 1
    try:
        code = run_in_world(None, world).exit_code
    except RunFailedError:
        pass  # what this rank has handed in says it all
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def silence(world: World) -> None:
    """Leave to the launcher to say who was lost, and warnings to the lowest rank."""
    logger = logging.getLogger("gossipgrad")
    for handler in [*logger.handlers]:
        logger.removeHandler(handler)
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    if world.rank:
        warnings.simplefilter("ignore")


def run_in_world(config: TrainConfig | None, world: World, *, show_config: bool = False) -> Outcome:
    """Take part in a run as one rank; the lowest that comes checks it first.

    A gossip or local run begins without ranks that are lost before the first step: those that fell
    silent, and those never heard of within `start_seconds`. The lowest that is left puts it
    together.

    SIGINT and SIGTERM end it at once as long as no step was made, then stop it at the next step, or
    at the one that ranks in lockstep agree on; a later one ends it at once. The launcher also
    ends processes that hang. The folder of the run should be the same on all nodes;
    where it is not, each keeps its own files, and the trace has the ranks of rank 0's node alone.
    A run with checkpoints is refused there.

    Args:
        config: The options; None: those that the launcher has left in the store.
        world: Which rank this is.
        show_config: Print `config.json` before the start.

    Raises:
        ValueError, GossipError: As by `run`; one rank alone raises for a mistake in the options.
        RunFailedError: This rank failed.
        GossipError: The store cannot be reached.
    """
    if config is not None and config.nproc not in (None, world.world_size):
        raise ValueError(
            f"nproc is {config.nproc}, but {world.launcher} has started {world.world_size} "
            "processes; leave --nproc out."
        )
    if world.launcher == "Slurm":
        os.environ.update(slurm_rendezvous(os.environ))
    worker = _Worker(world)
    with hear_stops(worker.on_stop) as stops, contextlib.ExitStack() as held:
        start_seconds = TrainConfig().start_seconds if config is None else config.start_seconds
        worker.store = open_store(world.rank, world.world_size, start_seconds)
        worker.mailbox = dist.PrefixStore(MAILBOX, worker.store)
        if config is None:
            config = TrainConfig.from_json(json.loads(worker.mailbox.get("run"))["config"])
        gathering = worker.gathering = Gathering(
            worker.mailbox,
            world.rank,
            world.world_size,
            start_seconds=config.start_seconds,
            heartbeats=Heartbeats(silent_seconds=max(_SILENT_SECONDS, config.lost_after_seconds)),
        )
        try:
            opened = gathering.open(
                lambda again: worker.open(config, held, again=again, show_config=show_config)
            )
            if opened is None:
                return Outcome(exit_code=2)
            config = TrainConfig.from_json(opened["config"])
            assert config.out is not None
            run_dir = RunDir(config.out)
            run_dir.partial.mkdir(parents=True, exist_ok=True)
            if worker.run_dir is None:
                held.enter_context(hold_lock(run_dir))
            return worker.run(config, run_dir, opened["token"], stops)
        finally:
            gathering.close()


class _Worker:
    """A rank of a run, as far as it is.

    Attributes:
        store: That of the world.
        mailbox: What the ranks of this command say to each other in it.
        gathering: The start.
        run_dir: The folder that this rank has claimed, if it has.
    """

    store: dist.Store
    mailbox: dist.Store
    gathering: Gathering

    def __init__(self, world: World) -> None:
        self.run_dir: RunDir | None = None
        self._world = world
        self._stop = threading.Event()
        self._ready = False
        self._stop_seconds: float | None = None

    def on_stop(self, stops: Stops) -> None:
        """Take a signal: what it means depends on how far the run is."""
        now = time.monotonic()
        if self._stop_seconds is not None:
            if now - self._stop_seconds > _ECHO_SECONDS:
                end_at_once(stops)
            return
        if not self._ready:
            self._say(f"stopped by {stops.caught[0].name} before all ranks had started")
            self._free_folder()
            end_at_once(stops)
        self._stop_seconds = now
        self._say("stopping at the next step; once more to stop at once")
        self._stop.set()

    def open(
        self, config: TrainConfig, held: contextlib.ExitStack, *, again: bool, show_config: bool
    ) -> dict[str, Any]:
        """Check the run and make its folder, or take over that of a rank that died over this."""
        check(config, self._world.world_size)
        mailbox = self.mailbox
        claimed = again and mailbox.check(["claimed"])

        def hold(run_dir: RunDir) -> None:
            # One that hangs over this may hold the lock, of this very run.
            first = not (again and mailbox.check(["held"]))
            held.enter_context(hold_lock(run_dir, first=first, own_store=place_of(mailbox)))
            mailbox.set("held", "")

        config, self.run_dir = open_folder(
            config, self._world.world_size, hold=hold, overwrite=claimed, show_config=show_config
        )
        mailbox.set("claimed", "")
        return {"config": config.to_json(), "token": leave_token(self.run_dir)}

    def run(self, config: TrainConfig, run_dir: RunDir, token: str | None, stops: Stops) -> Outcome:
        """Train, hand in, and put the run together if that is this rank's."""
        rank = self._world.rank
        ending = Ending(run_dir, self.mailbox, rank, self._world.world_size)
        events = _Events(config, self._world)
        try:
            if token is not None and (config.checkpoint_every or config.resume):
                check_shared(run_dir, token)
            result = self._train(config, run_dir, ending, events)
        except Exception as error:
            where = run_dir.errors(rank)
            is_written = write_errors(where, traceback.format_exc())
            cause = f"failed: {short_cause(error)}"
            others_gone = (PeerLostError, *(() if self._ready else (GossipError, dist.DistError)))
            ending.hand_in(
                {
                    "cause": cause,
                    "is_consequence": isinstance(error, others_gone),
                    "is_fatal": isinstance(error, DivergedError),
                }
            )
            if not isinstance(error, EvictedError):  # else the run, and its folder, is the others'
                if not self._ready:
                    self.gathering.fail(cause)
                self._free_folder()
            trace = f" (traceback in {where})" if is_written else ""
            raise RunFailedError(f"rank {rank} {cause.rstrip('.')}{trace}") from error
        finally:
            events.close()
        ending.hand_in({"result": result.to_json()})
        with ending.turn() as mine:
            if not mine:
                return Outcome(exit_code=exit_code_of(stops.first if result.stopped else None))
            with after_checks():
                return ending.put_together(config, stops.first)

    def _train(
        self, config: TrainConfig, run_dir: RunDir, ending: Ending, events: "_Events"
    ) -> RankResult:
        """Train among the ranks that are ready; start again if one is lost before the first step.

        Raises:
            GossipError: A rank is missing that is needed.
        """
        world, gathering = self._world, self.gathering
        while True:
            job = load_job(config)
            membership = gathering.meet()
            ending.miss(membership.gone)
            if membership.gone and config.needs_every_rank:
                rank, loss = next(iter(membership.gone.items()))
                raise GossipError(
                    f"rank {rank} was lost before the start ({loss.why}), and strategy "
                    f"{config.strategy} needs every rank"
                )

            def emit(event: Event, membership: Membership = membership) -> None:
                if event["event"] == "ready":
                    gathering.begin(membership.generation)
                    self._ready = True
                events.take(event)

            groups = None
            if config.needs_every_rank:
                rank, size = world.rank, world.world_size
                # One answer for all: whoever writes it first.
                backend = self.mailbox.compare_set("backend", "", find_backend(config, size))
                dist.init_process_group(
                    backend.decode(), store=self.store, rank=rank, world_size=size
                )
            else:
                groups = _Groups(self.store, world, gathering, membership)
            try:
                return train_rank(
                    config,
                    job,
                    run_dir,
                    rank=world.rank,
                    world_size=world.world_size,
                    stop=self._stop,
                    emit=emit,
                    groups=groups,
                    members=membership.living,
                )
            except (GossipError, dist.DistError) as error:
                final = isinstance(error, AgreementError | EvictedError)
                if self._ready or final or groups is None:
                    raise
                groups.close()
                if not gathering.starts_again(membership.generation):
                    raise

    def _free_folder(self) -> None:
        """Let another run have the folder, if nothing was learned in it."""
        if self.run_dir is not None and not self._ready:
            self.run_dir.remove_partial()

    def _say(self, text: str) -> None:
        if self._world.rank == 0:
            print(f"gossipgrad: {text}", file=sys.stderr, flush=True)


class _Groups:
    """Private groups of the members that begin, by name."""

    def __init__(
        self, store: dist.Store, world: World, gathering: Gathering, membership: Membership
    ) -> None:
        self._store = dist.PrefixStore(f"gossipgrad/start{membership.generation}", store)
        self._world = world
        self._gathering = gathering
        self._members = membership.living
        self._made: list[Group] = []

    def __call__(self, name: str) -> Group:
        group = Group(
            dist.PrefixStore(name, self._store),
            self._world.rank,
            self._world.world_size,
            members=self._members,
            gone=self._gathering.gone,
        )
        self._made.append(group)
        return group

    def close(self) -> None:
        """Leave all of them; others' collectives then fail."""
        for group in self._made:
            group.close()


class _Events:
    """Shows the events of the lowest rank that lives; those of the others are not shown."""

    def __init__(self, config: TrainConfig, world: World) -> None:
        self._config, self._world = config, world
        self._progress: Progress | None = None

    def take(self, event: Event) -> None:
        """Take an event of this rank."""
        living = event.pop("living", None) or range(self._world.world_size)
        # A checkpoint is of this rank alone: no other says what became of it.
        if self._world.rank != min(living) and event["event"] != "checkpoint":
            return
        if self._progress is None:
            self._progress = make_progress(self._config)
        if "samples_per_second" in event:  # the others are taken to be as fast
            event["samples_per_second"] *= len(living)
        self._progress.take(event)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._progress is not None:
            self._progress.close()


def open_folder(
    config: TrainConfig,
    world_size: int,
    *,
    hold: Callable[[RunDir], None],
    overwrite: bool = False,
    show_config: bool = False,
) -> tuple[TrainConfig, RunDir]:
    """The folder of a run that begins or goes on, and its options with nothing left to a default.

    Args:
        config: The options.
        world_size: Number of ranks.
        hold: As in `claim` and `reopen`.
        overwrite: Whether to replace the run that the folder holds, also if the options do not say.
        show_config: Print `config.json`.

    Raises:
        ValueError: As by `claim` and `reopen`.
    """
    if config.resume is None:
        overwrite = config.overwrite or overwrite
        run_dir = claim(config.out, name=config.label, overwrite=overwrite, hold=hold)
        config = config.named()
    else:
        config, run_dir = reopen(config, hold=hold)
    config = config.resolved(nproc=world_size, out=run_dir.path.absolute())
    if config.resume is None:  # else when it is known that the run goes on
        config.write(run_dir.config, versions())
    if show_config:
        print(config.text(versions()), end="", flush=True)
    return config, run_dir
