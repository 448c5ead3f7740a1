"""The script of a seed: faults in one start, runs that are resumed, runs that others join."""

import random

from ._script import Fault, Script, draw_faults, draw_setting

__all__ = ["FIRST_JOINED", "FIRST_RESUMED", "SCRIPTS", "draw_script"]

FIRST_RESUMED = 200
FIRST_JOINED = 240
SCRIPTS = 280
_RESUMED = {
    "all die": 5,
    "all die twice": 2,
    "one dies, then all": 2,
    "one pauses, then all die": 2,
}
_JOINED = {
    "some join": 4,
    "some join, later more": 2,
    "some join, one dies": 4,
    "some join, one pauses": 3,
}
_EVERY = (20, 50, 90)
_MOMENTS = ("between", "exchange", "anytime", "consensus")
_PAUSE_SECONDS = (0.5, 3.0)  # well below what makes a partner late
_LAST_SHARE = 0.75  # of the run, in which all are killed for the first time


def draw_script(seed: int, *, steps: int, evaluations: int) -> Script:
    """The script of a seed, for runs of so many steps and evaluations on each rank."""
    if seed < FIRST_RESUMED:
        return draw_faults(seed, steps=steps, evaluations=evaluations)
    return _draw_resumed(seed, steps) if seed < FIRST_JOINED else _draw_joined(seed, steps)


def _draw_resumed(seed: int, steps: int) -> Script:
    rng = random.Random(seed)
    setting = draw_setting(rng)
    p = setting.world_size
    kind = rng.choices(list(_RESUMED), list(_RESUMED.values()))[0]
    every = rng.choice(_EVERY)
    ranks = rng.sample(range(p), p)
    at = rng.randint(2 * every + 10, round(_LAST_SHARE * steps))
    before = rng.randint(5, at - 5)
    faults = []
    if kind == "one dies, then all":
        one, *ranks = ranks
        faults.append(Fault(kind="kill", ranks=(one,), moment="between", number=before))
    elif kind == "one pauses, then all die":
        faults.append(
            Fault(
                kind="pause",
                ranks=(rng.choice(ranks),),
                moment=rng.choice(_MOMENTS[:3]),
                number=before,
                seconds=round(rng.uniform(*_PAUSE_SECONDS), 1),
            )
        )
    faults.append(_kill(rng, tuple(ranks), at, rng.choice(_MOMENTS), steps_an_evaluation=75 // p))
    if kind == "all die twice":
        later = rng.randint(at + 10, round(0.9 * steps))
        again = rng.sample(range(p), p)
        faults.append(_kill(rng, tuple(again), later, rng.choice(_MOMENTS[:3]), start=2))
    return Script(
        seed=seed,
        setting=setting,
        kind=f"{kind}; resumed",
        faults=tuple(faults),
        checkpoint_every=every,
        resumes=2 if kind == "all die twice" else 1,
        exact=setting.mode != "stale" and kind != "one dies, then all",
    )


def _draw_joined(seed: int, steps: int) -> Script:
    rng = random.Random(seed)
    setting = draw_setting(rng)
    p = setting.world_size
    kind = rng.choices(list(_JOINED), list(_JOINED.values()))[0]
    clock, one, *_ = rng.sample(range(p), p)

    def join() -> Fault:
        at = rng.randint(20, steps)
        return Fault(
            kind="join", ranks=(clock,), moment="between", number=at, count=rng.choice((1, 1, 2))
        )

    faults = [join()]
    if kind == "some join, later more":
        faults.append(join())
    near = faults[0].number + rng.randint(-15, 60)  # before, meanwhile or after
    if kind == "some join, one dies":
        faults.append(_kill(rng, (one,), near, rng.choice(_MOMENTS[:3])))
    elif kind == "some join, one pauses":
        faults.append(
            Fault(
                kind="pause",
                ranks=(one,),
                moment="between",
                number=near,
                seconds=round(rng.uniform(*_PAUSE_SECONDS), 1),
            )
        )
    return Script(seed=seed, setting=setting, kind=kind, faults=tuple(faults))


def _kill(
    rng: random.Random,
    ranks: tuple[int, ...],
    at: int,
    moment: str,
    *,
    start: int = 1,
    steps_an_evaluation: int = 1,
) -> Fault:
    into = {"consensus": 0.01, "anytime": 0.02}.get(moment, 0.0)
    return Fault(
        kind="kill",
        ranks=ranks,
        moment=moment,
        number=-(-at // steps_an_evaluation) if moment == "consensus" else at,
        seconds_in=round(rng.uniform(0.0, into), 4),
        start=start,
    )
