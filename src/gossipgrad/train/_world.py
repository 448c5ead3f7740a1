"""A run inside a world that torchrun or Slurm has started: join it, train, hand in."""

import contextlib
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from gossipgrad.comm import Heartbeats, Membership
from gossipgrad.errors import EvictedError

from ._check import check
from ._config import TrainConfig
from ._ending import MAILBOX, Ending
from ._gathering import Gathering, open_store
from ._given_start import train_with_those_who_come
from ._given_world import World
from ._invitation import place_of
from ._layout import RunDir, claim
from ._living import take_part
from ._losses import stands_for_most
from ._metrics import Event
from ._model_file import write_errors
from ._outcome import Outcome, exit_code_of
from ._progress import make_progress
from ._result import RunFailedError, after_checks
from ._resume import reopen
from ._serving import short_cause
from ._shared_folder import leave_token, must_be_shared
from ._signals import Stops, end_at_once, hear_stops
from ._summary import compose, finish
from ._versions import versions

# At the start, where a busy machine loads packages and data.
_SILENT_SECONDS = 10.0
# Ctrl-C in a terminal comes twice: from there, and again from torchrun.
_ECHO_SECONDS = 1.0


def slurm_rendezvous(environ: Mapping[str, str]) -> dict[str, str]:
    """`MASTER_ADDR` and `MASTER_PORT` for a Slurm job: its first node, a port from its number.

    What the environment has already is kept.

    Example:
        >>> slurm_rendezvous({"SLURM_JOB_NODELIST": "node[07-09,12]", "SLURM_JOB_ID": "42"})
        {'MASTER_ADDR': 'node07', 'MASTER_PORT': '20042'}
    """
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\]([^,]*))?", nodes)
    first = "".join(part or "" for part in match.groups()) if match else nodes
    port = 20_000 + int(environ.get("SLURM_JOB_ID", "0")) % 20_000
    return {
        "MASTER_ADDR": environ.get("MASTER_ADDR", first),
        "MASTER_PORT": environ.get("MASTER_PORT", str(port)),
    }


def run_in_world(config: TrainConfig, world: World, *, show_config: bool = False) -> Outcome:
    """Take part in a run as one rank; the lowest that comes checks it first.

    A gossip or local run begins without ranks that are lost before the first step: those that fell
    silent, and those never heard of within `start_seconds`. The lowest that is left puts it
    together.

    SIGINT and SIGTERM end it at once as long as no step was made, then stop it at the next step, or
    at the one that ranks in lockstep agree on; a later one ends it at once. Whoever started the
    processes also ends those that hang. The folder of the run should be the same on all nodes;
    where it is not, each keeps its own files, and the trace has the ranks of rank 0's node alone.
    A run with checkpoints is refused there.

    Raises:
        ValueError, GossipError: As by `run`; a mistake in the options is told by one rank alone.
        RunFailedError: This rank failed.
        GossipError: The store cannot be reached.
    """
    if config.nproc not in (None, world.world_size):
        raise ValueError(
            f"nproc is {config.nproc}, but {world.launcher} has started {world.world_size} "
            "processes; leave --nproc out."
        )
    if world.launcher == "Slurm":
        os.environ.update(slurm_rendezvous(os.environ))
    start = _Start(world)
    with hear_stops(start.on_stop) as stops, contextlib.ExitStack() as held:
        store = open_store(world.rank, world.world_size, config.start_seconds)
        mailbox = dist.PrefixStore(MAILBOX, store)
        gathering = Gathering(
            mailbox,
            world.rank,
            world.world_size,
            start_seconds=config.start_seconds,
            heartbeats=Heartbeats(silent_seconds=max(_SILENT_SECONDS, config.lost_after_seconds)),
        )
        try:
            opened = gathering.open(
                lambda again: _open(config, world, mailbox, start, held, again, show_config)
            )
            if opened is None:
                return Outcome(exit_code=2)
            config, start.token = TrainConfig.from_json(opened["config"]), opened["token"]
            assert config.out is not None
            run_dir = RunDir(config.out)
            run_dir.partial.mkdir(parents=True, exist_ok=True)
            if start.run_dir is None:
                held.enter_context(take_part(run_dir))
            return _take_part(config, run_dir, world, store, mailbox, gathering, start, stops)
        finally:
            gathering.close()


class _Start:
    """What a signal means depends on how far the run is: this knows, and acts on it.

    Attributes:
        stop: Set when the loop is to stop at the next step.
        ready: Whether the loop has begun.
        run_dir: The folder that this rank has claimed, if it has.
        token: What stands in a file of the folder that was opened.
    """

    def __init__(self, world: World) -> None:
        self.stop = threading.Event()
        self.ready = False
        self.run_dir: RunDir | None = None
        self.token: str | None = None
        self._speaks = world.rank == 0
        self._told_seconds: float | None = None

    def on_stop(self, stops: Stops) -> None:
        """Take a signal."""
        now = time.monotonic()
        if self._told_seconds is not None:
            if now - self._told_seconds > _ECHO_SECONDS:
                end_at_once(stops)
            return
        if not self.ready:
            self._say(f"stopped by {stops.caught[0].name} before all ranks had started")
            self.free_folder()
            end_at_once(stops)
        self._told_seconds = now
        self._say("stopping at the next step; once more to stop at once")
        self.stop.set()

    def free_folder(self) -> None:
        """Let another run have the folder, if nothing was learned in it."""
        if self.run_dir is not None and not self.ready:
            self.run_dir.remove_partial()

    def _say(self, text: str) -> None:
        if self._speaks:
            print(f"gossipgrad: {text}", file=sys.stderr, flush=True)


def _open(
    config: TrainConfig,
    world: World,
    mailbox: dist.Store,
    start: _Start,
    held: contextlib.ExitStack,
    again: bool,
    show_config: bool,
) -> dict[str, Any]:
    """Check the run and make its folder, or take over the one of a rank that died over this."""
    check(config, world.world_size)
    claimed = again and mailbox.check(["claimed"])

    def hold(run_dir: RunDir) -> None:
        # One that stands still over this may hold the lock, of this very run.
        first = not (again and mailbox.check(["held"]))
        held.enter_context(take_part(run_dir, first=first, own_store=place_of(mailbox)))
        mailbox.set("held", "")

    if config.resume is None:
        overwrite = config.overwrite or claimed
        run_dir = claim(config.out, name=config.label, overwrite=overwrite, hold=hold)
        config = config.named()
    else:
        config, run_dir = reopen(config, hold=hold)
    mailbox.set("claimed", "")
    config = config.resolved(nproc=world.world_size, out=run_dir.path.absolute())
    if config.resume is None:  # else when it is known that the run goes on
        config.write(run_dir.config, versions())
    start.run_dir = run_dir
    if show_config:
        print(config.text(versions()), end="", flush=True)
    return {"config": config.to_json(), "token": leave_token(run_dir)}


def _take_part(
    config: TrainConfig,
    run_dir: RunDir,
    world: World,
    store: dist.Store,
    mailbox: dist.Store,
    gathering: Gathering,
    start: _Start,
    stops: Stops,
) -> Outcome:
    progress = make_progress(config, 1)
    ending = Ending(run_dir, mailbox, world.rank, world.world_size)
    speaker = 0

    def meet(membership: Membership) -> None:
        nonlocal speaker
        speaker = min(membership.living)
        gone = membership.gone.items()
        ending.miss(
            {rank: loss.why for rank, loss in gone},
            {rank: loss.when_seconds for rank, loss in gone if loss.when_seconds},
        )

    def emit(event: Event) -> None:
        if event["event"] == "store":  # this process has warned of it
            return
        if event["event"] == "checkpoint":  # of this rank alone: no other hears of it
            progress.notice(event["text"])
            return
        start.ready = True
        if world.rank == speaker:
            # Only this rank is heard here; the others are taken to be as fast.
            if "samples_per_second" in event:
                event = {
                    **event,
                    "samples_per_second": event["samples_per_second"] * world.world_size,
                }
            progress.take(0, event)

    try:
        if start.token is not None and (config.checkpoint_every or config.resume):
            must_be_shared(run_dir, start.token)
        result = train_with_those_who_come(
            config,
            run_dir,
            world,
            store,
            gathering,
            stop=start.stop,
            met=meet,
            emit=emit,
        )
    except Exception as error:
        where = run_dir.errors(world.rank)
        is_written = write_errors(where, traceback.format_exc())
        cause = f"failed: {short_cause(error)}"
        ending.hand_in({"cause": cause})
        if not isinstance(error, EvictedError):  # else the run, and its folder, is the others'
            if not start.ready:
                gathering.fail(cause)
            start.free_folder()
        trace = f" (traceback in {where})" if is_written else ""
        raise RunFailedError(f"rank {world.rank} {cause.rstrip('.')}{trace}") from error
    finally:
        progress.close()
    ending.hand_in({"result": result.to_json()})
    with ending.turn() as mine:
        if not mine:
            return Outcome(exit_code=exit_code_of(stops.first if result.stopped else None))
        with after_checks():
            return _put_together(config, run_dir, world, ending, stops)


def _put_together(
    config: TrainConfig, run_dir: RunDir, world: World, ending: Ending, stops: Stops
) -> Outcome:
    results, lost = ending.collect()
    exported = stands_for_most(
        {rank: result for rank, result in results.items() if run_dir.rank_model(rank).exists()}
    )
    summary = compose(
        config,
        results,
        lost,
        world_size=world.world_size,
        exported=exported,
        stopped_by=stops.first,
        run_dir=run_dir,
        when_seconds=ending.when_seconds,
    )
    report = finish(run_dir, summary, exported)
    ending.done()
    return Outcome(
        exit_code=exit_code_of(stops.first if summary["interrupted"] else None),
        run_dir=run_dir.path,
        summary=summary,
        report=report,
    )
