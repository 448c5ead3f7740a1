"""One worker of a run, from its environment to its end: find the others, train, hand in."""

import contextlib
import dataclasses
import logging
import os
import secrets
import signal
import sys
import threading
import traceback
import warnings

import torch.distributed as dist

from gossipgrad.comm import AskedStore, Group
from gossipgrad.errors import GossipError

from ._check import check
from ._config import TrainConfig
from ._device import find_backend, with_island
from ._finish import Ends, finish
from ._folder import RunDir, check_shared, claim, held, hold_lock, leave_token, write_errors
from ._metrics import Event
from ._progress import Progress
from ._rank import train_rank
from ._result import (
    DivergedError,
    Outcome,
    PeerLostError,
    RankResult,
    RunFailedError,
    exit_code_of,
    short_cause,
)
from ._setup import RankInputs
from ._signals import Stops, catch_stops, end_at_once, ending_workers
from ._start import MAILBOX, Start, StartFailedError
from ._state import reopen
from ._tasks import load_job
from ._world import World, find_world, hosts_store, open_store, slurm_rendezvous
from .strategies import GROUP

# A store that hangs at the end is not awaited: what is in it is in the folder, too.
_END_SECONDS = 2.0
# For ranks that are all ready to make their links.
_LEAST_LINKING_SECONDS = 60.0


def worker_main() -> int:
    """Body of a worker that `run` has started, which has left the options in the store."""
    world = find_world(os.environ)
    assert world is not None, "the launcher sets RANK and WORLD_SIZE"
    # The launcher says who was lost, and the lowest rank alone warns.
    logger = logging.getLogger("gossipgrad")
    for handler in [*logger.handlers]:
        logger.removeHandler(handler)
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    if world.rank:
        warnings.simplefilter("ignore")
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


def run_in_world(config: TrainConfig | None, world: World) -> Outcome:
    """Take part in a run as one rank; rank 0 checks it first, and makes its folder."""
    if config is not None and config.nproc not in (None, world.world_size):
        raise ValueError(
            f"nproc is {config.nproc}, but {world.launcher} has started {world.world_size} "
            "processes; leave --nproc out."
        )
    if config is not None and world.rank == 0 and not config.quiet:
        print(f"gossipgrad: {world.found_by}", file=sys.stderr, flush=True)
    if world.launcher == "Slurm":
        os.environ.update(slurm_rendezvous(os.environ))
    worker = _Worker(world)
    with catch_stops(worker.on_stop) as stops, ending_workers(), contextlib.ExitStack() as stack:
        seconds = (config or TrainConfig()).start_seconds
        worker.connect(open_store(world.rank, world.world_size, seconds))
        if config is not None and world.rank == 0:
            worker.open(config, stack)
        elif config is not None:
            try:
                worker.start.await_all("here", seconds)
                worker.start.await_opened()
            except StartFailedError as error:
                if str(error):
                    raise
                return Outcome(exit_code=2)  # rank 0 says why
        return worker.run(stops, stack)


class _Worker:
    """A rank of a run, as far as it is."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._run_dir: RunDir | None = None  # if this rank has made it
        self._stop = threading.Event()
        self._has_begun = False

    def connect(self, store: dist.Store) -> None:
        """Arrive in the store of the world."""
        # An agent of torchrun that starts its workers again keeps the store of the first attempt.
        if (attempt := os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) != "0":
            store = dist.PrefixStore(f"restart{attempt}", store)
        self._store, self._mailbox = store, dist.PrefixStore(MAILBOX, store)
        self.start = Start(AskedStore(self._mailbox), self._world.rank, self._world.world_size)
        self.start.arrive("here")

    def on_stop(self, stops: Stops) -> None:
        """Take a signal: what it means depends on how far the run is."""
        if stops.insisted:
            end_at_once(stops)
        if not self._has_begun:
            self._say(f"stopped by {stops.caught[0].name} before all ranks had started")
            self._free_folder()
            end_at_once(stops)
        self._say("stopping at the next step; once more to stop at once")
        self._stop.set()

    def open(self, config: TrainConfig, stack: contextlib.ExitStack) -> None:
        """Check the run, make its folder, and tell the other ranks."""
        size = self._world.world_size
        try:
            check(config, size)
            config, self._run_dir = open_folder(config, size, stack)
        except BaseException:
            self.start.fail("")
            if hosts_store(self._world.rank):
                self.start.await_failure_seen()
            raise
        self.start.open({"config": config.to_json(), "token": leave_token(self._run_dir)})

    def run(self, stops: Stops, stack: contextlib.ExitStack) -> Outcome:
        """Train, hand in, and put the run together if that is this rank's."""
        rank, opened = self._world.rank, self.start.await_opened()
        config = TrainConfig.from_json(opened["config"])
        assert config.out is not None
        run_dir, progress = RunDir(config.out), Progress(config)
        ends = Ends(run_dir, AskedStore(self._mailbox, timeout_seconds=_END_SECONDS))
        if self._run_dir is None:
            stack.enter_context(hold_lock(run_dir))
        with held(run_dir.rank_lock(rank)), contextlib.closing(progress):
            try:
                if opened["token"] is not None:
                    check_shared(run_dir, opened["token"], unless=self.start.check)
                result = self._train(config, run_dir, progress)
                progress.close()
                end = {"result": dataclasses.asdict(result), "stopped_by": stops.first}
                ends.hand_in(rank, end)
                outcome = finish(config, ends, rank, end)
                code = exit_code_of(stops.first if result.stopped else None)
                return outcome or Outcome(exit_code=code)
            except Exception as error:
                where = write_errors(run_dir.errors(rank))
                cause = f"failed: {short_cause(error)}"
                others = (PeerLostError, RunFailedError)
                if not self._has_begun:
                    others = (GossipError, dist.DistError)
                elif config.island_size > 1 and not isinstance(error, DivergedError):
                    others = (GossipError,)  # most often another rank of the island has died
                end = {
                    "cause": cause,
                    "is_consequence": isinstance(error, others),
                    "is_fatal": isinstance(error, DivergedError),
                }
                if not isinstance(error, StartFailedError):  # then rank 0 frees the folder
                    ends.hand_in(rank, end)
                if not self._has_begun:
                    self.start.fail(f"rank {rank} {cause}")
                    self._free_folder()
                raise RunFailedError(f"rank {rank} {cause.rstrip('.')}{where}") from error

    def _train(self, config: TrainConfig, run_dir: RunDir, progress: Progress) -> RankResult:
        rank, size, start = self._world.rank, self._world.world_size, self.start
        start.await_all("here", config.start_seconds)
        job = load_job(config)
        start.arrive("ready")
        start.await_all("ready")

        def emit(event: Event) -> None:
            if event["event"] == "ready":
                self._has_begun = True
                start.begin()
            living = event.pop("living", None) or range(size)
            # The lowest shows how the run goes. Of its own checkpoints each rank alone knows.
            if rank == min(living) or event["event"] == "checkpoint":
                if "samples_per_second" in event:  # the others are taken to be as fast
                    event["samples_per_second"] *= len(living)
                progress.take(event)

        island = config.island_size
        number, index = divmod(rank, island)

        def join_group(name: str) -> Group:
            store, own = dist.PrefixStore(f"gossipgrad/{name}", self._store), (rank, size)
            if name == GROUP and island > 1:
                store, own = dist.PrefixStore(str(index), store), (number, size // island)
            return Group(
                store,
                *own,
                start_timeout_seconds=max(config.start_seconds, _LEAST_LINKING_SECONDS),
            )

        if config.needs_every_rank or island > 1:
            # One answer for all: the first one written.
            own = find_backend(config, size)
            backend = start.ask(lambda store: store.compare_set("backend", "", own)).decode()
            store, own_rank, own_size = self._store, rank, size
            if island > 1:
                store = dist.PrefixStore(f"gossipgrad/island{number}", store)
                own_rank, own_size = index, island
            dist.init_process_group(backend, store=store, rank=own_rank, world_size=own_size)
        return train_rank(
            RankInputs(
                config=config,
                job=job,
                run_dir=run_dir,
                rank=rank,
                world_size=size,
                stop=self._stop,
                emit=emit,
                groups=None if config.needs_every_rank else join_group,
            )
        )

    def _free_folder(self) -> None:
        """Let another run have the folder that this rank has made; nothing was learned in it."""
        if self._run_dir is not None:
            self._run_dir.remove_partial()

    def _say(self, text: str) -> None:
        if self._world.rank == 0:
            print(f"gossipgrad: {text}", file=sys.stderr, flush=True)


def open_folder(
    config: TrainConfig, world_size: int, stack: contextlib.ExitStack
) -> tuple[TrainConfig, RunDir]:
    """The folder of a run that begins or is resumed, locked, and its options without defaults."""
    if config.resume is None:
        task = config.job or f"{config.data}-{config.model}"
        name = "".join(one if one.isalnum() else "-" for one in f"{task}-{config.strategy}")
        run_dir = claim(config.out, stack, name=name, overwrite=config.overwrite)
        config = dataclasses.replace(config, run_name=config.run_name or secrets.token_hex(8))
    else:
        config, run_dir = reopen(config, stack)
    config = with_island(config, world_size)
    config = config.resolved(nproc=world_size, out=run_dir.path.absolute())
    if config.resume is None:  # else when all ranks have loaded what they continue from
        config.write(run_dir.config)
    if not config.quiet:
        print(f"run {run_dir.path}", flush=True)
    return config, run_dir
