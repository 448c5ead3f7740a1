"""The exact average over all ranks, by collectives."""

import json
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from gossipgrad._messages import first_line
from gossipgrad.comm import (
    LEFT,
    Group,
    Recorder,
    distance_to_mean,
    mean_inside,
    named,
    statistics,
    widened,
)
from gossipgrad.engine._flow import Bucket, Delta, Flow, Phase, SlicedBucket
from gossipgrad.engine._island import Island
from gossipgrad.engine._members import GAVE_UP, Members
from gossipgrad.engine._rounds import COLLECTIVE_SECONDS, Rounds
from gossipgrad.errors import (
    EvictedError,
    GossipError,
    ReplicaChangedError,
    UnlikeCallsError,
)
from gossipgrad.topology import Weighted

__all__ = ["Averaging", "own_work"]

C = TypeVar("C")
T = TypeVar("T")

logger = logging.getLogger(__name__)

Kind = Literal[
    "consensus",
    "average",
    "distance",
    "broadcast",
    "rebuild",
    "periodic",
    "drain",
    "load",
    "agree",
    "mean",
]
_CALLS: dict[Kind, str] = {
    "consensus": "session.consensus()",
    "average": "session.average_()",
    "distance": "session.consensus_distance()",
    "broadcast": "session.broadcast_()",
    "rebuild": "session.rebuild()",
    "periodic": "a periodic average",
    "drain": "session.state_dict()",
    "load": "session.load_state_dict()",
    "agree": "session.agree()",
    "mean": "session.mean_()",
}
_OF_SEVERAL: tuple[Kind, ...] = ("consensus", "average", "distance", "broadcast")
_MEMBERS_SECONDS = 10.0  # for all ranks of an island to notice the same joiners and deaths
_LOOK_SECONDS = 0.05
_TOTALS = 2  # one is averaged while one is used


def own_work(*methods: str) -> Callable[[type[C]], type[C]]:
    """Let methods of a class run without gradients, and not in `torch.inference_mode()`.

    Snapshots and received parts that they make are written later, as no inference tensor can be.
    """

    def wrap(owner: type[C]) -> type[C]:
        for name in methods:
            alone = torch.inference_mode(False)(torch.no_grad()(getattr(owner, name)))
            setattr(owner, name, alone)
        return owner

    return wrap


class _View(NamedTuple):
    """What a rank enters a collective with."""

    kind: Kind
    next_round: int
    epoch: int
    changed: str | None


class Averaging:
    """Brings all ranks to one collective, and averages flows.

    Ranks may arrive with unequal step counts. Each announces its call; a rank that calls the
    periodic average while another is already in a collective of the user's continues training.
    When a rank is lost before a collective, the others meet again without it; when in the
    middle, they get an error.

    The ranks of an island are each in a group with those of their number in other islands:

    1. Rank 1 of island C dies in the middle of an average. The ranks 1 of A and B get an error.
    2. The ranks 0 of A and B had ended theirs, as rank 0 of C died a moment later.
    3. If only the ranks 1 raised, the islands A and B would have unequal ranks.

    So a rank whose collective fails takes its own value instead, and before a call ends, the
    ranks of an island ask each other: all raise, or none.
    """

    def __init__(
        self,
        group: Group,
        model: nn.Module,
        members: Members,
        rounds: Rounds | None,
        island: Island | None = None,
    ) -> None:
        self._island = island
        self._failed: GossipError | None = None  # of this rank, in a call of its island
        self._agreed: GossipError | None = None  # which all ranks of the island raise
        self.last_distance: float | None = None
        self.averages = self.averaged_bytes = 0
        self.seconds = 0.0  # in periodic averages, including the wait for other ranks
        self._group, self._model = group, model
        self._members = members
        self._rounds = rounds
        self._failed_in: int | None = None  # the generation in which a periodic average failed
        self._has_warned = self._has_named_unlike = self._has_refused = False

    def enter_collective(self, kind: Kind, changed: str | None = None) -> bool:
        """Wait for all ranks; return False if the others are in another collective.

        `changed` is the error if this rank's replica was changed outside the session, which all
        raise.
        """
        rounds, island = self._rounds, self._island
        if rounds is None:
            return True
        if island is None:
            return self._enter(rounds, kind, changed)
        self._agree_on_members(rounds, island)
        try:
            entered = self._enter(rounds, kind, changed)
        except GossipError as error:
            island.agree([first_line(error), 0, False])
            raise
        answers = island.agree([None, rounds.next_round, entered])
        rounds.next_round = max(next_round for _, next_round, _ in answers)
        for index, (why, *_) in enumerate(answers):
            if why is not None:
                raise GossipError(f"rank {index} of this island: {why}")
        return answers[0][2]

    def _agree_on_members(self, rounds: Rounds, island: Island) -> None:
        """Wait, not long, until the ranks of this island know of the same other islands.

        1. Island C becomes a member, and rank 0 of A notices that before rank 1 of A.
        2. A calls `consensus()`: its rank 0 waits for C, and its rank 1 completes it without C.
        3. C calls its first collective: its rank 0 meets that of A. Its rank 1 waits for rank 1 of
           A, which waits for its rank 0.
        """
        deadline = time.monotonic() + _MEMBERS_SECONDS
        while True:
            self._members.follow_latest(rounds)
            is_late = time.monotonic() > deadline
            views = island.agree([*self._members.current.living, is_late])[: island.slices]
            if any(late for *_, late in views) or all(view == views[0] for view in views):
                return
            time.sleep(_LOOK_SECONDS)

    def _enter(self, rounds: Rounds, kind: Kind, changed: str | None) -> bool:
        self._group.call = _CALLS[kind]
        awaited: set[int] = set()
        while True:
            self._members.follow_latest(rounds)
            if kind in _OF_SEVERAL:
                self._check_alone(kind, awaited)
            awaited |= {*self._group.members}
            mine = _View(kind, rounds.next_round, rounds.channel.fence(), changed)
            try:
                gathered = self._group.all_gather_object(mine, meets=True)
            except GossipError:
                if self._group.broken is not None and self._members.changed():
                    continue  # nothing was done yet: the living ranks meet again
                self._members.has_failed = True
                self._members.check_store()
                raise
            self._members.has_failed = False
            views = {
                rank: _View(*each) for rank, each in zip(self._group.members, gathered, strict=True)
            }
            rounds.next_round = max(view.next_round for view in views.values())
            epochs = {rank: view.epoch for rank, view in views.items()}
            rounds.channel.resume(epochs, rounds.next_round)
            kinds = {view.kind for view in views.values()}
            if kind == "periodic":
                return kinds == {"periodic"}
            if "periodic" in kinds:
                continue  # they train on, and finally call the same collective as this rank
            for rank, view in views.items():
                if view.changed is not None:
                    raise ReplicaChangedError(f"on rank {rank}: {view.changed}")
            if len(kinds) > 1:
                calls = ", ".join(f"rank {rank} calls {view.kind}" for rank, view in views.items())
                raise UnlikeCallsError(
                    f"the ranks call different collectives: {calls}. Call the same collective of "
                    "the session on every rank, in the same order"
                )
            return True

    def periodically(self, flows: Sequence[Flow], step: int, recorder: Recorder | None) -> bool:
        """Average if it is due in a step and possible; return whether it was done."""
        # After a failure there is no further one until the membership changes.
        has_failed = self._failed_in == self._members.current.generation
        if self._island is not None:  # generations of its ranks may differ for a moment
            has_failed = any(self._island.agree(has_failed))
        if has_failed:
            return False
        start, made = time.perf_counter(), False
        try:
            made = self.enter_collective("periodic")
            if made:
                self.average(flows)
        except EvictedError:
            raise
        except GossipError as error:
            self._failed_in = self._members.current.generation
            logger.warning(
                "rank %d: no periodic average before the membership changes: %s",
                self._group.rank,
                error,
            )
        end = time.perf_counter()
        self.seconds += end - start
        if recorder is not None:
            recorder.span("average", start, end, step=step)
        return made

    def agree(self, value: Any) -> list[Any]:
        """Return every living rank's value, in rank order; raises as `enter_collective`."""
        json.dumps(value)  # raise before the others are involved
        self.enter_collective("agree")
        with self.together():
            return self._gather(value)

    def is_any(self, value: bool) -> bool:
        """Return whether a value is true on some rank; all ranks have met."""
        with self.together():
            return any(self._gather(int(value)))

    def mean_(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their mean over the living ranks, in place."""
        self.enter_collective("mean")
        with self.together():
            for tensor in tensors:
                self._mean_(tensor, is_weighted=False)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Break the collective on all ranks immediately if one raises inside.

        Raise on all ranks of an island if a collective of one has failed inside.
        """
        try:
            yield
        except BaseException as error:
            if not isinstance(error, GossipError):
                self._group.abandon()
            if self._island is not None and error is not self._agreed:
                self._island.close()
            raise
        if self._island is not None:
            failed, self._failed = self._failed, None
            answers = self._island.agree(None if failed is None else first_line(failed))
            whys = [f"rank {n} of this island: {why}" for n, why in enumerate(answers) if why]
            if whys:
                self._agreed = failed or GossipError(whys[0])
                raise self._agreed

    def _try(self, collective: Callable[[], T], own: Callable[[], T]) -> T:
        """Return the result of a collective; in an island, this rank's own after a failure."""
        if self._island is None:
            return collective()
        if self._failed is None:
            try:
                return collective()
            except GossipError as error:
                self._failed = error
        return own()

    @property
    def _share(self) -> float:
        """By what to multiply a value of this rank in a mean, where ranks count unequally."""
        schedule = None if self._rounds is None else self._rounds.schedule
        if not isinstance(schedule, Weighted):
            return 1.0
        return schedule.share(self._group.rank, self._group.members)

    def _mean_(self, tensor: Tensor, *, is_weighted: bool = True) -> Tensor:
        """Replace a tensor by its mean over all ranks, those of an island of equal ranks, too."""
        if is_weighted and (share := self._share) != 1.0:
            tensor.mul_(share)
        self._try(lambda: self._group.mean_(tensor), lambda: tensor)
        if self._island is not None and self._island.is_whole:
            self._island.mean_(tensor)
        return tensor

    def _gather(self, value: Any) -> list[Any]:
        """Return every living rank's value."""
        found = self._try(lambda: self._group.all_gather_object(value), lambda: [value])
        return found if self._island is None else self._island.from_first(found)

    def drain(self) -> None:
        """Mix everything in flight, including late parts; all ranks have met."""
        with self.together():
            if self._rounds is not None:
                self._rounds.drain(COLLECTIVE_SECONDS)

    def restart(self) -> None:
        """Restart rounds, possibly at a lower number, after all ranks loaded a state."""
        if self._rounds is not None:
            channel = self._rounds.channel
            epochs = dict.fromkeys(self._group.members, channel.epoch + 1)
            channel.resume(epochs, self._rounds.next_round)

    def average(self, flows: Sequence[Flow]) -> None:
        """Drain, then set all flows except gradients, and running statistics, to their average."""
        averaged = [flow for flow in flows if flow.phase is not Phase.BEFORE_UPDATE]
        self.drain()
        with self.together():
            shared = self._statistics()
            wide = [self._mean_(t.to(widened(t.dtype), copy=True)) for t in shared]
        for bucket, mean in self.means(averaged):
            bucket.load(mean)
            self.averaged_bytes += mean.nbytes
        with torch.no_grad():
            for statistic, mean in zip(shared, wide, strict=True):
                statistic.copy_(mean)
        if self._rounds is not None and self._rounds.repeats is not None:
            self._rounds.repeats.level()  # the means of rank 0 are over other copies
        self.averages += 1

    def means(self, flows: Sequence[Flow]) -> Iterator[tuple[Bucket, Tensor]]:
        """Yield each bucket and the exact average of its tensors, which lasts until the next.

        Deltas in flight count in it. Changes nothing; all ranks have met, and ask for all buckets.
        """
        with self.together():
            deltas = self._in_flight(flows)
            buckets = [bucket for flow in flows for bucket in flow.buckets]
            memory: dict[tuple[torch.dtype, torch.device, int], Tensor] = {}
            share = self._share

            def total(number: int, bucket: Bucket) -> Tensor:
                dtype = widened(bucket.dtype)
                key = dtype, bucket.device, number % _TOTALS
                if key not in memory or memory[key].numel() < bucket.numel:
                    memory[key] = torch.empty(bucket.numel, dtype=dtype, device=bucket.device)
                flat = bucket.total(memory[key][: bucket.numel])
                if isinstance(bucket, SlicedBucket):
                    flat = bucket.own(flat)
                for delta, weight in deltas.get(bucket, ()):
                    delta.add_to(flat, weight)
                return flat if share == 1.0 else flat.mul_(share)

            totals = (total(number, bucket) for number, bucket in enumerate(buckets))
            means = self._group.means_(totals)
            for number, bucket in enumerate(buckets):
                mean = self._try(partial(next, means), partial(total, number, bucket))
                if isinstance(bucket, SlicedBucket):
                    assert self._island is not None
                    mean = self._island.gather(bucket, mean).to(bucket.device)
                yield bucket, mean

    @contextmanager
    def mean_statistics(self) -> Iterator[None]:
        """Replace the model's running statistics by their mean, inside."""
        with ExitStack() as shown:
            with self.together():
                shown.enter_context(mean_inside(self._statistics(), self._mean_))
            yield

    def distance(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
        """Return the root mean square over ranks of the distance of pairs; a collective."""
        with self.together():
            self.last_distance = distance_to_mean(pairs, self._mean_)
        return self.last_distance

    def state_dict(self) -> dict[str, Any]:
        """Return the counters."""
        names = ("last_distance", "averages", "averaged_bytes", "seconds")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the counters."""
        for name, value in state.items():
            setattr(self, name, value)

    def _check_alone(self, kind: Kind, awaited: Collection[int]) -> None:
        """Refuse to return one replica as the mean of all; warn if the others ended before."""
        gone = self._members.gone_if_alone()
        left = [rank for rank, loss in gone.items() if loss.left and loss.why == GAVE_UP]
        closed = [rank for rank, loss in gone.items() if loss.left and loss.why == LEFT]
        if left and not self._has_refused:
            self._has_refused = True
            raise GossipError(
                f"{_CALLS[kind]} on rank {self._group.rank} comes too late: {named(left)} "
                "waited for this rank in vain, and closed their sessions. The mean of "
                "all is lost. This rank's own replica is unchanged: save it, or call again to get "
                "it as the mean of the one rank that is left"
            )
        who = f"{_CALLS[kind]} on rank {self._group.rank}"
        if missed := sorted({*closed} & {*awaited}):
            raise GossipError(
                f"{who} waited for {named(missed)}, and they closed their sessions without calling "
                "it: the mean of all is lost. Every rank must call it, so never inside `if rank "
                "== 0:`. To save, call session.consensus_state_dict() on every rank. This rank's "
                "own replica is unchanged"
            )
        if gone and not self._has_warned:
            self._has_warned = True
            ends = [
                f"rank {r} {'' if loss.left else 'was lost: '}{loss.why}"
                for r, loss in gone.items()
            ]
            logger.warning(
                "%s is its own replica alone: %s%s",
                *(who, "; ".join(ends)),
                ". Every rank must call it before any closes its session" if closed else "",
            )

    def _in_flight(self, flows: Sequence[Flow]) -> dict[Bucket, list[tuple[Delta, float]]]:
        """Return the deltas that are not mixed yet, and their weights."""
        found: dict[Bucket, list[tuple[Delta, float]]] = {}
        for transfer in self._rounds.in_flight if self._rounds is not None else ():
            if transfer.flow not in flows or self._rounds is None:
                continue
            transfer.wait_all(time.perf_counter() + COLLECTIVE_SECONDS)
            for number in transfer.exchanges.keys() - transfer.finished:
                if (delta := transfer.delta(number)) is not None:
                    weighted = delta, self._rounds.weight(transfer)
                    found.setdefault(transfer.flow.buckets[number], []).append(weighted)
        return found

    def _statistics(self) -> list[Tensor]:
        """Return the running statistics that have equal shapes on all ranks; name others once."""
        own = statistics(self._model)
        shapes = {name: list(buffer.shape) for name, buffer in own.items()}
        gathered = self._gather(shapes)
        names = sorted({name for each in gathered for name in each})
        unlike = [n for n in names if any(each.get(n) != gathered[0].get(n) for each in gathered)]
        if unlike and not self._has_named_unlike:
            self._has_named_unlike = True
            logger.warning(
                "rank %d: running statistics differ in shape between ranks, and stay each rank's "
                "own: %s",
                *(self._group.rank, ", ".join(unlike)),
            )
        return [buffer for name, buffer in own.items() if name not in unlike]
