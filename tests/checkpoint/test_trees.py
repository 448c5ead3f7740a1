"""What comes back is what was saved, to the last bit; what cannot be is refused with its place."""

import enum
import random
from collections import Counter, OrderedDict, defaultdict, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from gossipgrad import checkpoint
from support.trees import assert_same

TEXT = st.text(max_size=8) | st.sampled_from(["$tensor", "$", "a/b"])
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | TEXT
    | st.binary(max_size=8)
    | st.lists(st.floats(width=32), max_size=3).map(torch.tensor)
)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(TEXT | st.integers(), inner, max_size=4)
    ),
    max_leaves=12,
)


def saved_and_loaded(state, tmp_path):
    checkpoint.remove_all(tmp_path / "there")
    checkpoint.save(tmp_path / "there", state, rank=0, world_size=1, step=0)
    return checkpoint.load(tmp_path / "there", rank=0)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tree=st.lists(TREES, max_size=5))
def test_any_tree_comes_back(tree, tmp_path):
    assert_same(saved_and_loaded(tree, tmp_path), tree)


DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("kind", [d for d in DTYPES if not str(d).startswith("torch.q")], ids=str)
def test_tensors_of_every_type(kind, tmp_path):
    try:
        empty = torch.empty(3, dtype=kind)
        size = empty.element_size()
        tensor = torch.arange(6 * size, dtype=torch.uint8).view(kind).reshape(2, 3)
    except (RuntimeError, TypeError, NotImplementedError):
        pytest.skip("torch itself cannot make one")
    if kind is torch.bool:
        tensor = torch.tensor([[True, False, True], [False, False, True]])
    state = [tensor, tensor[0, 0], tensor[:0], tensor.T]
    try:
        tensor.T.contiguous()
    except NotImplementedError:
        with pytest.raises(ValueError, match=str(kind)):
            saved_and_loaded(state, tmp_path)
        return
    assert_same(saved_and_loaded(state, tmp_path), state)


def test_nan_payloads_denormals_and_views(tmp_path):
    raw = torch.tensor([0x7FC00001, 0x7F800001, 0x00000001, 0x80000000 - 2**32], dtype=torch.int32)
    base = torch.arange(24.0).reshape(1, 2, 3, 4)
    state = {
        "x": raw.view(torch.float32),
        "inf": torch.tensor(float("-inf")).bfloat16(),
        "floats": [float("inf"), float("-inf"), -0.0],
        "channels_last": base.contiguous(memory_format=torch.channels_last),
        "strided": base[..., ::2],
        "expanded": torch.ones(1).expand(5),
        "conjugate": torch.tensor([1 + 2j, 3j]).conj(),
        "negative": torch.tensor([1 + 2j, 3j]).conj().imag,
    }
    assert_same(saved_and_loaded(state, tmp_path), state)


def test_tensors_of_the_same_memory_are_written_once_and_share_it_again(tmp_path):
    weight = nn.Parameter(torch.randn(1000))
    state = {"in": weight, "out": weight.detach(), "part": weight[:10], "copy": weight.clone()}
    found = saved_and_loaded(state, tmp_path)
    assert_same({k: v.detach() for k, v in state.items()}, found)
    assert type(found["in"]) is torch.Tensor
    assert found["in"].data_ptr() == found["out"].data_ptr()
    found["in"].zero_()
    assert found["copy"].any()
    assert found["part"].any(), "an overlap comes back as memory of its own"
    (path,) = tmp_path.rglob("*.safetensors")
    assert 8_000 < path.stat().st_size < 9_000


def test_arrays_and_the_state_of_random_generators(tmp_path):
    state = {
        "numpy": np.random.default_rng(0).bit_generator.state,
        "legacy": np.random.RandomState(0).get_state(),
        "python": random.Random(0).getstate(),
        "torch": torch.get_rng_state(),
        "scalars": [np.float64(0.1), np.int8(-3), np.bool_(True), np.float32("nan")],
        "arrays": [np.arange(6).reshape(2, 3).T, np.zeros((0, 2)), np.array(1.5)],
    }
    assert_same(saved_and_loaded(state, tmp_path), state)


def test_state_of_modules_optimizers_and_schedules(tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten())
    model(torch.randn(2, 3, 5, 5)).sum().backward()
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    optimizer.step()
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5])
    state = {
        "model": dict(model.state_dict()),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "scaler": torch.amp.GradScaler("cpu").state_dict(),
    }
    found = saved_and_loaded(state, tmp_path)
    assert_same(found, state)
    assert type(found["schedule"]["milestones"]) is Counter
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    schedule.load_state_dict(found["schedule"])
    assert_same(optimizer.state_dict(), state["optimizer"])
    assert saved_and_loaded(OrderedDict(a=1), tmp_path) == {"a": 1}


def test_names_that_meet_stay_apart(tmp_path):
    one = torch.ones(1)
    state = {"a/b": one, "a": {"b": 2 * one}, "__metadata__": 3 * one, "a/b#2": 4 * one, 1: {}}
    assert_same(saved_and_loaded(state, tmp_path), state)


class Colour(enum.IntEnum):
    RED = 1


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    "leaf",
    [
        {1, 2},
        Colour.RED,
        Point(1, 2),
        torch.Size([1]),
        defaultdict(int),
        1j,
        torch.float32,
        torch.Generator(),
        nn.Linear(1, 1),
        print,
        {(1, 2): 0},
        {True: 0},
        torch.eye(2).to_sparse(),
        torch.empty(2, device="meta"),
        nn.UninitializedParameter(),
        np.array([None]),
        np.zeros(2, dtype=[("x", "f4")]),
        np.array(["ab"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_written_is_refused_with_its_place(leaf, tmp_path):
    with pytest.raises(ValueError, match=r"state\['a'\]\[0\]"):
        checkpoint.save(tmp_path / "there", {"a": [leaf]}, rank=0, world_size=1, step=0)
    assert not (tmp_path / "there").exists()


def test_a_state_that_holds_itself_is_refused(tmp_path):
    state = {}
    state["again"] = {"list": [state]}
    with pytest.raises(ValueError, match=r"state\['again'\]\['list'\]\[0\]"):
        checkpoint.save(tmp_path / "there", state, rank=0, world_size=1, step=0)
