"""A communication hook that sends DistributedDataParallel's buckets as sparse messages."""

import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossipgrad.comm import Group, agree_on, resolve_group
from gossipgrad.engine import Claim
from gossipgrad.errors import GossipError
from gossipgrad.sparsification._density import (
    DEFAULT_DENSITY,
    AgreedDensity,
    Density,
    describe_density,
    resolve_density,
)
from gossipgrad.sparsification._merged import CarriedOver, MergedGroup
from gossipgrad.sparsification._queue import OrderedQueue
from gossipgrad.sparsification._settings import check_selection

__all__ = ["CommHook", "ddp_hook"]


@runtime_checkable
class Bucket(Protocol):
    """The part of `torch.distributed.GradBucket` that the hook uses."""

    def index(self) -> int:
        """Its number."""
        ...

    def buffer(self) -> Tensor:
        """Its gradients, flat."""
        ...

    def parameters(self) -> list[Tensor]:
        """Its parameters."""
        ...

    def gradients(self) -> list[Tensor]:
        """Views of the buffer in the shapes of the parameters."""
        ...


class CommHook:
    """State of `ddp_hook`: residuals by parameter, and the queue of collectives.

    A collective: all ranks create one, for the same model with the same settings. Then
    `ddp_model.register_comm_hook(state, gg.sparsification.ddp_hook)`.

    DistributedDataParallel limits this hook compared with `gg.sparsify`: groups are its buckets
    (`bucket_cap_mb`), and not planned; when it rebuilds buckets after the first step, residuals
    move with their parameters; a step that a scaler skips restores the residuals only in buckets
    with non-finite values; residuals keep the loss scale of their own step. When a rank dies, the
    backward pass of the others raises.

    Args:
        model: The wrapped module, or the wrapper.
        density: As for `gg.sparsify`.
        select: As for `gg.sparsify`.
        value_dtype: As for `gg.sparsify`.
        process_group: The ranks that take part; by default all. Nothing is sent on it. The hook
            owns a `gg.Group` passed here, and closes it.

    Raises:
        ValueError: For invalid settings, or if a parameter is in a session of `sparsify`.
        AgreementError: If the ranks differ in names, shapes, dtypes or settings.
        GossipError: If a rank dies.

    Example:
        >>> import torch, gossipgrad as gg
        >>> model = torch.nn.Linear(2, 1)
        >>> with gg.sparsification.CommHook(model, density=0.01) as state:
        ...     sorted(state.state_dict())
        ['residuals', 'rounds']
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        density: Density = DEFAULT_DENSITY,
        select: str = "per_group",
        value_dtype: torch.dtype | None = None,
        process_group: dist.ProcessGroup | Group | None = None,
    ) -> None:
        wrapped = getattr(model, "module", None)
        inner = wrapped if isinstance(model, nn.parallel.DistributedDataParallel) else model
        assert isinstance(inner, nn.Module)
        self._names = {id(p): name for name, p in inner.named_parameters()}
        self._per_tensor = select == "per_tensor"
        self._value_dtype = value_dtype
        self._rounds = 0
        self._rounds_agree = False  # whether all ranks are known to be in the same round
        self._groups: dict[int, tuple[tuple[str, ...], MergedGroup]] = {}
        self._loaded: dict[str, Tensor] = {}
        self._group = resolve_group(process_group, asks="CommHook()")
        self._claim = Claim("CommHook")
        try:
            self._claim.take({n: p for n, p in inner.named_parameters() if p.requires_grad})
            check_selection(select, value_dtype)
            resolved = resolve_density(density, list(self._names.values()))
            described = {"select": select, "value_dtype": value_dtype}
            agree_on(self._group, inner, [], {"density": describe_density(resolved), **described})
        except BaseException:
            self._claim.release()
            self._group.close()
            raise
        self._asked = resolved
        self._density = AgreedDensity(resolved, self._group)
        self._queue = OrderedQueue(f"gossipgrad comm hook, rank {self._group.rank}")
        self._finalizer = weakref.finalize(self, _leave, self._queue, self._group)
        self._finalizer.atexit = False  # pyrefly: ignore[missing-attribute]

    def state_dict(self) -> dict[str, Any]:
        """Return rounds and residuals by name, in host memory; save each rank's own."""
        residuals = {name: value.to("cpu", copy=True) for name, value in self._residuals().items()}
        return {"rounds": self._rounds, "residuals": residuals}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`, on every rank between the same steps; local.

        The next step raises if the states are of different rounds. If only some ranks have loaded,
        the backward pass of the others raises, and the ranks that have loaded wait for them up to
        the timeout of the group: terminate them.

        Raises:
            ValueError: It has other parameters.
        """
        if unknown := sorted({*state["residuals"]} - {*self._names.values()}):
            raise ValueError(
                f"a residual is of {unknown[0]!r}, which the model does not have: load the state "
                "of the same model"
            )
        self._rounds, self._rounds_agree = state["rounds"], False
        # A rank that has not loaded joins no round of ranks that have, but sees that they
        # continued.
        self._group.enter(self._group.generation + 1, self._group.members)
        self._density = AgreedDensity(self._asked, self._group)
        self._groups.clear()
        self._loaded = {name: value.clone() for name, value in state["residuals"].items()}

    def close(self) -> None:
        """End the thread and leave the group; local. The hook then raises."""
        self._claim.release()
        self._finalizer()

    def __enter__(self) -> "CommHook":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def exchange(self, bucket: Bucket) -> torch.futures.Future[Tensor]:
        """Exchange a bucket, for `ddp_hook`."""
        if not self._finalizer.alive:
            raise GossipError(
                "the state of the communication hook is closed: a wrapper cannot change its hook, "
                "make a new one around the model"
            )
        if bucket.index() == 0:
            self._begin_round()
        made = self._made(bucket)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        made.begin(list(bucket.gradients()))
        self._queue.put(partial(self._finish, made, bucket, future))
        return future

    def _begin_round(self) -> None:
        """Check that messages will have one size on all ranks; with nothing in flight."""
        if not self._rounds_agree:
            rounds_of = self._group.all_gather_object(self._rounds)
            for rank, rounds in enumerate(rounds_of):
                if rounds != rounds_of[0]:
                    raise GossipError(
                        f"the state of the communication hook is after {rounds} rounds on rank "
                        f"{rank}, but {rounds_of[0]} on rank 0: load states that all ranks saved "
                        "after the same step"
                    )
            self._rounds_agree = True
        self._density.at([""], self._rounds)
        self._rounds += 1

    def _finish(
        self, made: MergedGroup, bucket: Bucket, future: torch.futures.Future[Tensor]
    ) -> None:
        """Finish a bucket, on the thread of collectives."""
        grads = list(bucket.gradients())
        try:
            made.exchange(self._group)
        except BaseException as error:
            made.roll_back(grads)
            failed: Any = future  # the stub's type has no exception
            # Not raised here: later buckets have their own futures.
            failed.set_exception(error if isinstance(error, Exception) else GossipError(str(error)))
            return
        if made.finite:
            made.accept()
        else:
            made.roll_back(grads)
        made.write(grads)
        future.set_result(bucket.buffer())

    def _made(self, bucket: Bucket) -> MergedGroup:
        names = tuple(self._names[id(parameter)] for parameter in bucket.parameters())
        known = self._groups.get(bucket.index())
        if known is None or known[0] != names:
            if known is not None:  # buckets were rebuilt: all of them change
                self._loaded = self._residuals()
                self._groups.clear()
            made = MergedGroup(
                bucket.parameters(),
                "sparse",
                world_size=self._group.world_size,
                per_tensor=self._per_tensor,
                value_dtype=self._value_dtype,
                momentum=None,
            )
            made.load([CarriedOver(self._loaded.pop(name, None)) for name in names])
            known = self._groups[bucket.index()] = names, made
        made = known[1]
        densities = self._density.at(names, self._rounds - 1)
        made.use_densities(densities)
        return made

    def _residuals(self) -> dict[str, Tensor]:
        residuals = dict(self._loaded)
        for names, made in self._groups.values():
            pairs = zip(names, made.carried_over(), strict=True)
            residuals |= {name: of.residual for name, of in pairs if of.residual is not None}
        return residuals


def ddp_hook(state: CommHook, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A communication hook for `DistributedDataParallel.register_comm_hook`; see `CommHook`.

    Selects from the bucket plus its residual, and gathers the messages of all ranks on a separate
    thread while backward continues.
    """
    return state.exchange(bucket)


def _leave(queue: OrderedQueue, group: Group) -> None:
    queue.close()
    group.close()
