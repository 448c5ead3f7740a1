"""What comes back is what was saved, to the last bit; what cannot be is refused with its place."""

import enum
import gc
import json
import random
import struct
import weakref
from collections import Counter, OrderedDict, defaultdict, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gossipgrad import checkpoint
from gossipgrad.checkpoint._decode import decode
from gossipgrad.checkpoint._encode import encode
from support.trees import assert_same

FLOATS = st.floats() | st.integers(0, 2**64 - 1).map(
    lambda bits: struct.unpack("<d", bits.to_bytes(8, "little"))[0]
)
TEXT = st.text(st.characters(), max_size=8) | st.sampled_from(
    ["$tensor", "$", "a/b", "\ud83d\ude00"]
)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(3, 5000).map(lambda power: -(7**power))
    | FLOATS
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
        | st.dictionaries(TEXT, inner, max_size=4).map(OrderedDict)
    ),
    max_leaves=12,
)


def saved_and_loaded(state, tmp_path):
    checkpoint.save(tmp_path / "there", state, rank=0, world_size=1, step=0)
    return checkpoint.load(tmp_path / "there", rank=0)


@given(st.lists(TREES, max_size=5))
def test_any_tree_comes_back(tree):
    encoded = encode(tree)
    text = json.dumps(encoded.tree, allow_nan=False)
    assert text.isascii()
    found = decode(json.loads(text), {k: v.clone() for k, v in encoded.tensors.items()}.pop)
    assert_same(found, tree)


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
    assert_same(saved_and_loaded(state, tmp_path), state)


def test_nan_payloads_and_denormals_of_tensors(tmp_path):
    raw = torch.tensor([0x7FC00001, 0x7F800001, 0x00000001, 0x80000000 - 2**32], dtype=torch.int32)
    state = {"x": raw.view(torch.float32), "inf": torch.tensor(float("-inf")).bfloat16()}
    assert_same(saved_and_loaded(state, tmp_path), state)


def test_tensors_keep_how_they_lie_in_memory(tmp_path):
    base = torch.arange(24.0).reshape(1, 2, 3, 4)
    state = {
        "channels_last": base.contiguous(memory_format=torch.channels_last),
        "transposed": base[0, 0].T,
        "strided": base[..., ::2],
        "expanded": torch.ones(1).expand(5),
        "conjugate": torch.tensor([1 + 2j, 3j]).conj(),
        "negative": torch.tensor([1 + 2j, 3j]).conj().imag,
    }
    found = saved_and_loaded(state, tmp_path)
    assert_same(found, state)
    for name in ("channels_last", "transposed"):
        assert found[name].stride() == state[name].stride()
    assert all(found[name].is_contiguous() for name in ("strided", "expanded", "conjugate"))


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
        "arrays": [np.arange(6).reshape(2, 3).T, np.zeros((0, 2)), np.array(1.5), np.array(["ab"])],
        "big-endian": np.arange(3, dtype=">i4"),
        "moment": np.array(["2026-01-01"], dtype="M8[D]"),
    }
    assert_same(saved_and_loaded(state, tmp_path), state)


def test_state_of_modules_optimizers_and_schedules(tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten())
    model(torch.randn(2, 3, 5, 5)).sum().backward()
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    optimizer.step()
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5])
    scaler = torch.amp.GradScaler("cpu")
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "scaler": scaler.state_dict(),
    }
    found = saved_and_loaded(state, tmp_path)
    assert_same(found, state)
    assert type(found["schedule"]["milestones"]) is Counter
    assert_same(found["model"]._metadata, state["model"]._metadata)
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    schedule.load_state_dict(found["schedule"])
    assert_same(optimizer.state_dict(), state["optimizer"])


def test_names_that_meet_stay_apart(tmp_path):
    one = torch.ones(1)
    state = {"a/b": one, "a": {"b": 2 * one}, "__metadata__": 3 * one, "a/b#2": 4 * one, 1: {}}
    assert_same(saved_and_loaded(state, tmp_path), state)


class Colour(enum.IntEnum):
    RED = 1


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (
            {1, 2},
            r"state\['a'\]\[0\] is of type builtins.set, .* write sorted\(...\) of it, a list",
        ),
        (Colour.RED, r"state\['a'\]\[0\] is of type .*Colour, .* write int\(...\) of it"),
        (Point(1, 2), r"Point, .* write tuple\(...\) of it"),
        (torch.Size([1]), r"torch.Size, .* write tuple\(...\) of it"),
        (defaultdict(int), r"collections.defaultdict, .* write dict\(...\) of it"),
        (1j, "complex, .* write a tensor of it"),
        (torch.float32, r"torch.dtype, .* write str\(...\) of it"),
        (torch.Generator(), r"Generator, .* write its get_state\(\)"),
        (nn.Linear(1, 1), r"Linear, .* write its state_dict\(\)"),
        (print, "without pickling it: write the numbers, texts and tensors it is made of"),
        ({(1, 2): 0}, r"state\['a'\]\[0\] has the key \(1, 2\) of type tuple: .* str or int"),
        ({True: 0}, "has the key True of type bool"),
        (torch.eye(2).to_sparse(), r"is a sparse tensor, .* to_dense\(\)"),
        (torch.empty(2, device="meta"), r"is on the meta device .* to_empty\(\)"),
        (nn.UninitializedParameter(), "is a UninitializedParameter, a kind of tensor that"),
        (np.array([None]), "is an array of object, which cannot be written"),
        (np.zeros(2, dtype=[("x", "f4")]), "is an array of .*, which cannot be written"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_cannot_be_written_is_refused_with_its_place(leaf, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        checkpoint.save(tmp_path / "there", {"a": [leaf]}, rank=0, world_size=1, step=0)
    assert not (tmp_path / "there").exists()


def test_a_state_that_holds_itself_is_refused():
    state = {}
    state["again"] = {"list": [state]}
    with pytest.raises(ValueError, match=r"state\['again'\]\['list'\]\[0\] nests deeper than 100"):
        encode(state)


@pytest.mark.parametrize(
    "tree",
    [
        {"$tensor": "nowhere"},
        {"$tensor": "w", "stride": [10**12, 1]},
        {"$tensor": "w", "stride": "no"},
        {"$tensor": "w", "dtype": "float64"},
        {"$tensor": "w", "dtype": "complex128"},
        {"$tensor": "w", "dtype": "os"},
        {"$array": "w", "dtype": "O", "shape": [1]},
        {"$array": "w", "dtype": "f8", "shape": [-5]},
        {"$bytes": "?"},
        {"$text": 3},
        {"$float": "00"},
        {"$float": 3},
        {"$int": "0y1"},
        {"$dict": [1]},
        {"$dict": [[[], 1]]},
        {"$call": "os.system"},
    ],
    ids=str,
)
def test_trees_that_nobody_has_written_are_refused(tree):
    tensors = {"w": torch.arange(6.0).reshape(2, 3)}

    def tensor(name):
        if name not in tensors:
            raise ValueError(f"no tensor {name!r}")
        return tensors[name]

    with pytest.raises(ValueError):  # noqa: PT011
        decode(tree, tensor)


def test_what_was_loaded_goes_with_its_last_user(tmp_path):
    """Without waiting for a collection of garbage, which may be long in coming."""
    checkpoint.save(tmp_path, {"w": torch.ones(3)}, rank=0, world_size=1, step=0)
    gc.collect()
    gc.disable()
    try:
        state = checkpoint.load(tmp_path, rank=0)
        gone = weakref.ref(state["w"])
        del state
        assert gone() is None
    finally:
        gc.enable()
