"""Budgets that hold, values that come back bit for bit, and a disk that fails."""

import random
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossipgrad.second_order import Store, Tiers

CPU = torch.device("cpu")


@pytest.fixture
def stores(tmp_path):
    made = []

    def make(device_bytes=None, host_bytes=None, disk=True):
        tiers = Tiers(device_bytes, host_bytes, tmp_path / "scratch" if disk else None)
        made.append(Store(tiers, CPU))
        return made[-1]

    yield make
    for each in made:
        each.close()


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    device=st.integers(40, 200),
    host=st.none() | st.integers(0, 200),
    has_disk=st.booleans(),
)
def test_budgets_hold_and_every_read_is_what_was_written(
    tmp_path_factory, seed, device, host, has_disk
):
    if not has_disk and host is not None:
        host = None
    rng = random.Random(seed)
    disk = tmp_path_factory.mktemp("scratch") if has_disk else None
    store = Store(Tiers(device * 8, None if host is None else host * 8, disk), CPU)
    truth = {}
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.int64]

    def check():
        assert store.stats.device_bytes <= device * 8
        assert host is None or store.stats.host_bytes <= host * 8

    for _ in range(120):
        action = rng.random()
        key = rng.randrange(12)
        if action < 0.25 or key not in truth:
            tensor = torch.randint(-99, 99, (rng.randrange(1, 5), rng.randrange(6))).to(
                rng.choice(dtypes)
            )
            truth[key] = tensor.clone()
            store.put(key, tensor)
        elif action < 0.4:
            store.prefetch(rng.sample(sorted(truth), min(3, len(truth))))
        else:
            keys = rng.sample(sorted(truth), 1)
            is_written = rng.random() < 0.6
            with store.use(keys, is_written=is_written) as tensors:
                for each, tensor in zip(keys, tensors, strict=True):
                    assert tensor.dtype == truth[each].dtype
                    assert torch.equal(tensor, truth[each])
                    if is_written:
                        tensor.add_(1)
                        truth[each].add_(1)
                check()
        check()
    for key, value in truth.items():
        with store.use([key]) as (tensor,):
            assert torch.equal(tensor, value)
    assert store.stats.highest_device_bytes <= device * 8
    store.close()


def test_without_limits_tensors_are_themselves_and_no_thread_starts(stores):
    store, threads = stores(disk=False), threading.active_count()
    tensor = torch.ones(3)
    store.put("a", tensor)
    store.prefetch(["a"])
    with store.use(["a"]) as (held,):
        assert held is tensor
    assert threading.active_count() == threads


def test_a_working_set_above_the_budget_is_refused(stores):
    store = stores(100)
    with pytest.raises(ValueError, match="device_bytes=100"):
        store.check(101)
    with pytest.raises(ValueError, match="device_bytes=100"):
        store.put("a", torch.zeros(26))
    store.put("a", torch.zeros(20))
    store.put("b", torch.zeros(20))
    with pytest.raises(ValueError, match="device_bytes=100"), store.use(["a", "b"]):
        pass
    with store.use(["b"]) as (b,):
        assert not b.any()


def test_without_room_anywhere_the_error_says_so_and_nothing_is_lost(stores):
    store = stores(80, 80, disk=False)
    for key in range(4):
        store.put(key, torch.full((10,), float(key)))
    with pytest.raises(RuntimeError, match="Tiers"):
        store.put(4, torch.zeros(10))
    for key in range(4):
        with store.use([key]) as (tensor,):
            assert tensor.unique().item() == key


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    "budgets",
    [
        {"device_bytes": -1},
        {"host_bytes": True},
        {"device_bytes": "2 GB"},
        {"host_bytes": 100},  # which nothing would use
        {"disk": "scratch"},
    ],
)
def test_budgets_that_cannot_be_are_refused(budgets):
    with pytest.raises(ValueError, match="_bytes"):
        Tiers(**budgets)
