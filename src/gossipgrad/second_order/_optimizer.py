"""The base of second-order optimizers: units of blocks, their state, and their roots."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from gossipgrad.comm import local, widened
from gossipgrad.errors import GossipError
from gossipgrad.optim import (
    ADAMW,
    MatrixOptimizer,
    Parameters,
    finite_flags,
    is_number,
    warn_of_nonfinite,
)
from gossipgrad.second_order._blocks import Unit, make_units
from gossipgrad.second_order._refresh import (
    Job,
    Ready,
    Refresh,
    Refresher,
    RefreshStats,
    Value,
    Work,
    completed,
    is_due,
    is_used,
    phases_of,
)
from gossipgrad.second_order._streams import LateCount
from gossipgrad.second_order._symmetric import packed_shape
from gossipgrad.second_order._tiers import HostRoots, Tiers

if TYPE_CHECKING:
    from gossipgrad.second_order._sharding import Sharding

__all__ = ["FACTORS", "SecondOrder", "factor_beta"]

FACTORS = ("left", "right")
Averaged = tuple[nn.Parameter, str, tuple[int, ...], torch.dtype, Callable[[], Tensor | None]]


class SecondOrder(MatrixOptimizer):
    """The base of `SOAP`, `KLShampoo` and `Shampoo`.

    A subclass defines the tensors of a unit (`shapes`) besides its factors and roots, updates a
    unit (`update_unit`), says how roots are found (`find_roots`) and what else changes with them
    (`change_root`).

    Blocks without a finite gradient in a step keep their weights and state; their unit still
    counts the step. New units are created for parameters in the step of their first gradient. On an
    accelerator, where looking at a gradient would wait for it, a gradient that is not finite counts
    as zero, and the weights of its parameter stay as they are.

    `state` has a parameter's number of steps, and views of the stacked tensors of its blocks, as
    `"NAME.NUMBER"`. `state_dict()` copies none of them. With a delay it has the roots that wait to
    be used, too, new zeros where none does, so that a run which loads it continues bit for bit.

    Args: as those of `gg.SOAP`, with `settings` of groups of matrices, `"max_dim"` among them, and
    `adamw_settings` of groups of the rest.
    """

    def __init__(
        self,
        params: Parameters,
        *,
        settings: dict[str, Any],
        adamw_settings: dict[str, Any],
        weight_decay: float,
        refresh: Refresh | None,
        root_dtype: torch.dtype | None,
        storage: Tiers | None,
        matrices: Sequence[str],
        adamw: Sequence[str],
    ) -> None:
        self.refresh = Refresh() if refresh is None else refresh
        if not isinstance(self.refresh, Refresh):
            raise ValueError(
                f"refresh={refresh!r} does not say when: give gg.Refresh(every=10, delay=0)"
            )
        if root_dtype is not None and root_dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(
                f"root_dtype={root_dtype} must be torch.bfloat16, torch.float32 or None"
            )
        if not isinstance(storage, Tiers | None):
            raise ValueError(
                f'storage={storage!r} must be gg.Tiers(host="pinned"), or None to keep all state '
                "on the parameters' device"
            )
        self.root_dtype, self.storage = root_dtype, storage
        self.refresher, self.sharding = Refresher(self.refresh), None
        self._begin()
        super().__init__(
            params,
            settings=settings,
            adamw_settings=adamw_settings,
            weight_decay=weight_decay,
            matrices=matrices,
            adamw=adamw,
            with_head=True,
        )

    can_resize = False
    refresher: Refresher
    """Computes roots; its `recorder`, such as a `gossipgrad.report.Trace`, gets a span for each."""
    sharding: "Sharding | None"
    """The owners of units, where state is sharded."""
    averaged: ClassVar[tuple[str, ...]] = FACTORS
    """Tensors of a unit that may be averaged over ranks, as they do not depend on a rank's
    basis."""
    roots: ClassVar[tuple[str, str]]
    """Names of the two roots or bases of a unit."""
    is_ordered = False
    """Whether a refresh orders the columns of bases."""
    first_call: ClassVar[int] = 0
    """The step of a unit, from 0, that first uses roots."""

    # -- what a subclass does ----------------------------------------------------------------------

    def shapes(self, unit: Unit) -> dict[str, tuple[int, ...]]:
        """Return names and shapes of the tensors of each block of a unit, but its roots."""
        return {name: packed_shape(size) for name, size in zip(FACTORS, unit.shape, strict=True)}

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

    def find_roots(self, unit: Unit, group: Mapping[str, Any]) -> Callable[..., Value]:
        """Return `Work.find` for factors as they are now."""
        raise NotImplementedError

    def change_root(self, unit: Unit, side: int, new: Tensor, order: Tensor | None) -> None:
        """Change what depends on a root, which is still the old one."""

    def check_group(self, group: dict[str, Any]) -> None:
        """Raise `ValueError` for settings out of range."""
        max_dim, beta = group["max_dim"], group.get("shampoo_beta")
        if isinstance(max_dim, bool) or not isinstance(max_dim, int) or max_dim < 1:
            raise ValueError(f"max_dim={max_dim!r} must be a whole number from 1")
        if beta is not None and not (is_number(beta) and 0 <= beta < 1):
            raise ValueError(f"shampoo_beta={beta!r} must be a number from 0 to below 1, or None")

    def describe_group(self, group: Mapping[str, Any]) -> list[str]:
        """Return betas, the size of blocks and the refresh policy, for `repr`."""
        factors, late = group.get("shampoo_beta"), self.refresh.delay
        return [
            f"betas {tuple(group['betas'])}",
            *([] if factors is None else [f"factors {factors:g}"]),
            f"blocks of {group['max_dim']}",
            f"roots every {self.refresh.every}" + (f", {late} late" if late else ""),
        ]

    # -- what users call ---------------------------------------------------------------------------

    @property
    def refresh_stats(self) -> RefreshStats:
        """Counters of roots: refreshes, failures, waits."""
        return self.refresher.stats

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have finite gradients; return the closure's result.

        It waits for a root that is `delay` steps old and not ready. A root that fails leaves the
        old one in use, warns once, and is counted in `refresh_stats`.

        Raises:
            RuntimeError: A gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        held, finite = self._held()
        if not any(held):
            return loss
        fresh = {
            index: found
            for index, (group, parameters) in enumerate(zip(self.param_groups, held, strict=True))
            if group["role"] != ADAMW
            and (found := [p for p in parameters if p not in self._cohorts])
        }
        if fresh:
            self._add_units(fresh, 1 + max(self._cohorts.values(), default=-1))
        for group, parameters in zip(self.param_groups, held, strict=True):
            if group["role"] == ADAMW and parameters:
                self.adamw(group, parameters, self.gradients(parameters, finite), finite)
        updated = {p for parameters in held for p in parameters}
        mine = [unit for unit in self._units if self._is_mine(unit)]
        for unit, following in pairwise([*mine, None]):
            assert unit is not None
            if self._host_roots is not None and following is not None:
                self._host_roots.fetch(following)
            self._step_unit(unit, self.param_groups[unit.group], updated, finite)
            if self._host_roots is not None:
                self._host_roots.forget(unit)
        if self.sharding is not None:
            self.sharding.broadcast(self._units)
        for unit in self._units:
            unit.step += 1
        for parameter in self._cohorts:
            self.state[parameter]["step"] += 1
        return loss

    def state_dict(self) -> dict[str, Any]:
        """See `torch.optim.Optimizer.state_dict`; its tensors are those of the optimizer.

        It waits for roots that are being computed.
        """
        with self.filled_state():
            return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `torch.optim.Optimizer.load_state_dict`; running jobs are dropped.

        Raises:
            ValueError: It is the state of another kind of optimizer, or of other parameters. The
                optimizer keeps what it has.
        """
        before = self.__dict__.copy()
        try:
            super().load_state_dict(state_dict)
            self.take_state()
        except BaseException:
            self.__dict__ |= before
            raise

    def state_to_average(self) -> Iterator[Averaged]:
        """Return the state that `gg.gossip(payload="weights+state")` averages.

        These are factors and AdamW's moments. Moments in a rank's own bases are not averaged.
        """
        for index, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                if not parameter.requires_grad:
                    continue
                found = dict.fromkeys(("exp_avg", "exp_avg_sq"), tuple(local(parameter).shape))
                if group["role"] != ADAMW:
                    found = {
                        f"{name}.{block.number}": shape
                        for unit in self._make_units({index: [parameter]}, 0)
                        for name, shape in self.shapes(unit).items()
                        for block in unit.blocks
                        if name in self.averaged
                    }
                for key, shape in found.items():
                    read = partial(self._read_state, parameter, key)
                    yield parameter, key, shape, widened(parameter.dtype), read

    def plan(self) -> list[Unit]:
        """Return the units; before the first step those if all parameters have gradients.

        In that case they are not the objects that the optimizer will use.
        """
        if self._units:
            return list(self._units)
        trained = {
            index: [p for p in group["params"] if p.requires_grad]
            for index, group in enumerate(self.param_groups)
            if group["role"] != ADAMW
        }
        return self._make_units(trained, 0)

    def close(self) -> None:
        """End threads, after the roots that they compute; a later step starts new ones."""
        for unit in self._units:
            for job in unit.jobs.values():
                self.refresher.wait(job)
        self.refresher.close()

    def __getstate__(self) -> dict[str, Any]:
        if self.sharding is not None:
            raise GossipError(
                "an optimizer with sharded state cannot be copied or pickled: save its "
                "state_dict(), and load it into one that gg.share_roots() shards, too"
            )
        with self.filled_state():
            state = defaultdict(dict, {p: dict(each) for p, each in self.state.items()})
        kept = {name: getattr(self, name) for name in ("refresh", "root_dtype", "storage")}
        return super().__getstate__() | {"state": state} | kept

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "refresh" in state:  # a copy, not torch's load_state_dict()
            self.refresher, self.sharding = Refresher(self.refresh), None
            self.take_state()

    # -- for subclasses ----------------------------------------------------------------------------

    @contextmanager
    def use(
        self, unit: Unit, names: Sequence[str], rows: Sequence[int] | None = None
    ) -> Iterator[list[Tensor]]:
        """Yield rows of a unit's tensors; in-place changes are kept."""
        stacks = [unit.tensors[name] for name in names]
        if rows is None:
            yield stacks
            return
        parts = [stack[rows] for stack in stacks]
        yield parts
        for stack, part in zip(stacks, parts, strict=True):
            stack[rows] = part

    def current_roots(self, unit: Unit, rows: Sequence[int] | None = None) -> list[Tensor]:
        """Return rows of a unit's roots on its device, in the type of its other state."""
        stacks = [unit.tensors[name] for name in self.roots]
        if self._host_roots is not None:
            stacks = self._host_roots.take(unit)
        if rows is not None:
            stacks = [stack[rows] for stack in stacks]
        return [stack.to(unit.dtype) for stack in stacks]

    def renew(self, unit: Unit, group: Mapping[str, Any]) -> None:
        """Use the roots whose time it is, and begin those that are due, from factors as now."""
        call, policy = unit.step - self.first_call, self.refresh
        if call < 0:
            return
        for side, (factor, root) in enumerate(zip(FACTORS, self.roots, strict=True)):
            phase = unit.phases[side]
            if side in unit.jobs and is_used(call, phase, policy):
                self._use_root(unit, side, unit.jobs[side])
                del unit.jobs[side]  # not before: Ctrl-C while it waits keeps the root
            if not is_due(call, phase, policy):
                continue
            find = self.find_roots(unit, group)
            old = unit.tensors[root]
            if self._host_roots is not None and not self.refresher.is_on_host(unit.device):
                old = self._host_roots.take(unit)[side]
            work = Work(find, unit.tensors[factor], old, self.is_ordered)
            number = 2 * unit.index + side
            job = self.refresher.start(number, unit.step, work, is_first=call == 0)
            if call == 0 or policy.delay == 0:
                self._use_root(unit, side, job)
            else:
                unit.jobs[side] = job

    def root_parts(self, number: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Return shapes and types of what is computed for a side of a unit, 2 unit + side."""
        unit = self.plan()[number // 2]
        count, size = len(unit.blocks), unit.shape[number % 2]
        root = (count, size, size), self.root_dtype or unit.dtype
        return [root, ((count, size), torch.int64)] if self.is_ordered else [root]

    # -- units and their state ---------------------------------------------------------------------

    def _begin(self) -> None:
        self._units: list[Unit] = []
        self._cohorts: dict[nn.Parameter, int] = {}
        self._nonfinite: LateCount | None = None
        self._host_roots = None if self.storage is None else HostRoots()

    def _is_mine(self, unit: Unit) -> bool:
        return self.sharding is None or unit.owner == self.sharding.rank

    def _make_units(
        self, parameters: Mapping[int, Sequence[nn.Parameter]], cohort: int
    ) -> list[Unit]:
        units: list[Unit] = []
        for index, some in parameters.items():
            first = len(self._units) + len(units)
            max_dim = self.param_groups[index]["max_dim"]
            units += make_units(some, max_dim, first=first, group=index, cohort=cohort)
        phases = phases_of([cost for unit in units for cost in unit.costs], self.refresh.every)
        for unit, left, right in zip(units, phases[::2], phases[1::2], strict=True):
            unit.phases = left, right
        return units

    def _add_units(
        self, parameters: Mapping[int, Sequence[nn.Parameter]], cohort: int
    ) -> list[Unit]:
        units = self._make_units(parameters, cohort)
        if self.sharding is not None:
            self.sharding.assign(units, self._units)
        new = [parameter for some in parameters.values() for parameter in some]
        for parameter in new:
            self.state[parameter] = {
                "step": torch.tensor(0.0, device="cpu"),
                "cohort": torch.tensor(cohort, device="cpu"),
            }
        for unit in units:
            if self._is_mine(unit):
                self._allocate(unit)
        # Last: where memory does not suffice, a later step begins with these parameters again.
        self._units += units
        self._cohorts |= dict.fromkeys(new, cohort)
        if self._host_roots is not None:
            self._host_roots.watch([unit for unit in self._units if self._is_mine(unit)][:1])
        return units

    def _allocate(self, unit: Unit) -> None:
        """Create a unit's tensors, zeros and identities as roots, and views of them in `state`."""
        count = len(unit.blocks)
        for name, shape in self.shapes(unit).items():
            unit.tensors[name] = torch.zeros(count, *shape, dtype=unit.dtype, device=unit.device)
        for name, size in zip(self.roots, unit.shape, strict=True):
            root = torch.eye(size, dtype=self.root_dtype or unit.dtype, device=unit.device)
            unit.tensors[name] = root.repeat(count, 1, 1)
        if self._host_roots is not None:
            unit.tensors |= self._host_roots.hold(unit, self.roots)
        for name, stack in unit.tensors.items():
            for block, view in zip(unit.blocks, stack, strict=True):
                self.state[block.parameter][f"{name}.{block.number}"] = view
        if self.refresh.delay:
            self._forget_next(unit)

    def _held(self) -> tuple[list[list[nn.Parameter]], dict[nn.Parameter, Tensor]]:
        """Return for each group the parameters to update, and flags of gradients if unknown."""
        held = [[p for p in g["params"] if p.grad is not None] for g in self.param_groups]
        parameters = [p for some in held for p in some]
        is_on_cpu = all(local(p.detach()).device.type == "cpu" for p in parameters)
        if is_on_cpu and self.refresh.where != "device":
            return self.parameters_to_update(), {}
        self.check_layouts()
        if not parameters:
            return held, {}
        flags = finite_flags(parameters)
        if self._nonfinite is None:
            self._nonfinite = LateCount(flags.device)
        seen = self._nonfinite.read()
        if seen and not self.nonfinite_steps:
            warn_of_nonfinite(self, ())
        self.nonfinite_steps = max(self.nonfinite_steps, seen)
        self._nonfinite.add((~flags).any())
        devices = [local(p.detach()).device for p in parameters]
        return held, {p: f.to(d) for p, f, d in zip(parameters, flags, devices, strict=True)}

    def _read_state(self, parameter: nn.Parameter, name: str) -> Tensor | None:
        return self.state.get(parameter, {}).get(name)

    def _step_unit(
        self,
        unit: Unit,
        group: Mapping[str, Any],
        updated: set[nn.Parameter],
        finite: Mapping[nn.Parameter, Tensor],
    ) -> None:
        rows = [i for i, block in enumerate(unit.blocks) if block.parameter in updated]
        if not rows:
            self.renew(unit, group)  # at its time, also without gradients
            return
        is_all = len(rows) == len(unit.blocks)
        gradient = unit.gather(rows, finite)
        found = self.update_unit(unit, group, gradient, None if is_all else rows)
        if found is None:
            return
        update, factor = found
        lr = float(group["lr"])
        for row, each in zip(rows, update, strict=True):
            block = unit.blocks[row]
            is_finite = finite.get(block.parameter)
            decay = lr * group["weight_decay"]
            with block.open() as weights:
                if block.is_turned:  # one order of both in memory: five times as fast
                    weights, each = weights.mT, each.mT.contiguous()
                self.subtract(weights, each, lr * factor, decay, is_finite)

    def _use_root(self, unit: Unit, side: int, job: Job) -> None:
        new, *orders = self.refresher.finish(job, unit.device)
        self.change_root(unit, side, new, orders[0] if orders else None)
        unit.tensors[self.roots[side]].copy_(new, non_blocking=True)
        if self._host_roots is not None:
            self._host_roots.forget(unit)

    @contextmanager
    def filled_state(self) -> Iterator[None]:
        """Put the roots that wait to be used into `state` inside, zeros where none does."""
        late = [unit for unit in self._units if self.refresh.delay and self._is_mine(unit)]
        try:
            for unit in late:
                for side in (0, 1):
                    if side in unit.jobs:
                        value = self.refresher.finish(unit.jobs[side], unit.device)
                    else:
                        parts = self.root_parts(2 * unit.index + side)
                        value = tuple(torch.zeros(shape, dtype=dtype) for shape, dtype in parts)
                    self._put_next(unit, side, value)
            yield
        finally:
            for parameter in {block.parameter for unit in late for block in unit.blocks}:
                self.state[parameter] = dict(self.state[parameter])  # torch's keeps the filled one
            for unit in late:
                self._forget_next(unit)

    def _put_next(self, unit: Unit, side: int, value: Value) -> None:
        for name, stack in zip(self._names_of_next(side), value, strict=True):
            for block, each in zip(unit.blocks, stack, strict=True):
                self.state[block.parameter][f"{name}.{block.number}"] = each

    def _forget_next(self, unit: Unit) -> None:
        """Leave the keys, which `torch.distributed.checkpoint` looks for when it loads."""
        empty = torch.empty(len(unit.blocks), 0, device="cpu")
        for side in (0, 1):
            self._put_next(unit, side, (empty,) * len(self._names_of_next(side)))

    def _names_of_next(self, side: int) -> list[str]:
        name = f"next_{self.roots[side]}"
        return [name, f"{name}_order"] if self.is_ordered else [name]

    def stays_on_host(self, name: str) -> bool:
        """Whether a tensor in `state` lies in host memory: a root, with `storage`."""
        return self.storage is not None and name.partition(".")[0] in self.roots

    @torch.no_grad()
    def take_state(self) -> None:
        """Build units from `state`, and make its entries views of theirs."""
        self._begin()
        cohorts: dict[int, dict[int, list[nn.Parameter]]] = defaultdict(dict)
        states: dict[nn.Parameter, dict[str, Any]] = {}
        for index, group in enumerate(self.param_groups):
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
                cohorts[int(state["cohort"])].setdefault(index, []).append(parameter)
        for cohort, parameters in sorted(cohorts.items()):
            for unit in self._add_units(parameters, cohort):
                kept = [states[block.parameter] for block in unit.blocks]
                unit.step = int(kept[0]["step"])
                for block in unit.blocks:
                    self.state[block.parameter]["step"].fill_(unit.step)
                if self._is_mine(unit):
                    self._fill(unit, kept)

    def _fill(self, unit: Unit, states: Sequence[Mapping[str, Any]]) -> None:
        blocks = list(zip(unit.blocks, states, strict=True))
        for name, stack in unit.tensors.items():
            for into, (block, state) in zip(stack, blocks, strict=True):
                key = f"{name}.{block.number}"
                if key not in state or state[key].shape != into.shape:
                    raise ValueError(
                        f"the state has no {key!r} of shape {tuple(into.shape)}: it is not one of "
                        f"gg.{type(self).__name__} for these parameters, shards and max_dim"
                    )
                into.copy_(state[key])
        none = torch.zeros(1)
        for side in (0, 1) if self.refresh.delay else ():
            keys = self._names_of_next(side)
            parts = [[s.get(f"{key}.{b.number}", none) for b, s in blocks] for key in keys]
            if all(part.any() for part in parts[0]):  # zeros where none waits
                unit.jobs[side] = completed(Ready(tuple(map(torch.stack, parts))))


def factor_beta(group: Mapping[str, Any]) -> float:
    """Return the weight of factors: `shampoo_beta`, or that of squares."""
    return group["betas"][1] if group["shampoo_beta"] is None else group["shampoo_beta"]
