"""The base of second-order optimizers: units, refreshes of roots, and storage of state."""

import math
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from gossipgrad.comm import Recorder, local, widened
from gossipgrad.errors import GossipError
from gossipgrad.optim import ADAMW, MatrixOptimizer, Parameters
from gossipgrad.second_order._blocks import Block, Unit, cut, make_units
from gossipgrad.second_order._refresh import (
    Background,
    Policy,
    Refresher,
    RefreshStats,
    Root,
    Synchronous,
    Value,
)
from gossipgrad.second_order._tiers import Store, StoreStats, Tiers

if TYPE_CHECKING:
    from gossipgrad.second_order._coherence import RootSharing

__all__ = ["SecondOrder", "check_fraction", "check_sizes"]

Averaged = tuple[nn.Parameter, str, tuple[int, ...], torch.dtype, Callable[[], Tensor | None]]


class SecondOrder(MatrixOptimizer):
    """The base of `SOAP`, `KLShampoo` and `Shampoo`.

    A subclass defines the tensors of a unit (`shapes`), updates a unit (`update_unit`), creates the
    job that computes its roots (`make_job`) and applies its result (`apply_root`).

    Blocks without a finite gradient in a step keep their weights and state; their unit still
    counts the step, for its bias correction and the age of its roots, unless none of its blocks has
    one. New units are created for parameters in the step of their first gradient.

    From that step on `state` has the same keys for a parameter, and tensors alone, so that
    `torch.distributed.checkpoint` can load what it saved. They are empty between steps, except the
    number of steps; `state_dict()` fills them with copies.

    Args:
        params: See `MatrixOptimizer`.
        settings: Settings of groups of matrices, with `"max_dim"`.
        adamw_settings: Settings of groups of the rest.
        weight_decay: Decoupled weight decay of all parameters.
        refresh: When and where roots are computed.
        storage: Tiers of the state; None: on the parameters' device.
        matrices: Patterns of names.
        adamw: Patterns of names.
    """

    def __init__(
        self,
        params: Parameters,
        *,
        settings: dict[str, Any],
        adamw_settings: dict[str, Any],
        weight_decay: float,
        refresh: Policy | None,
        storage: Tiers | None,
        matrices: Sequence[str],
        adamw: Sequence[str],
    ) -> None:
        self.refresh = Synchronous() if refresh is None else refresh
        if not isinstance(self.refresh, Policy):
            raise ValueError(
                f"refresh={refresh!r} does not say when: give gg.Synchronous(every=10), "
                "gg.Staggered(every=10) or gg.Background(every=10, max_staleness=5)"
            )
        if not isinstance(storage, Tiers | None):
            raise ValueError(
                f"storage={storage!r} is no gg.Tiers(device_bytes=..., host_bytes=..., disk=...): "
                "give one, or None to keep all state on the parameters' device"
            )
        self.storage = storage
        self._start_anew()
        super().__init__(
            params,
            settings=settings,
            adamw_settings=adamw_settings,
            weight_decay=weight_decay,
            matrices=matrices,
            adamw=adamw,
            with_head=True,
        )
        self._check_budget()

    can_resize = False
    averaged: ClassVar[tuple[str, ...]] = ("left", "right")
    """Tensors of a unit that may be averaged over ranks, as they do not depend on a rank's
    basis."""

    # -- what a subclass does ----------------------------------------------------------------------

    def shapes(self, unit: Unit) -> dict[str, tuple[int, ...]]:
        """Return names and shapes of the tensors of each block of a unit."""
        raise NotImplementedError

    def update_unit(
        self,
        unit: Unit,
        group: Mapping[str, Any],
        gradient: Tensor,
        rows: Sequence[int] | None,
    ) -> tuple[Tensor, float] | None:
        """Process gradients; return the update to subtract from the blocks, and its factor.

        Args:
            unit: The unit.
            group: The settings of its group.
            gradient: One matrix per block; do not write to it.
            rows: Indices of these blocks; None: all.
        """
        raise NotImplementedError

    def make_job(self, unit: Unit, group: Mapping[str, Any]) -> Callable[[], tuple[Tensor, ...]]:
        """Return a function that computes a unit's roots from a snapshot."""
        raise NotImplementedError

    def root_parts(self, unit: Unit) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Return shapes and types of a job's result."""
        return [
            ((len(unit.blocks), *shape), unit.dtype)
            for name, shape in self.shapes(unit).items()
            if _is_root(name)
        ]

    def apply_root(self, unit: Unit, value: tuple[Tensor, ...]) -> None:
        """Put a job's result into the store."""
        raise NotImplementedError

    def describe_blocks(self, group: Mapping[str, Any]) -> list[str]:
        """Return the size of blocks and the refresh policy, for `repr`."""
        policy = self.refresh
        late = f", {policy.max_staleness} late" if isinstance(policy, Background) else ""
        how = type(policy).__name__.lower()
        return [f"blocks of {group['max_dim']}", f"{how} every {policy.every}{late}"]

    # -- what users call ---------------------------------------------------------------------------

    @property
    def refresh_stats(self) -> RefreshStats:
        """Counters of roots: refreshes, failures, waits, the oldest used."""
        return self.refresher.stats

    @property
    def storage_stats(self) -> StoreStats:
        """Bytes in each tier, and counters of moves."""
        return self._open_store().stats

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have finite gradients; return the closure's result.

        Raises:
            RuntimeError: A gradient is sparse; a unit has no root, or one past its age bound; a
                tier is full or its file cannot be read; or the optimizer was closed. Units before
                the one that failed have been updated. See `Refresher.current` and `Store.use`.
        """
        if self._is_closed:
            raise GossipError(
                "the optimizer was closed: call close() after the last step. To continue, create a "
                "new one and load its state_dict()"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        held = self.parameters_to_update()
        for place, (group, parameters) in enumerate(zip(self.param_groups, held, strict=True)):
            if not parameters:
                continue
            if group["role"] == ADAMW:
                self.adamw(group, parameters, self.gradients(parameters))
                continue
            if fresh := [p for p in parameters if p not in self._cohorts]:
                cohort = 1 + max(self._cohorts.values(), default=-1)
                self._add_units(place, fresh, cohort)
            torch._foreach_add_([self.state[p]["step"] for p in parameters], 1)
            updated = set(parameters)
            for unit in self._units:
                if unit.group == place:
                    self._step_unit(unit, group, updated)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """See `torch.optim.Optimizer.state_dict`: plain tensors for any storage.

        Waits for all jobs; a root to be applied later is part of the state, so a run that loads the
        state continues bit for bit. Each block's tensors are named `"NAME.NUMBER"`.

        Raises:
            GossipError: A worker has not finished in time; or the optimizer was closed, and its
                state was on disk.
        """
        with self.filled_state():
            return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `torch.optim.Optimizer.load_state_dict`; running jobs are dropped.

        Raises:
            ValueError: It is the state of another kind of optimizer, or of other parameters.
        """
        super().load_state_dict(state_dict)
        self.take_state()

    @property
    def sharing(self) -> "RootSharing | None":
        """The current sharing of roots with other ranks, or None: see `gg.share_roots()`."""
        return self.__dict__.get("_sharing")

    @sharing.setter
    def sharing(self, sharing: "RootSharing | None") -> None:
        self._sharing = sharing
        self.refresher.share = None if sharing is None else sharing.submit

    @property
    def recorder(self) -> Recorder | None:
        """A recorder of a span for each root, such as a `gossipgrad.report.Trace`."""
        return self.__dict__.get("_recorder")

    @recorder.setter
    def recorder(self, recorder: Recorder | None) -> None:
        self._recorder = self.refresher.recorder = recorder

    def state_to_average(self) -> Iterator[Averaged]:
        """Return the state that `gg.gossip(payload="weights+state")` averages.

        These are factors and AdamW's moments. Moments in a rank's own bases are not averaged.

        Raises:
            GossipError: State is in tiers, not only on the device.
        """
        if self.storage is not None:
            raise GossipError(
                "payload='weights+state' averages factors in place, and storage= moves them: "
                "use payload='weights', or leave storage out"
            )
        shapes = {}
        for unit in self.plan():
            shapes |= {(block.parameter, block.number): self.shapes(unit) for block in unit.blocks}
        for group in self.param_groups:
            for parameter in group["params"]:
                if not parameter.requires_grad:
                    continue
                if group["role"] == ADAMW:
                    for name in ("exp_avg", "exp_avg_sq"):
                        read = partial(self._read_state, parameter, name)
                        shape = tuple(local(parameter).shape)
                        yield parameter, name, shape, widened(parameter.dtype), read
                    continue
                for block in cut(parameter, group["max_dim"]):
                    for name, shape in shapes[parameter, block.number].items():
                        if name in self.averaged:
                            read = partial(self._read_block, block, name)
                            key, dtype = f"{name}.{block.number}", widened(parameter.dtype)
                            yield parameter, key, shape, dtype, read

    def plan(self) -> list[Unit]:
        """Return the units; before the first step those if all parameters have gradients.

        In that case they are not the objects that the optimizer will use.
        """
        units = list(self._units)
        for place, group in enumerate(self.param_groups):
            if group["role"] != ADAMW and not self._units:
                trained = [p for p in group["params"] if p.requires_grad]
                units += make_units(
                    trained, group["max_dim"], first=len(units), group=place, cohort=0
                )
        return units

    def parts(self, index: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Return shapes and types of an existing unit's roots."""
        return self.root_parts(self._units[index])

    def close(self) -> None:
        """End threads and free files; no further step is possible. May be called twice.

        `state_dict()` still works, except with a disk tier, whose state is lost.
        """
        self._is_closed = True
        self.refresher.close()
        if self.store is not None:
            self.store.close()

    def __getstate__(self) -> dict[str, Any]:
        with self.filled_state():
            state = defaultdict(dict, {p: dict(each) for p, each in self.state.items()})
            return super().__getstate__() | {
                "state": state,
                "refresh": self.refresh,
                "storage": self.storage,
            }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "refresh" in state:  # a copy, not torch's load_state_dict()
            self._start_anew()
            self.take_state()

    # -- for subclasses ----------------------------------------------------------------------------

    @contextmanager
    def use(
        self,
        unit: Unit,
        names: Sequence[str],
        rows: Sequence[int] | None = None,
        *,
        is_written: bool = True,
    ) -> Iterator[list[Tensor]]:
        """Yield rows of a unit's tensors on the device; in-place changes are kept."""
        keys = [(unit.index, name) for name in names]
        with self._open_store().use(keys, is_written=is_written) as stacks:
            if rows is None:
                yield stacks
                return
            parts = [stack[rows] for stack in stacks]
            yield parts
            if is_written:
                for stack, part in zip(stacks, parts, strict=True):
                    stack[rows] = part

    def put(self, unit: Unit, name: str, tensor: Tensor) -> None:
        """Store a new tensor for a unit."""
        self._open_store().put((unit.index, name), tensor)

    def renew(self, unit: Unit, group: Mapping[str, Any], step: int) -> Root | None:
        """Submit the unit's roots if they are due, and apply those for this step."""
        if self.refresher.is_due(unit.index, step):
            self.refresher.submit(unit.index, step, self.make_job(unit, group))
        return self.refresher.current(unit.index, step)

    def snapshot(self, unit: Unit, *names: str) -> list[Tensor]:
        """Copy tensors of a unit, to the host if workers compute there."""
        with self.use(unit, names, is_written=False) as tensors:
            is_far = isinstance(self.refresh, Background)
            return [t.to("cpu", copy=True) if is_far else t.clone() for t in tensors]

    # -- units and their state ---------------------------------------------------------------------

    def _start_anew(self) -> None:
        self._is_closed = False
        self._units: list[Unit] = []
        self._cohorts: dict[nn.Parameter, int] = {}
        self._places: dict[tuple[nn.Parameter, int], tuple[Unit, int]] = {}
        self.store: Store | None = None
        self.refresher = Refresher(self.refresh, 0, self._publish)
        self.sharing, self.recorder = self.sharing, self.recorder

    def _open_store(self) -> Store:
        if self.store is None:
            device = self.param_groups[0]["params"][0].device
            self.store = Store(self.storage, device)
        return self.store

    def _check_budget(self) -> None:
        """Raise `ValueError` early if a unit does not fit the device's budget."""
        if self.storage is None or self.storage.device_bytes is None:
            return
        largest = 0
        for unit in self.plan():
            numbers = sum(_count(shape) for shape in self.shapes(unit).values())
            largest = max(largest, len(unit.blocks) * numbers * unit.dtype.itemsize)
        self._open_store().check(largest)

    def _add_units(self, place: int, parameters: Sequence[nn.Parameter], cohort: int) -> list[Unit]:
        group = self.param_groups[place]
        units = make_units(
            parameters, group["max_dim"], first=len(self._units), group=place, cohort=cohort
        )
        for unit in units:  # the part that can fail comes first, so that it can be repeated
            device = unit.blocks[0].parameter.device
            for name, shape in self.shapes(unit).items():
                stack = torch.zeros(len(unit.blocks), *shape, dtype=unit.dtype, device=device)
                self.put(unit, name, stack)
        for parameter in parameters:
            self.state[parameter] |= {
                "step": torch.tensor(0.0, device="cpu"),
                "cohort": torch.tensor(cohort, device="cpu"),
            }
        for unit in units:
            self._empty_state(unit)
            places = ((block.parameter, block.number) for block in unit.blocks)
            self._places |= {place: (unit, row) for row, place in enumerate(places)}
        self._units += units
        self._cohorts |= dict.fromkeys(parameters, cohort)
        self.refresher.grow(len(self._units))
        return units

    def _empty_state(self, unit: Unit) -> None:
        """Leave empty tensors under the keys that `filled_state` fills."""
        names = ["counts", *self.shapes(unit)]
        if self._is_late:
            names += ["pending", *(f"pending{i}" for i, _ in enumerate(self.root_parts(unit)))]
        for block in unit.blocks:
            empty = {f"{name}.{block.number}": torch.empty(0) for name in names}
            self.state[block.parameter] |= empty

    @property
    def _is_late(self) -> bool:
        """Whether computed roots may wait to be applied."""
        return isinstance(self.refresh, Background) and self.refresh.max_staleness > 0

    def _read_state(self, parameter: nn.Parameter, name: str) -> Tensor | None:
        return self.state.get(parameter, {}).get(name)

    def _read_block(self, block: Block, name: str) -> Tensor | None:
        """Return a block's tensor itself, None before its first gradient."""
        place = self._places.get((block.parameter, block.number))
        if place is None:
            return None
        unit, row = place
        with self.use(unit, [name]) as (stack,):
            return stack[row]

    def _step_unit(
        self, unit: Unit, group: Mapping[str, Any], updated: Container[nn.Parameter]
    ) -> None:
        rows = [i for i, block in enumerate(unit.blocks) if block.parameter in updated]
        if not rows:
            return
        is_all = len(rows) == len(unit.blocks)
        found = self.update_unit(unit, group, unit.gather(rows), None if is_all else rows)
        unit.step += 1
        if found is None:
            return
        update, factor = found
        lr = float(group["lr"])
        for row, each in zip(rows, update, strict=True):
            block = unit.blocks[row]
            whole = local(block.parameter)
            matrix = whole if whole.ndim == 2 else whole.flatten(1)
            self.subtract(block.of(matrix), each, lr * factor, lr * group["weight_decay"])
            if matrix.data_ptr() != whole.data_ptr():  # channels last: the matrix was a copy
                whole.copy_(matrix.view(whole.shape))

    def _publish(self, index: int, root: Root) -> None:
        unit = self._units[index]
        self.apply_root(unit, root.value)
        unit.has_roots = True

    @contextmanager
    def filled_state(self) -> Iterator[None]:
        """Fill `state` from the store inside, one dictionary per parameter, as torch expects."""
        if self._is_closed and self.storage is not None and self.storage.disk is not None:
            raise GossipError(
                "the optimizer was closed, and with that its state on disk is gone: call "
                "state_dict() before close()"
            )
        saved = self.refresher.state_dict()
        try:
            for unit in self._units:
                names = list(self.shapes(unit))
                pending = self.refresher.pending(unit.index)
                counts = [unit.step, *(saved[each][unit.index] for each in _COUNTS)]
                is_pending = torch.tensor(int(pending is not None), device="cpu")
                if pending is None and self._is_late:
                    pending = tuple(torch.zeros(s, dtype=d) for s, d in self.root_parts(unit))
                with self.use(unit, names, is_written=False) as stacks:
                    for row, block in enumerate(unit.blocks):
                        state = self.state[block.parameter]
                        state[f"counts.{block.number}"] = torch.tensor(counts, device="cpu")
                        for name, stack in zip(names, stacks, strict=True):
                            state[f"{name}.{block.number}"] = stack[row].clone()
                        if pending is not None:
                            state[f"pending.{block.number}"] = is_pending
                        for index, part in enumerate(pending or ()):
                            state[f"pending{index}.{block.number}"] = part[row].clone()
            yield
        finally:
            for parameter in self._cohorts:  # new ones: torch's state_dict() keeps the filled ones
                kept = self.state[parameter]
                self.state[parameter] = {k: kept[k].clone() for k in ("step", "cohort")}
            for unit in self._units:
                self._empty_state(unit)

    def take_state(self) -> None:
        """Build units from `state`, and empty their entries in it."""
        self.close()
        self._start_anew()
        states: dict[nn.Parameter, dict[str, Any]] = {}
        cohorts: dict[tuple[int, int], list[nn.Parameter]] = {}
        for place, group in enumerate(self.param_groups):
            for parameter in group["params"] if group["role"] == self.role else ():
                state = self.state.pop(parameter, None)
                if not state:
                    continue
                if "cohort" not in state:
                    raise ValueError(
                        f"the state has {sorted(state)} for a parameter of shape "
                        f"{tuple(parameter.shape)}: it is not one of gg.{type(self).__name__}"
                    )
                states[parameter] = state
                cohorts.setdefault((int(state["cohort"]), place), []).append(parameter)
        counts: dict[str, list[int]] = {name: [] for name in _COUNTS}
        pending: list[Value | None] = []
        for (cohort, place), parameters in sorted(cohorts.items(), key=lambda each: each[0]):
            for unit in self._add_units(place, parameters, cohort):
                kept = [states[block.parameter] for block in unit.blocks]
                self._fill_unit(unit, kept)
                first = unit.blocks[0].number
                unit.step, *numbers = map(int, kept[0][f"counts.{first}"])
                for name, number in zip(_COUNTS, numbers, strict=True):
                    counts[name].append(number)
                unit.has_roots = counts["versions"][-1] >= 0
                is_pending = int(kept[0].get(f"pending.{first}", 0))
                pending.append(self._pending_of(unit, kept) if is_pending else None)
            for parameter in parameters:
                self.state[parameter]["step"].copy_(states[parameter]["step"])
        self.refresher.load_state_dict(counts, pending=pending)

    def _pending_of(self, unit: Unit, states: Sequence[Mapping[str, Any]]) -> Value | None:
        """Read the result of a job that no step had applied when the state was saved."""
        blocks = list(zip(unit.blocks, states, strict=True))
        if any(f"pending0.{b.number}" not in state for b, state in blocks):
            return None
        return tuple(
            torch.stack([state[f"pending{place}.{block.number}"] for block, state in blocks])
            for place in range(len(self.root_parts(unit)))
        )

    def _fill_unit(self, unit: Unit, states: Sequence[Mapping[str, Any]]) -> None:
        device = unit.blocks[0].parameter.device
        for name, shape in self.shapes(unit).items():
            keys = [f"{name}.{block.number}" for block in unit.blocks]
            stack = torch.empty(len(keys), *shape, dtype=unit.dtype, device=device)
            for into, key, state in zip(stack, keys, states, strict=True):
                if key not in state or tuple(state[key].shape) != tuple(shape):
                    raise ValueError(
                        f"the state has no {key!r} of shape {tuple(shape)}: it is not one of "
                        f"gg.{type(self).__name__} for these parameters and max_dim"
                    )
                into.copy_(state[key])
            self.put(unit, name, stack)


_COUNTS = ("versions", "steps", "submitted", "failures")


def _is_root(name: str) -> bool:
    """Whether it is created by a refresh, not with the unit."""
    return name.endswith(("_basis", "_root"))


def _count(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def check_fraction(group: Mapping[str, Any], name: str) -> None:
    """Raise `ValueError` unless a setting is None or from 0 to below 1."""
    value = group[name]
    if value is not None and not 0 <= value < 1:
        raise ValueError(f"{name}={value!r} must be a number from 0 to below 1, or None")


def check_sizes(group: Mapping[str, Any], *names: str) -> None:
    """Raise `ValueError` for settings that are not positive and finite, or an invalid `max_dim`."""
    for name in names:
        value = group[name]
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if name == "max_dim" and not (is_whole and value >= 1):
            raise ValueError(f"{name}={value!r} must be a whole number from 1")
        if not 0 < value < math.inf:
            raise ValueError(f"{name}={value!r} must be a positive number")
