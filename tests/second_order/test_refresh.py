"""When roots are computed and used: their steps, failures, repetition, and where."""

import contextlib
import copy
import multiprocessing
import os
import sys
import threading
import warnings
from itertools import pairwise

import pytest
import torch
from torch import nn

import gossipgrad as gg
from support.sine import train
from support.waiting import HANG_SECONDS

ALL = ("SOAP", "KLShampoo", "Shampoo")
WHERE = ("host", "device")


def network():
    torch.manual_seed(0)
    sizes = [(6, 20), (20, 20), (20, 20), (20, 3)]
    layers = [layer for a, b in sizes for layer in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def roots_of(optimizer):
    """Clones of all roots or bases, by parameter and name."""
    return {
        (index, name): value.clone()
        for index, state in optimizer.state_dict()["state"].items()
        for name, value in state.items()
        if name.partition(".")[0].endswith(("_basis", "_root")) and not name.startswith("next")
    }


def changes(optimizer, model, steps):
    """The steps in which each root changed."""
    found, before = {}, None
    for step in range(steps):
        train(model, optimizer, [step])
        now = roots_of(optimizer)
        for key, value in now.items():
            if before is not None and key in before and not torch.equal(before[key], value):
                found.setdefault(key, []).append(step)
        before = now
    return found


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(("every", "delay"), [(5, 0), (5, 2), (4, 4), (1, 1)])
def test_a_root_changes_once_in_a_window_and_exactly_so_late(every, delay, where):
    model, twin = network(), network()
    late = gg.Shampoo(model, refresh=gg.Refresh(every, delay, where=where))
    exact = gg.Shampoo(twin, refresh=gg.Refresh(every, 0, where=where))
    found, expected = changes(late, model, 26), changes(exact, twin, 26)
    assert len(expected) == 2 * 4
    for key, steps in expected.items():
        assert all(b - a == every for a, b in pairwise(steps))
        assert found[key] == [step + delay for step in steps if step + delay < 26]
    late.close()


def test_where_training_takes_all_cores_the_step_computes_what_is_used_as_late():
    threads = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        model, twin = network(), network()
        late = gg.Shampoo(model, refresh=gg.Refresh(5, 2))
        exact = gg.Shampoo(twin, refresh=gg.Refresh(5))
        before = set(threading.enumerate())
        found, expected = changes(late, model, 16), changes(exact, twin, 16)
        for key, steps in expected.items():
            assert found[key] == [step + 2 for step in steps if step + 2 < 16]
        assert set(threading.enumerate()) <= before
        assert late.refresh_stats.in_step == late.refresh_stats.refreshes - 6
        assert exact.refresh_stats.in_step == 0
    finally:
        torch.set_num_threads(threads)
    late.close()


def test_each_step_of_a_window_has_its_share():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    model.extend([nn.Linear(6, 12), nn.Linear(12, 3)])
    optimizer = gg.SOAP(model, refresh=gg.Refresh(10), max_dim=12)
    found, costs = {}, [0] * 10

    def step_of(number):
        optimizer.zero_grad()
        x = torch.randn(32, 6, generator=torch.Generator().manual_seed(number))
        (model(x) - x[:, :3].sin()).square().mean().backward()
        optimizer.step()

    before = None
    for number in range(24):
        step_of(number)
        now = roots_of(optimizer)
        for key in now if number > 12 else ():
            if not torch.equal(now[key], before[key]) and key not in found:
                found[key] = number % 10
        before = now
    for key, phase in found.items():
        costs[phase] += len(before[key]) ** 3
    # All in one step would be 3700 operations; two units cost 1728 each.
    assert max(costs) <= 1728 + 0.2 * 3700


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", ALL)
def test_late_roots_repeat_bit_for_bit(name, where):
    runs = []
    for _ in range(2):
        model = network()
        refresh = gg.Refresh(4, 3, workers=2, where=where)
        optimizer = getattr(gg, name)(model, lr=0.02, refresh=refresh)
        runs.append(train(model, optimizer, range(30)))
        optimizer.close()
    assert all(map(torch.equal, *runs))


@pytest.mark.parametrize("name", ALL)
def test_both_places_train_alike(name):
    """By other methods, so not bit for bit."""
    losses = []
    for where in WHERE:
        model = network()
        refresh = gg.Refresh(4, 2, where=where)
        optimizer = getattr(gg, name)(model, lr=0.01, refresh=refresh)
        train(model, optimizer, range(60))
        x = torch.randn(500, 6, generator=torch.Generator().manual_seed(0))
        losses.append((model(x) - x[:, :3].sin()).square().mean().item())
        optimizer.close()
    assert losses[0] == pytest.approx(losses[1], rel=0.1)
    assert losses[0] < 0.1


@pytest.mark.parametrize("method", ["eigh", "newton", "newton-db"])
def test_each_root_method_trains_as_eigenvalues_do(method):
    def loss_of(method):
        model = network()
        optimizer = gg.Shampoo(model, lr=0.01, root_method=method, refresh=gg.Refresh(5))
        train(model, optimizer, range(80))
        assert optimizer.refresh_stats.failed == 0
        x = torch.randn(500, 6, generator=torch.Generator().manual_seed(0))
        return (model(x) - x[:, :3].sin()).square().mean().item()

    assert loss_of(method) == pytest.approx(loss_of("eigh"), rel=0.05)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("delay", [0, 2])
def test_a_root_that_fails_leaves_the_old_one_warns_once_and_is_tried_again(
    delay, where, monkeypatch
):
    model = network()
    optimizer = gg.SOAP(model, refresh=gg.Refresh(3, delay, where=where))
    train(model, optimizer, range(4))
    fails = threading.Event()
    fails.set()
    find_roots = optimizer.find_roots

    def breaking(unit, group):
        find = find_roots(unit, group)

        def broken(factor, old, *, on_host):
            if fails.is_set():
                raise torch.linalg.LinAlgError("no convergence")
            return find(factor, old, on_host=on_host)

        return broken

    monkeypatch.setattr(optimizer, "find_roots", breaking)
    with pytest.warns(UserWarning, match="no convergence"):
        after = train(model, optimizer, range(4, 13))
    held = roots_of(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, range(13, 16))
    later = roots_of(optimizer)
    assert all(torch.equal(held[key], later[key]) for key in held)
    assert all(p.isfinite().all() for p in after)
    assert optimizer.refresh_stats.failed > 8
    fails.clear()
    train(model, optimizer, range(16, 24))
    assert not any(
        torch.equal(value, later[key])
        for key, value in roots_of(optimizer).items()
        if len(value) > 1
    )
    optimizer.close()


def test_a_root_that_is_not_ready_is_waited_for_and_used(monkeypatch):
    model, twin = network(), network()
    refresh = gg.Refresh(4, 2)
    optimizer, other = gg.SOAP(model, refresh=refresh), gg.SOAP(twin, refresh=refresh)
    gate = threading.Event()
    find_roots = optimizer.find_roots

    def slow(unit, group):
        find = find_roots(unit, group)

        def found(factor, old, *, on_host):
            if unit.step > 1:
                assert gate.wait(HANG_SECONDS)
            return find(factor, old, on_host=on_host)

        return found

    monkeypatch.setattr(optimizer, "find_roots", slow)
    thread = threading.Thread(target=train, args=(model, optimizer, range(12)))
    thread.start()
    expected = train(twin, other, range(12))
    gate.set()
    thread.join(HANG_SECONDS)
    assert all(map(torch.equal, model.parameters(), expected))
    optimizer.close()
    other.close()


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_roots_are_computed_by_exact_products_whatever_the_user_has_set(precision, monkeypatch):
    seen = []
    model = network()
    optimizer = gg.Shampoo(model, refresh=gg.Refresh(3, 1, where="device"))
    find_roots = optimizer.find_roots

    def looking(unit, group):
        find = find_roots(unit, group)

        def found(factor, old, *, on_host):
            seen.append(torch.backends.cuda.matmul.fp32_precision)
            return find(factor, old, on_host=on_host)

        return found

    monkeypatch.setattr(optimizer, "find_roots", looking)
    torch.set_float32_matmul_precision(precision)
    try:
        train(model, optimizer, range(6))
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision("highest")
    assert set(seen) == {"ieee"}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ALL)
def test_on_a_device_a_bad_gradient_is_skipped_counted_and_said_once(name, value):
    """As there, flags stay tensors: the host never looks at a gradient of this step."""
    model = network()
    optimizer = getattr(gg, name)(model, lr=0.01, refresh=gg.Refresh(4, 2, where="device"))
    before = train(model, optimizer, range(9))
    for p in model.parameters():
        p.grad.zero_()
    model[2].weight.grad[3, 4] = value
    model[4].bias.grad[0] = value
    optimizer.step()
    for index in (2, 5):
        assert torch.equal([*model.parameters()][index], before[index])
    with pytest.warns(UserWarning, match="finite"):
        train(model, optimizer, [9])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        after = train(model, optimizer, range(10, 40))
    assert optimizer.nonfinite_steps == 1
    assert all(p.isfinite().all() for p in after)
    assert not torch.equal(after[2], before[2])


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", ALL)
def test_bases_and_roots_in_half_the_memory_train_alike(name, where):
    losses = []
    for dtype in (None, torch.bfloat16):
        model = network()
        refresh = gg.Refresh(4, 2, where=where)
        optimizer = getattr(gg, name)(model, lr=0.01, refresh=refresh, root_dtype=dtype)
        train(model, optimizer, range(60))
        twin, other = copy.deepcopy((model, optimizer))
        assert all(
            map(
                torch.equal,
                *(train(m, o, range(60, 70)) for m, o in ((model, optimizer), (twin, other))),
            )
        )
        x = torch.randn(500, 6, generator=torch.Generator().manual_seed(0))
        losses.append((model(x) - x[:, :3].sin()).square().mean().item())
        if dtype is not None:
            assert {value.dtype for value in roots_of(optimizer).values()} == {dtype}
        optimizer.close()
        other.close()
    assert losses[0] == pytest.approx(losses[1], rel=0.1)


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    "settings",
    [
        {"every": 0},
        {"every": 2.5},
        {"delay": -1},
        {"every": 4, "delay": 5},
        {"workers": 0},
        {"workers": True},
        {"where": "disk"},
    ],
)
def test_settings_outside_their_range_are_refused(settings):
    with pytest.raises(ValueError, match=f"{[*settings][-1]}="):
        gg.Refresh(**settings)


@pytest.fixture
def free_cores(monkeypatch):
    """More cores than threads of torch, which are two."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


class Held:
    """A recorder that holds workers until `release`, and says how many threads torch gives them."""

    def __init__(self, release):
        self.release, self.threads = release, set()

    def span(self, name, start, end, **_):
        if threading.current_thread() is not threading.main_thread():
            self.threads.add(torch.get_num_threads())
            self.release()
        elif name == "wait for root":
            raise KeyboardInterrupt


def until_main_waits():
    """Return when the main thread waits for the result of a future."""
    main, names = threading.main_thread().ident, []
    while names != ["wait", "exception"]:
        frame = sys._current_frames()[main]
        names = [each.f_code.co_name for each in (frame, frame.f_back) if each]


def test_an_interrupted_wait_for_a_root_keeps_it(free_cores):
    model = nn.Linear(6, 3)
    late = gg.Shampoo(model, refresh=gg.Refresh(4, 4))
    late.refresher.recorder = Held(until_main_waits)
    with pytest.raises(KeyboardInterrupt):
        train(model, late, range(40))
    late.refresher.recorder = None
    waiting = [
        value
        for state in late.state_dict()["state"].values()
        for name, value in state.items()
        if name.startswith("next_") and value.any()
    ]
    assert len(waiting) == late.refresh_stats.refreshes - 2
    late.close()


def test_a_worker_leaves_the_threads_of_others_as_they_are(free_cores):
    recorder, found = Held(lambda: None), []
    optimizer = gg.Shampoo(model := network(), refresh=gg.Refresh(4, 2))
    optimizer.refresher.recorder = recorder
    with contextlib.suppress(KeyboardInterrupt):
        train(model, optimizer, range(12))
    optimizer.close()
    later = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert recorder.threads == {1}
    assert found == [torch.get_num_threads()] == [2]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_is_told_that_it_has_no_workers(free_cores):
    torch.set_num_threads(1)  # OpenMP's own threads do not survive a fork either
    released = threading.Event()
    model = network()
    optimizer = gg.Shampoo(model, refresh=gg.Refresh(4, 4))
    optimizer.refresher.recorder = Held(released.wait)
    train(model, optimizer, range(4))  # roots wait, and none is used yet
    forks = multiprocessing.get_context("fork")
    queue = forks.SimpleQueue()

    def child():
        with pytest.raises(gg.GossipError, match="forked child"):
            train(model, optimizer, range(4, 12))
        queue.put("raised")

    process = forks.Process(target=child)
    process.start()
    process.join(HANG_SECONDS)
    is_alive = process.is_alive()
    process.kill()
    released.set()
    assert not is_alive
    assert queue.get() == "raised"
    optimizer.close()
