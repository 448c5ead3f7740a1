"""A session's own state as plain values."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torch import Tensor

from gossipgrad._messages import warn
from gossipgrad.comm import Group
from gossipgrad.planning import Merge, Plan
from gossipgrad.sparsification._aggregation import Aggregation, Counters
from gossipgrad.sparsification._merged import Unsent
from gossipgrad.sparsification._planner import Planner
from gossipgrad.sparsification._settings import Settings

__all__ = ["check_all_fit", "load_session", "session_misfit", "session_state"]


def session_state(
    settings: Settings,
    aggregation: Aggregation | None,
    planner: Planner | None,
    counters: Counters,
    group: Group,
) -> dict[str, Any]:
    """See `SparseSession.own_state`."""
    session: dict[str, Any] = {
        "rank": group.rank,
        "world_size": group.world_size,
        "asked": _asked(settings),
        "plan": None,
        "residuals": {},
        "velocities": {},
        "counted": asdict(counters),
        "planner": None if planner is None else planner.state(),
    }
    if aggregation is not None and planner is not None:
        merges = aggregation.merges if planner.plan is None else planner.plan.groups
        groups = [[m.start, m.stop, m.method] for m in merges]
        session["plan"] = {"names": list(aggregation.names), "groups": groups}
        for name, unsent in aggregation.unsent().items():
            if unsent.residual is not None:
                session["residuals"][name] = unsent.residual.to("cpu", copy=True)
            if unsent.velocity is not None:
                session["velocities"][name] = unsent.velocity.to("cpu", copy=True)
    return session


def session_misfit(group: Group, trained: Mapping[str, Tensor], session: Any) -> str | None:
    """Return why a session's own state cannot be loaded here; None if it can."""
    try:
        return _unlike(session, group, trained)
    except (KeyError, TypeError, IndexError, AttributeError):
        return "it is no session's state"


def check_all_fit(group: Group, why: str | None, session: Any) -> None:
    """Raise `ValueError` if a rank's state does not fit, or states disagree; a collective."""
    of_ranks = group.all_gather_object([why, None if why else _saved_at(session)])
    for rank, (problem, _) in enumerate(of_ranks):
        if problem is not None:
            raise ValueError(f"the state cannot be loaded on rank {rank}: {problem}")
    saves = [saved for _, saved in of_ranks]
    for rank, other in enumerate(saves):
        if other != saves[0]:
            raise ValueError(
                f"the states of ranks 0 and {rank} were saved after {saves[0]['rounds']} and "
                f"{other['rounds']} rounds, or by different runs: give those that all ranks of "
                "one run saved after the same step"
            )


def load_session(
    settings: Settings,
    group: Group,
    aggregation: Aggregation | None,
    planner: Planner | None,
    counters: Counters,
    session: Mapping[str, Any],
) -> None:
    """Load the result of `session_state`; its groups only if the same plan is requested."""
    for name, value in session["counted"].items():
        setattr(counters, name, value)
    residuals, velocities = session["residuals"], session["velocities"]
    is_same_size = session["world_size"] == group.world_size
    if not is_same_size:
        if any(bool(residual.any()) for residual in residuals.values()):
            warn(
                f"the state is of {session['world_size']} ranks, here are {group.world_size}: what "
                "they had not sent yet is dropped, at a density of 0.01 some 100 steps of small "
                "gradients"
            )
        residuals, velocities = {}, {}
    if aggregation is None or planner is None:
        return
    merges, names = aggregation.merges, aggregation.names
    if is_same_size and session["asked"] == _asked(settings):
        planner.load(session["planner"])
        merges = [Merge(*each) for each in session["plan"]["groups"]]
        names = session["plan"]["names"]
    unsent = {name: Unsent(residuals.get(name), velocities.get(name)) for name in names}
    aggregation.regroup(merges, names=names, unsent=unsent)


def _saved_at(session: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that must agree among states saved between the same two steps."""
    # The planner of each rank decides when to enter a collective from values that are equal on all
    # ranks: if they differed, ranks would wait forever.
    kept = {name: session[name] for name in ("asked", "plan", "planner", "world_size")}
    return kept | {"rounds": session["counted"]["rounds"]}


def _asked(settings: Settings) -> dict[str, Any]:
    """Return the settings that determine the groups, besides measurements."""
    plan = settings.plan
    return {
        "plan": plan.to_json() if isinstance(plan, Plan) else plan,
        "methods": list(settings.methods),
    }


def _unlike(session: Mapping[str, Any], group: Group, trained: Mapping[str, Tensor]) -> str | None:
    _saved_at(session)  # raises for missing values before ranks compare them
    Counters(**session["counted"])
    if session["world_size"] == group.world_size and session["rank"] != group.rank:
        return f"it is the state of rank {session['rank']}: load each rank's own"
    unsent = [*session["residuals"].items(), *session["velocities"].items()]
    names = trained if session["plan"] is None else session["plan"]["names"]
    names = {*names, *(name for name, _ in unsent)}
    if odd := sorted(names ^ {*trained}):
        there, back = ("was", "is not") if odd[0] in names else ("was not", "is")
        return (
            f"{odd[0]!r} {there} trained in the session that saved it, and {back} here: freeze "
            "what was frozen then, and after loading change it and call session.broadcast_()"
        )
    for name, tensor in unsent:
        shape = trained[name].shape
        if not isinstance(tensor, Tensor) or tensor.shape != shape:
            has = f"the shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else "no shape"
            return (
                f"what is not sent yet of {name!r} has {has}, the parameter {tuple(shape)}: load "
                "the state of the same model"
            )
    return None
