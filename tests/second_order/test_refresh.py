"""When roots are computed and taken up: their age, failures, hangs, and what repeats."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from gossipgrad.errors import GossipError
from gossipgrad.second_order import Background, Deterministic, Refresher, Staggered, Synchronous


def take_step(refresher, units, step, compute=None):
    """One step of an optimizer; what it uses of each unit, whose factors are the step's number."""
    used = []
    for unit in range(units):
        if refresher.is_due(unit, step):
            factor = torch.full((3,), float(step))
            refresher.submit(unit, step, (lambda f=factor: (f,)) if compute is None else compute)
        root = refresher.current(unit, step)
        used.append(None if root is None else (root.version, root.step, root.value[0][0].item()))
    return used


@pytest.fixture
def refreshers():
    made = []
    yield lambda *args, **options: made.append(Refresher(*args, **options)) or made[-1]
    for each in made:
        each.close()


@pytest.mark.parametrize("on_bound", ["block", "synchronous"])
@pytest.mark.parametrize(("every", "staleness"), [(10, 5), (1, 1), (4, 4)])
def test_no_root_is_older_than_the_bound_with_workers_slowed_at_random(every, staleness, on_bound):

    def compute(factor, pause):
        time.sleep(pause)
        return (factor,)

    rng = random.Random(every)
    refresher = Refresher(Background(every, staleness, workers=2, on_bound=on_bound), 4)
    steps = 10_000 if every == 10 else 1000
    for step in range(steps):
        for unit in range(4):
            if refresher.is_due(unit, step):
                pause = rng.choice([0.0, 0.0, 0.0, 0.001])

                factor = torch.full((2,), float(step))
                refresher.submit(unit, step, partial(compute, factor, pause))
            root = refresher.current(unit, step)
            assert root.value[0].tolist() == [root.step] * 2
            assert step - root.step <= every - 1 + staleness
    refresher.close()
    stats = refresher.stats
    assert every - 1 <= stats.oldest <= every - 1 + staleness
    assert stats.waits + stats.synchronous > 0


def until_error(refresher, compute_of, units=1, start=0):
    """Steps until one raises: which, and what."""
    for step in range(start, 60):
        try:
            take_step(refresher, units, step, compute_of(step))
        except GossipError as error:
            return step, error
    return None


def fail():
    raise ArithmeticError("no convergence")


@pytest.mark.parametrize("policy", [Synchronous(5), Staggered(5), Background(5, 2)])
@pytest.mark.parametrize("broken", [fail, lambda: (torch.tensor([float("nan")]),)])
def test_a_failed_job_keeps_the_old_root_is_counted_and_tried_again(refreshers, policy, broken):
    refresher = refreshers(policy, 1)
    for step in range(15):
        used = take_step(refresher, 1, step, broken if step in (5, 6) else None)
        refresher.drain()
        if 5 <= step < 7:
            assert used[0][1] == 0
    assert refresher.stats.failed == 2
    assert used[0][1] in (10, 12)  # and then every five steps again


@pytest.mark.parametrize("policy", [Synchronous(5), Background(5, 2)])
def test_jobs_that_always_fail_end_in_an_error_with_their_cause(refreshers, policy):
    refresher = refreshers(policy, 1)
    step, error = until_error(refresher, lambda step: fail if step else None)
    assert isinstance(error.__cause__, ArithmeticError)
    assert "no convergence" in str(error)
    assert step == 5 - 1 + (2 if isinstance(policy, Background) else 0) + 5 + 1
    take_step(refresher, 1, step + 1)
    refresher.drain()
    assert refresher.current(0, step + 2).step == step + 1  # it can go on


def test_a_worker_that_hangs_raises_after_a_bound_and_the_others_go_on(refreshers):
    stuck = threading.Event()
    refresher = refreshers(Background(4, 2, workers=2, timeout_seconds=5.0), 2)

    def hang():
        stuck.wait()
        return (torch.ones(1),)

    step, error = until_error(refresher, lambda step: hang if step == 4 else None, units=2)
    assert "unit 0" in str(error)
    assert step == 4 + 2
    stuck.set()
    take_step(refresher, 2, step)


@pytest.mark.parametrize("saved_at", [12, 13, 14])
def test_a_state_goes_on_as_the_run_does_also_with_roots_on_their_way(refreshers, saved_at):
    policy = Background(5, 3, fixed_delay=True)
    whole, refresher = refreshers(policy, 3), refreshers(policy, 3)
    expected = [take_step(whole, 3, step) for step in range(40)]
    for step in range(saved_at):
        take_step(refresher, 3, step)
    state = refresher.state_dict()
    pending = [refresher.pending(unit) for unit in range(3)]
    assert any(pending)
    values = [(torch.full((3,), float(step)),) for step in state["steps"]]
    other = refreshers(policy, 3)
    other.load_state_dict(state, values, pending)
    for each in (refresher, other):
        assert [take_step(each, 3, step) for step in range(saved_at, 40)] == expected[saved_at:]
    with pytest.raises(ValueError, match="units"):
        refreshers(policy, 4).load_state_dict(state)


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    "make",
    [
        lambda: Synchronous(0),
        lambda: Staggered(every=2.5),
        lambda: Background(max_staleness=-1),
        lambda: Background(every=4, max_staleness=5),
        lambda: Background(workers=0),
        lambda: Background(on_bound="wait"),
        lambda: Background(timeout_seconds=0.0),
        lambda: Background(timeout_seconds=float("inf")),
        lambda: Background(executor=threading.Thread),
        lambda: Deterministic(-1),
        lambda: Refresher(Background(on_bound="graft-only"), 1, has_peers=True),
    ],
)
def test_settings_outside_their_range_are_refused(make):
    with pytest.raises(ValueError, match=r"at least|above|none of|drift|Executor"):
        make()


def test_values_are_never_torn_or_older_than_before(refreshers):
    """A reader beside the workers' writers: each value is of one job, and versions only rise."""
    refresher = refreshers(Background(3, 3, workers=2), 1)
    stop, torn, reads = threading.Event(), [], [0]

    def read(last=0):
        while not stop.is_set():
            root = refresher.current(0, 0)
            value = root.value[0]
            if not bool((value == root.step).all()) or root.version < last:
                torn.append((root, last))
            last = root.version
            reads[0] += 1

    take_step(refresher, 1, 0)
    reader = threading.Thread(target=read)
    reader.start()
    step = 0
    while reads[0] < 10_000 or refresher.stats.refreshes <= 20:
        step += 1
        factor = torch.full((512,), float(step))
        if refresher.is_due(0, step):
            refresher.submit(0, step, lambda f=factor: (f.clone(),))
    stop.set()
    reader.join()
    assert not torn
    assert refresher.stats.refreshes > 20


def test_an_executor_that_is_shut_down_is_a_failure(refreshers):
    executor = ThreadPoolExecutor(1)
    refresher = refreshers(Background(4, 2, executor=executor), 1)
    take_step(refresher, 1, 0)
    executor.shutdown()
    _, error = until_error(refresher, lambda step: None, start=1)
    assert "shutdown" in str(error)
