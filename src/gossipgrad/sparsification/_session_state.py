"""A session's own state as plain values, and its conversion to other world sizes."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor, nn

from gossipgrad.comm import Group
from gossipgrad.planning import Merge, Plan
from gossipgrad.sparsification._aggregation import Aggregation, Counters
from gossipgrad.sparsification._merged import CarriedOver
from gossipgrad.sparsification._planner import Planner
from gossipgrad.sparsification._settings import Settings

__all__ = [
    "change",
    "check_all_fit",
    "deal_states",
    "load_session",
    "saved_at",
    "session_misfit",
    "session_state",
]

VERSION = 3


def session_state(
    settings: Settings,
    aggregation: Aggregation | None,
    planner: Planner | None,
    counters: Counters,
    group: Group,
) -> dict[str, Any]:
    """See `SparseSession.own_state`."""
    session: dict[str, Any] = {
        "version": VERSION,
        "rank": group.rank,
        "world_size": group.world_size,
        "settings": _must_fit(settings),
        "asked": _asked(settings),
        "plan": None,
        "residuals": {},
        "velocities": {},
        "rounds_without": {},
        "counted": asdict(counters),
        "planner": None if planner is None else planner.state(),
    }
    if aggregation is not None:
        plan = None if planner is None else planner.plan
        merges = aggregation.merges if plan is None else plan.groups
        session |= {
            "plan": {
                "names": list(aggregation.names),
                "groups": [[m.start, m.stop, m.method] for m in merges],
            },
        }
        for name, (residual, velocity, rounds_without) in aggregation.carried_over().items():
            session["rounds_without"][name] = rounds_without
            if residual is not None:
                session["residuals"][name] = residual.to("cpu", copy=True)
            if velocity is not None:
                session["velocities"][name] = velocity.to("cpu", copy=True)
    return session


def change(aggregation: Aggregation, trained: Mapping[str, nn.Parameter]) -> str | None:
    """Describe a change of the trained parameters since the session started; None if none."""
    new = [name for name, p in trained.items() if not aggregation.knows(p)]
    gone = [name for name in aggregation.names if name not in trained]
    if not new and not gone:
        return None
    return (
        f"{(new or gone)[0]!r} is {'' if new else 'not '}trained now, which was not so when the "
        "session began: call session.broadcast_() on every rank first"
    )


def session_misfit(
    settings: Settings, group: Group, trained: Mapping[str, Tensor], session: Any
) -> str | None:
    """Return why a session's own state cannot be loaded here; None if it can."""
    try:
        if session["version"] == VERSION:
            return _unlike(session, settings, group, trained)
    except (KeyError, TypeError, IndexError, AttributeError):
        pass
    return f"it is no session's state (version {VERSION})"


def saved_at(session: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that must agree among states saved between the same two steps."""
    # The planner of each rank decides when to enter a collective from values that are equal on all
    # ranks: if they differed, ranks would wait forever.
    return {
        "asked": session["asked"],
        "plan": session["plan"],
        "planner": session["planner"],
        "rounds": session["counted"]["rounds"],
    }


def check_all_fit(group: Group, why: str | None, session: Any) -> None:
    """Raise `ValueError` if a rank's state does not fit, or states disagree; a collective."""
    of_ranks = group.all_gather_object([why, None if why else saved_at(session)])
    for rank, (problem, _) in enumerate(of_ranks):
        if problem is not None:
            raise ValueError(f"the state cannot be loaded on rank {rank}: {problem}")
    check_same_save([at for _, at in of_ranks])


def check_same_save(saves: Sequence[Mapping[str, Any]]) -> None:
    """Raise `ValueError` if states, each by `saved_at`, were not saved between the same steps."""
    first = saves[0]
    for rank, other in enumerate(saves):
        if other != first:
            raise ValueError(
                f"the states of ranks 0 and {rank} were saved after {first['rounds']} and "
                f"{other['rounds']} rounds, with plans that are "
                f"{'equal' if other['plan'] == first['plan'] else 'not equal'}: give those that "
                "all ranks of one run saved after the same step"
            )


def load_session(
    settings: Settings, aggregation: Aggregation, planner: Planner, session: Mapping[str, Any]
) -> None:
    """Load the result of `session_state`; its groups only if the same plan is requested."""
    merges, names = aggregation.merges, aggregation.names
    if session["asked"] == _asked(settings) and session["planner"] is not None:
        planner.load(session["planner"])
        merges = [Merge(*each) for each in session["plan"]["groups"]]
        names = session["plan"]["names"]
    carried = {
        name: CarriedOver(
            session["residuals"].get(name),
            session["velocities"].get(name),
            session["rounds_without"].get(name, 0),
        )
        for name in names
    }
    aggregation.counters.load(session["counted"])
    aggregation.regroup(merges, names=names, carried=carried)


def deal_states(states: Sequence[Mapping[str, Any]], world_size: int) -> list[dict[str, Any]]:
    """Convert the states of all ranks of a session to another number of ranks.

    The total of residuals is kept: new rank `r` gets the sum of the residuals of the old ranks `r`,
    `r + world_size`, ..., times the new world size over the old one, since the mean is over that
    many ranks. Weights and optimizer state are equal on all ranks; buffers, such as BatchNorm's
    statistics, are those of the old rank `r`, if it exists. The number of rounds is kept.
    Measurements for a plan are not kept, as costs depend on the number of ranks: the session
    measures again. One rank has no momentum correction: there are no velocities from or to it, and
    `momentum_correction` may differ.

    Args:
        states: The `SparseSession.state_dict` of each rank, in rank order.
        world_size: The new number of ranks.

    Raises:
        ValueError: They are not the states of all ranks of one session after the same step.

    Example:
        >>> import torch, gossipgrad as gg
        >>> model = torch.nn.Linear(2, 1)
        >>> with gg.sparsify(model, torch.optim.SGD(model.parameters())) as session:
        ...     states = [session.state_dict()]
        >>> [state["session"]["rank"] for state in gg.sparsification.deal_states(states, 2)]
        [0, 1]
    """
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}: there is at least one rank")
    ranks = [state["session"]["rank"] for state in states]
    old = states[0]["session"]["world_size"] if states else 0
    if ranks != list(range(old)):
        raise ValueError(
            f"states of the ranks {ranks} were given, of a session of {old}: give those of all its "
            "ranks, in their order"
        )
    check_same_save([saved_at(state["session"]) for state in states])
    dealt = []
    for rank in range(world_size):
        session = dict(states[0]["session"])
        mine = [state["session"] for state in states[rank::world_size]]
        for kind in ("residuals", "velocities"):
            session[kind] = _sums([each[kind] for each in mine], world_size / old)
        session |= {"rank": rank, "world_size": world_size}
        if world_size != old:
            session["planner"] = None
            if 1 in (old, world_size):  # one rank has no momentum correction
                session["velocities"] = {}
                session["settings"] = {
                    name: value
                    for name, value in session["settings"].items()
                    if name != "momentum_correction"
                }
        dealt.append({**states[rank % old], "session": session})
    return dealt


def _sums(parts: Sequence[Mapping[str, Tensor]], factor: float) -> dict[str, Tensor]:
    total: dict[str, Tensor] = {}
    for part in parts:
        for name, tensor in part.items():
            if name in total and total[name].shape != tensor.shape:
                raise ValueError(
                    f"what is carried over of {name!r} has the shape {tuple(tensor.shape)} on one "
                    f"rank and {tuple(total[name].shape)} on another: give the states of one run"
                )
            total[name] = total[name] + tensor if name in total else tensor.clone()
    return {name: tensor * factor for name, tensor in total.items()}


def _must_fit(settings: Settings) -> dict[str, str]:
    """Return the settings that must match when a state is loaded; not density, plan, methods."""
    described = settings.describe()
    return {name: str(described[name]) for name in ("select", "momentum_correction")}


def _asked(settings: Settings) -> dict[str, Any]:
    """Return the settings that determine the groups, besides measurements."""
    plan = settings.plan
    return {
        "plan": plan.to_json() if isinstance(plan, Plan) else plan,
        "methods": list(settings.methods),
    }


def _unlike(
    session: Mapping[str, Any], settings: Settings, group: Group, trained: Mapping[str, Tensor]
) -> str | None:
    saved_at(session)  # raises for missing values before ranks compare them
    Counters(**session["counted"])
    if session["world_size"] != group.world_size:
        return (
            f"it was saved by {session['world_size']} ranks, here are {group.world_size}: deal "
            "those of all ranks anew with gg.sparsification.deal_states"
        )
    if session["rank"] != group.rank:
        return f"it is the state of rank {session['rank']}: load each rank's own"
    here = _must_fit(settings)
    for name, value in session["settings"].items():
        if here.get(name) != value:
            return f"{name} was {value}, here it is {here.get(name)}: use the same"
    carried = [*session["residuals"].items(), *session["velocities"].items()]
    names = trained if session["plan"] is None else session["plan"]["names"]
    names = {*names, *(name for name, _ in carried)}
    if odd := sorted(names ^ {*trained}):
        there, back = ("was", "is not") if odd[0] in names else ("was not", "is")
        return (
            f"{odd[0]!r} {there} trained in the session that saved it, and {back} here: freeze "
            "what was frozen then, and after loading change it and call session.broadcast_()"
        )
    for name, tensor in carried:
        shape = trained[name].shape
        if not isinstance(tensor, Tensor) or tensor.shape != shape:
            has = f"the shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else "no shape"
            return (
                f"what is carried over of {name!r} has {has}, the parameter {tuple(shape)}: load "
                "the state of the same model"
            )
    return None
