"""The plan of a session: given, or computed from measurements in the first steps."""

import logging
import statistics
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

from gossipgrad.comm import Group
from gossipgrad.planning import (
    LEAST_SAVING,
    Merge,
    Method,
    Plan,
    mg_wfbp,
    omgs_greedy,
    plan,
    single,
    threshold,
    wfbp,
)
from gossipgrad.sparsification._aggregation import Aggregation
from gossipgrad.sparsification._costs import measure_methods
from gossipgrad.sparsification._density import final_density
from gossipgrad.sparsification._settings import MEASURED_RULES, Settings, check_plan_fits

__all__ = ["Planner"]

logger = logging.getLogger("gossipgrad")

_WARM_ROUNDS = 2  # to allocate memory, start threads, fill caches
_TIMED_ROUNDS = 5
_BUCKETS = {"size_bytes": 25 << 20, "first_size_bytes": 1 << 20}  # DistributedDataParallel's
_COMPARED_ROUNDS = 3  # per turn, after one round to change plans
_TURNS = ("plan", "dense", "plan", "dense")
_FAR_SLOWER = 2.0  # times the step of the plan: dense is not tried
_RULES: dict[str, Callable[..., Plan]] = {
    "optimal": plan,
    "greedy": omgs_greedy,
    "mg-wfbp": mg_wfbp,
    "layerwise": wfbp,
    "wfbp": wfbp,
    "single": single,
}

Phase = Generator[None, None, None]  # resumed after each round


class Planner:
    """The plan of a session, agreed on by all ranks."""

    def __init__(self, settings: Settings, sizes_bytes: Sequence[int], group: Group) -> None:
        self.plan: Plan | None = settings.plan if isinstance(settings.plan, Plan) else None
        self.first_merges = _first_merges(settings, sizes_bytes)
        self.compared_seconds: dict[str, float] = {}
        self.refused: str | None = None
        self.backward_seconds: list[float] = []
        self.methods: list[Method] = []
        self._settings = settings
        self._group = group
        self._dense: Plan | None = None  # the dense plan, until the choice between them is final
        self._ended_seconds = perf_counter()  # the end of the last round and its follow-up
        self._period_seconds = 0.0  # from then until the end of this round
        self._dense_periods: deque[float] = deque(maxlen=_TIMED_ROUNDS)  # with whole gradients
        self._phase: Phase | None = None
        self._is_searching = settings.measures

    @property
    def decided(self) -> bool:
        """Whether the plan is final."""
        return self.plan is not None and self._dense is None

    def after_round(self, aggregation: Aggregation) -> None:
        """Continue the search for a plan, if one is running; sometimes a collective."""
        if self._is_searching:
            self._period_seconds = perf_counter() - self._ended_seconds
            if self._phase is None:
                self._phase = self._search(aggregation)
            if next(self._phase, self) is self:
                self._phase, self._is_searching = None, False
            self._ended_seconds = perf_counter()

    def state(self) -> dict[str, Any]:
        """Return the state as plain values, the same on all ranks."""
        return {
            "plan": None if self.plan is None else self.plan.to_json(),
            "dense": None if self._dense is None else self._dense.to_json(),
            "compared_seconds": self.compared_seconds,
            "refused": self.refused,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state`; a running measurement or comparison starts again."""
        self.plan = None if state["plan"] is None else Plan.from_json(state["plan"])
        self._dense = None if state["dense"] is None else Plan.from_json(state["dense"])
        self.refused, self.compared_seconds = state["refused"], dict(state["compared_seconds"])
        self._dense_periods.clear()
        self._phase, self._is_searching = None, self._settings.measures and not self.decided

    def _search(self, aggregation: Aggregation) -> Phase:
        """Find a plan; every `yield` is a step of the user's."""
        # 1. Time backward, and for "optimal" the all-reduce of whole gradients.
        # 2. The ranks measure selection and collectives together, at the density that training has
        #    after a `Warmup`. Where a sparse message of all takes longer than that all-reduce, the
        #    search is over.
        # 3. Rank 0 computes the plan from medians over rounds and ranks, on a thread of its own:
        #    different processors round differently.
        # 4. For "optimal", the plan and whole gradients in the buckets of DistributedDataParallel
        #    alternate for some steps at each density, until the plan is faster; until then
        #    gradients are whole. The plan has to save `LEAST_SAVING` of a step, since delayed
        #    elements cost accuracy.
        if self.plan is None:
            dense_seconds = yield from self._time_backward(aggregation)
            self.methods, refused = yield from measure_methods(
                self._settings,
                self._group,
                aggregation.parameters,
                aggregation.dtype,
                density=final_density(self._settings.density),
                dense_seconds=dense_seconds,
            )
            yield from self._compute(aggregation, refused)
        if self._dense is not None:
            yield from self._choose(aggregation)

    def _time_backward(self, aggregation: Aggregation) -> Generator[None, None, float | None]:
        """Record times and order of gradients; return the time of all-reduces, if all are whole."""
        stamps, exchanges = [], []
        for _ in range(_WARM_ROUNDS):
            yield
        for timed in range(_TIMED_ROUNDS):
            if timed:
                yield
            stamps.append(aggregation.stamps())
            exchanges.append(sum(made.gather_seconds for made in aggregation.groups))
            self._dense_periods.append(self._period_seconds)
        of_ranks = self._group.all_gather_object([_medians(stamps), exchanges])
        names, self.backward_seconds = backward_of([of for of, _ in of_ranks], aggregation.names)
        aggregation.regroup(self.first_merges, names=names)
        if self._settings.plan != "optimal" or any(m.method != "dense" for m in self.first_merges):
            return None
        # The last rank to arrive waits for no other: its time is the collective's.
        return statistics.median(map(min, zip(*(each for _, each in of_ranks), strict=True)))

    def _compute(self, aggregation: Aggregation, refused: str | None) -> Phase:
        """Compute the plan on rank 0, and apply it on all ranks."""
        computed: Future[dict[str, Any]] | None = None
        if self._group.rank == 0:
            executor = ThreadPoolExecutor(1, "gossipgrad plan")
            computed = executor.submit(
                _computed,
                self._settings,
                self.backward_seconds,
                aggregation.sizes,
                tuple(aggregation.names),
                self.methods,
                aggregation.dtype.itemsize,
            )
            executor.shutdown(wait=False)
        found = None
        while found is None:
            yield
            mine = computed.result() if computed is not None and computed.done() else None
            found = self._group.broadcast_object(mine)
        self.plan = Plan.from_json(found["plan"])
        if refused is not None:
            self._refuse(refused)
        elif found["dense"] is not None and is_sparse(self.plan):
            self._dense = Plan.from_json(found["dense"])
        elif found["dense"] is not None:
            self._refuse(
                f"gradients are predicted to be together after {_ms(self.plan.finish_seconds)} ms, "
                "and no plan with a sparse group is faster"
            )
        aggregation.regroup(self.plan.groups)
        yield

    def _choose(self, aggregation: Aggregation) -> Phase:
        """Use the dense plan until a density at which the other is faster in real steps."""
        assert self.plan is not None
        assert self._dense is not None
        own, dense = self.plan, self._dense
        if not self._dense_periods:  # after a state was loaded
            self._use(dense, aggregation)
            for _ in range(_COMPARED_ROUNDS):
                yield
                self._dense_periods.append(self._period_seconds)
        while True:
            density = aggregation.density
            if density < 1:
                yield from self._compare(aggregation, own, dense)
                with_plan, with_dense = map(self.compared_seconds.get, ("plan", "dense"))
                if with_plan and with_dense and with_plan <= (1 - LEAST_SAVING) * with_dense:
                    self._dense = None
                    self._use(own, aggregation)
                    return
                if density <= final_density(self._settings.density):
                    self.plan, self._dense = dense, None
                    self._refuse(
                        "no group has fewer bytes when it is sparse"
                        if with_plan is None
                        else f"measured in the run, a step takes {_ms(with_dense or 0.0)} ms so, "
                        f"and {_ms(with_plan)} ms with compression"
                    )
            self._use(dense, aggregation)
            if self._dense is None:
                return
            while aggregation.density == density:
                yield
                self._dense_periods.append(self._period_seconds)

    def _compare(self, aggregation: Aggregation, own: Plan, dense: Plan) -> Phase:
        """Alternate two plans for some real steps; store their times in `compared_seconds`.

        The first turn of the plan may be enough: its best step is slower than steps before it
        with whole gradients, or all its steps are far faster.
        """
        self.compared_seconds = {}
        periods: dict[str, list[float]] = {"plan": [], "dense": []}
        before = self._agreed(self._dense_periods)
        for turn, name in enumerate(_TURNS):
            self._use(own if name == "plan" else dense, aggregation)
            if turn == 0 and not any(made.sparse for made in aggregation.groups):
                return
            yield
            for _ in range(_COMPARED_ROUNDS):
                yield
                periods[name].append(self._period_seconds)
            if turn == 0 and (
                before > _FAR_SLOWER * self._agreed(periods["plan"])
                or before < self._agreed([min(periods["plan"])])
            ):
                periods["dense"] += self._dense_periods
                break
        self.compared_seconds = {name: self._agreed(of) for name, of in periods.items()}

    def _use(self, plan: Plan, aggregation: Aggregation) -> None:
        if plan.groups != aggregation.merges:
            aggregation.regroup(plan.groups)

    def _agreed(self, seconds: Sequence[float]) -> float:
        return statistics.median(self._group.all_gather_object(statistics.median(seconds)))

    def _refuse(self, why: str) -> None:
        self.refused = f"nothing is compressed: {why}"
        if self._group.rank == 0:
            logger.warning("%s", self.refused)


def backward_of(
    of_ranks: Sequence[Mapping[str, float]], names: Sequence[str]
) -> tuple[list[str], list[float]]:
    """Return the order of gradients, and the backward time of each after the one before."""
    first = of_ranks[0]
    ordered = sorted(first, key=lambda name: first[name])
    ordered += [name for name in names if name not in first]
    ready = _medians(of_ranks)
    backward, before = [], ready.get(ordered[0], 0.0)
    for name in ordered:
        at = ready.get(name, before)
        backward.append(max(0.0, at - before))
        before = max(before, at)
    return ordered, backward


def is_sparse(plan: Plan) -> bool:
    """Whether some group is sent incompletely."""
    return any(merge.method == "sparse" for merge in plan.groups)


def _medians(stamps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return medians by name, over the rounds in which it had a gradient."""
    return {
        name: statistics.median(times[name] for times in stamps if name in times)
        for name in dict.fromkeys(name for times in stamps for name in times)
    }


def _computed(
    settings: Settings,
    backward: Sequence[float],
    sizes: Sequence[int],
    names: tuple[str, ...],
    methods: Sequence[Method],
    element_bytes: int,
) -> dict[str, Any]:
    """Return the requested plan, and that of whole gradients if they are to be compared."""
    assert isinstance(settings.plan, str)
    optimal = settings.plan == "optimal"
    whole = [
        threshold(backward, sizes, method, **_BUCKETS, element_bytes=element_bytes)
        for method in methods
        if method.name != "sparse"
    ]
    dense = min(whole, key=lambda each: each.finish_seconds, default=None)
    made = _RULES[settings.plan](backward, sizes, methods if optimal else methods[0])
    if not optimal or "sparse" not in settings.methods:
        dense = None
    elif dense is not None and not is_sparse(made):
        made = dense  # in the buckets of all others
    return {
        "plan": replace(made, names=names).to_json(),
        "dense": None if dense is None else replace(dense, names=names).to_json(),
    }


def _first_merges(settings: Settings, sizes_bytes: Sequence[int]) -> tuple[Merge, ...]:
    """Return the first groups of a session: those requested, or `_BUCKETS`, whole if they may."""
    rule = settings.plan
    if isinstance(rule, Plan):
        check_plan_fits(rule, len(sizes_bytes), settings.methods)
        return rule.groups
    name = settings.methods[0]
    if isinstance(rule, int):
        make: Callable[..., Plan] = partial(threshold, size_bytes=rule, element_bytes=1)
    elif rule in MEASURED_RULES:
        make = partial(threshold, **_BUCKETS, element_bytes=1)
        if rule == "optimal":
            name = next((each for each in settings.methods if each != "sparse"), name)
    else:
        make = _RULES[rule]
    free = Method(name, lambda size: 0.0, lambda size: 0.0)
    return make([0.0] * len(sizes_bytes), sizes_bytes, free).groups


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}"
