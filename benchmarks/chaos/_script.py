"""Fault scripts: which setting, which faults, drawn by seed alone.

Seeds below 200 are faults in one start of a run, those below 240 runs that are resumed, and the
rest runs that others join. The order of draws is fixed: a seed stays the same script.
"""

import random
from dataclasses import dataclass
from typing import Any

from gossipgrad import topology

# How often each kind of script is drawn. The first four kill, of one rank to all but one.
_KINDS = {
    "one dies": 7,
    "two die at once": 3,
    "half die at once": 2,
    "all but one die": 2,
    "pause": 4,
    "pause until given up": 2,
    "slow link": 2,
    "cut link": 2,
    "cut off": 2,
    "one dies, another pauses": 3,
    "one after another dies": 2,
    "a link is cut, one dies": 1,
}
_MOMENTS = ("start", "between", "exchange", "consensus", "anytime")
_PAUSE_SECONDS = (0.5, 6.0)
_LOST_AFTER_SECONDS = 10.0  # the default of the command
_SOON_LOST_AFTER_SECONDS = 2.0
_CUT_SECONDS = (0.5, 4.0)
_SLOW_BITS_PER_SECOND = (1e6, 2e7)
_LAST_SHARE = 0.8  # of the run, in which faults begin

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
_LATER_MOMENTS = ("between", "exchange", "anytime", "consensus")
_SHORT_PAUSE_SECONDS = (0.5, 3.0)  # well below what makes a partner late
_LAST_SHARE_RESUMED = 0.75  # of the run, in which all are killed for the first time


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is trained, apart from faults."""

    world_size: int
    topology: str
    mode: str

    def __str__(self) -> str:
        return f"{self.world_size} ranks, {self.topology}, {self.mode}"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault; the first of its ranks sets it off.

    Kinds: `kill`, `pause`, `slow` (the rank's link to all others), `cut` (the link between two
    ranks), `off` (the rank from everything), `join` (others come in). Moments: `between`: before
    the step; `exchange`: in the step, when the part is sent and the partner's awaited; `consensus`
    and `anytime`: `seconds_in` after the evaluation or the step of that number has begun.
    """

    kind: str
    ranks: tuple[int, ...]
    moment: str
    number: int = 1  # of the step or the evaluation, from 1
    seconds_in: float = 0.0
    seconds: float = 0.0  # how long it lasts; a kill lasts
    bits_per_second: float = 0.0  # of a slow link
    start: int = 1  # of the run: later ones where it is resumed
    count: int = 0  # of those that join

    @property
    def of_links(self) -> bool:
        """Whether it needs links that can be shaped."""
        return self.kind in ("slow", "cut", "off")

    def __str__(self) -> str:
        several = "s" if len(self.ranks) > 1 else ""
        who = f"rank{several} {', '.join(map(str, self.ranks))}"
        what = {
            "kill": f"kill {who}",
            "pause": f"pause {who} for {self.seconds:.1f} s",
            "slow": f"{who}'s link at {self.bits_per_second / 1e6:.1f} Mbit/s "
            f"for {self.seconds:.1f} s",
            "cut": f"cut the link of {who} for {self.seconds:.1f} s",
            "off": f"cut {who} off for {self.seconds:.1f} s",
            "join": f"{self.count} join, by the clock of {who}",
        }[self.kind]
        after = f"{1e3 * self.seconds_in:.0f} ms into"
        when = {
            "between": f"before step {self.number}",
            "exchange": f"in the exchange of step {self.number}",
            "consensus": f"{after} evaluation {self.number}",
            "anytime": f"{after} step {self.number}",
        }[self.moment]
        return f"{what}, {when}{f' of start {self.start}' * (self.start > 1)}"


@dataclass(frozen=True, kw_only=True)
class Script:
    """A run with faults, drawn by a seed."""

    seed: int
    setting: Setting
    kind: str  # in words, what happens
    faults: tuple[Fault, ...]
    lost_after_seconds: float = _LOST_AFTER_SECONDS  # how long a silent rank is a member
    checkpoint_every: int | None = None
    resumes: int = 0  # how often all are killed, and the run is resumed
    exact: bool = False  # whether it must come to what an undisturbed run does, bit for bit

    @property
    def of_links(self) -> bool:
        """Whether it needs links that can be shaped."""
        return any(fault.of_links for fault in self.faults)

    @property
    def killed(self) -> set[int]:
        """Ranks that are to die, and do not come back with another start."""
        last = self.resumes + 1
        kills = [f for f in self.faults if f.kind == "kill" and f.start == last]
        return {rank for fault in kills for rank in fault.ranks}

    @property
    def disturbed(self) -> set[int]:
        """Ranks that are held up, or out of reach, for a while."""
        held = [fault for fault in self.faults if fault.kind not in ("kill", "join")]
        return {rank for fault in held for rank in fault.ranks}

    @property
    def joins(self) -> list[int]:
        """Which of its faults bring others in."""
        return [number for number, fault in enumerate(self.faults) if fault.kind == "join"]

    @property
    def paused(self) -> set[int]:
        """Ranks that stand still for a while, which is a long step of their own."""
        return {rank for fault in self.faults if fault.kind == "pause" for rank in fault.ranks}


def _draw_setting(rng: random.Random) -> Setting:
    """What is trained."""
    p = rng.choice((3, 4, 5, 6))
    mode = rng.choice(("overlap", "sync", "stale"))
    return Setting(world_size=p, topology=rng.choice(_topologies(p, mode)), mode=mode)


def _draw_faults(seed: int, *, steps: int, evaluations: int) -> Script:
    """A script of faults in one start, for runs of so many steps and evaluations on each rank."""
    rng = random.Random(seed)
    setting = _draw_setting(rng)
    p = setting.world_size
    kind = rng.choices(list(_KINDS), list(_KINDS.values()))[0]
    draw = _Draw(rng, p, steps, evaluations)
    a, b, c = (draw.some(count) for count in (1, 1, 1))
    faults = {
        "one dies": lambda: [draw.kill(1)],
        "two die at once": lambda: [draw.kill(2)],
        "half die at once": lambda: [draw.kill(p // 2)],
        "all but one die": lambda: [draw.kill(p - 1)],
        "pause": lambda: [draw.last("pause", ranks) for ranks in ([a], [a, b])[rng.randrange(2)]],
        "pause until given up": lambda: [draw.last("pause", a)],
        "slow link": lambda: [draw.last("slow", a)],
        "cut link": lambda: [draw.last("cut", draw.pair())],
        "cut off": lambda: [draw.last("off", a)],
        "one dies, another pauses": lambda: [draw.kill_of(a), draw.last("pause", b)],
        "one after another dies": lambda: [draw.kill_of(ranks) for ranks in (a, b, c)[: p - 1]],
        "a link is cut, one dies": lambda: [draw.last("cut", (*a, *b)), draw.kill_of(c)],
    }[kind]()
    soon = kind == "pause until given up"
    return Script(
        seed=seed,
        setting=setting,
        kind=kind,
        faults=tuple(faults),
        lost_after_seconds=_SOON_LOST_AFTER_SECONDS if soon else _LOST_AFTER_SECONDS,
    )


def _topologies(world_size: int, mode: str) -> list[str]:
    names = ["matching"] if mode == "stale" else ["dissemination", "matching"]
    try:
        topology.by_name("hypercube", world_size)
    except ValueError:
        return names
    return [*names, "hypercube"]


class _Draw:
    """Draws faults; no rank is drawn twice by `some`."""

    def __init__(self, rng: random.Random, world_size: int, steps: int, evaluations: int) -> None:
        self._rng = rng
        self._left = rng.sample(range(world_size), world_size)
        self._world_size = world_size
        self._steps = steps
        self._evaluations = evaluations

    def some(self, count: int) -> tuple[int, ...]:
        return tuple(self._left.pop() for _ in range(count))

    def pair(self) -> tuple[int, ...]:
        return tuple(self._rng.sample(range(self._world_size), 2))

    def kill(self, count: int) -> Fault:
        return self.kill_of(tuple(self._rng.sample(range(self._world_size), count)))

    def kill_of(self, ranks: tuple[int, ...]) -> Fault:
        return Fault(kind="kill", ranks=ranks, **self._when(_MOMENTS))

    def last(self, kind: str, ranks: tuple[int, ...]) -> Fault:
        """A fault that passes."""
        lasts = _PAUSE_SECONDS if kind == "pause" else _CUT_SECONDS
        rate = round(self._rng.uniform(*_SLOW_BITS_PER_SECOND), -5) if kind == "slow" else 0.0
        return Fault(
            kind=kind,
            ranks=ranks,
            seconds=round(self._rng.uniform(*lasts), 1),
            bits_per_second=rate,
            **self._when(_MOMENTS[1:]),
        )

    def _when(self, moments: tuple[str, ...]) -> dict[str, Any]:
        moment = self._rng.choice(moments)
        into = {"start": 1.5, "consensus": 0.01, "anytime": 0.02}.get(moment, 0.0)
        total = self._evaluations if moment == "consensus" else self._steps
        number = self._rng.randint(1, max(1, round(_LAST_SHARE * total)))
        seconds_in = round(self._rng.uniform(0.0, into), 4)
        if moment == "start":  # a death before the first step ends the start of a run
            moment, number, seconds_in = "between", 1, 0.0
        return {"moment": moment, "number": number, "seconds_in": seconds_in}


def draw_script(seed: int, *, steps: int, evaluations: int) -> Script:
    """The script of a seed, for runs of so many steps and evaluations on each rank."""
    if seed < FIRST_RESUMED:
        return _draw_faults(seed, steps=steps, evaluations=evaluations)
    return _draw_resumed(seed, steps) if seed < FIRST_JOINED else _draw_joined(seed, steps)


def _draw_resumed(seed: int, steps: int) -> Script:
    rng = random.Random(seed)
    setting = _draw_setting(rng)
    p = setting.world_size
    kind = rng.choices(list(_RESUMED), list(_RESUMED.values()))[0]
    every = rng.choice(_EVERY)
    ranks = rng.sample(range(p), p)
    at = rng.randint(2 * every + 10, round(_LAST_SHARE_RESUMED * steps))
    before = rng.randint(5, at - 5)
    faults = []
    if kind == "one dies, then all":
        one, *ranks = ranks
        faults.append(Fault(kind="kill", ranks=(one,), moment="between", number=before))
    elif kind == "one pauses, then all die":
        held, moment = (rng.choice(ranks),), rng.choice(_LATER_MOMENTS[:3])
        faults.append(_pause(rng, held, before, moment))
    moment = rng.choice(_LATER_MOMENTS)
    faults.append(_kill(rng, tuple(ranks), at, moment, steps_an_evaluation=75 // p))
    if kind == "all die twice":
        later = rng.randint(at + 10, round(0.9 * steps))
        again = rng.sample(range(p), p)
        faults.append(_kill(rng, tuple(again), later, rng.choice(_LATER_MOMENTS[:3]), start=2))
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
    setting = _draw_setting(rng)
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
    near = faults[0].number + rng.randint(-15, 60)  # before, at the same time or after
    if kind == "some join, one dies":
        faults.append(_kill(rng, (one,), near, rng.choice(_LATER_MOMENTS[:3])))
    elif kind == "some join, one pauses":
        faults.append(_pause(rng, (one,), near, "between"))
    return Script(seed=seed, setting=setting, kind=kind, faults=tuple(faults))


def _pause(rng: random.Random, ranks: tuple[int, ...], at: int, moment: str) -> Fault:
    seconds = round(rng.uniform(*_SHORT_PAUSE_SECONDS), 1)
    return Fault(kind="pause", ranks=ranks, moment=moment, number=at, seconds=seconds)


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
